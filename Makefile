# Two commands set up everything on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# what a process compiles the next one need not: the tests start hundreds, and each would spend seconds on torch
export PYTHONDONTWRITEBYTECODE :=

.PHONY: serve test tests matrix check lint types docs wheel deploy-check clean

serve: $(VENV)/.installed
	$(BIN)/quire serve smollm2 --sample "What is the capital of France? Answer in one word."

# types are checked beside the tests: a core that waits for a test has time for both
test: lint
	$(MAKE) --no-print-directory -j 2 types tests

# three processes for two cores: a quarter of what a test of processes takes is waiting
tests: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

matrix: $(VENV)/.installed-dev
	QUIRE_MATRIX=all $(BIN)/python -m pytest -n 2 --dist load tests/e2e tests/engine/test_losses.py tests/prepare/test_stage.py tests/prepare/test_shard.py

check: lint types

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(VENV)/.installed-dev
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "the site is in build/site: open build/site/index.html"

# for a release: the sdist, a wheel with kernels for this machine's architecture and its glibc or newer, and one without kernels
wheel: $(VENV)/.installed-release
	rm -rf dist build/wheel
	QUIRE_KERNELS=0 $(BIN)/python -m build --outdir dist
	QUIRE_KERNELS=1 $(BIN)/python -m build --outdir build/wheel
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/*.whl
	ls dist

# linters that the package index does not have for this machine are named by the script, as are those of apt
deploy-check: $(VENV)/.installed-deploy
	$(BIN)/python scripts/deploy_check.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit("Quire needs Python 3.11 or newer, and $(PYTHON) is %d.%d; say which: make PYTHON=python3.12 ..." % v[:2])'
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

KERNELS := $(wildcard src/quire/ops/native/*.[ch])

$(VENV)/.installed: $(BIN)/python pyproject.toml setup.py $(KERNELS)
	$(BIN)/python scripts/install.py -e '.[serve,cpu]'
	touch $@

$(VENV)/.installed-dev: $(BIN)/python pyproject.toml setup.py $(KERNELS)
	$(BIN)/python scripts/install.py -e '.[dev]'
	touch $@ $(VENV)/.installed

# the site reads Quire's sources and imports nothing of them: only what the extra `docs` names is installed
$(VENV)/.installed-docs: $(BIN)/python pyproject.toml
	$(BIN)/python scripts/install.py $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

$(VENV)/.installed-release: $(BIN)/python pyproject.toml
	$(BIN)/python scripts/install.py $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["release"])')
	touch $@

DEPLOY_TOOLS = $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["deploy"])')

$(VENV)/.installed-deploy: $(BIN)/python pyproject.toml
	for tool in $(DEPLOY_TOOLS); do $(BIN)/python scripts/install.py "$$tool" || echo "$$tool could not be installed"; done
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info src/quire/ops/*.so
