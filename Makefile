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
	$(PYTHON) -m venv $(VENV)

KERNELS := $(wildcard src/quire/ops/native/*.[ch])

$(VENV)/.installed: $(BIN)/python pyproject.toml $(KERNELS)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[serve,cpu]'
	touch $@

$(VENV)/.installed-dev: $(BIN)/python pyproject.toml $(KERNELS)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/quire/ops/*.so
