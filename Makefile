# Two commands set up everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: serve test check clean

serve: $(VENV)/.installed
	$(BIN)/quire serve smollm2 --sample "What is the capital of France? Answer in one word."

test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Quire needs Python 3.11 or newer, and $(PYTHON) is %d.%d; say which: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

KERNELS := $(wildcard src/quire/ops/native/*.[ch])

$(VENV)/.installed: $(BIN)/python pyproject.toml $(KERNELS)
	$(BIN)/python scripts/install.py -e '.[serve,cpu]'
	touch $@

$(VENV)/.installed-dev: $(BIN)/python pyproject.toml $(KERNELS)
	$(BIN)/python scripts/install.py -e '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/quire/ops/*.so
