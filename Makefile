# Every target makes its own environment first; after that, only what changed is done again.
#   make demo    the story: a prefix outlives the engine that computed it (real 0.5B model, no root needed);
#                demo-transformers tells it through the adapter for Hugging Face transformers
#   make test    the quick tests        make slow    the longer suites      make test-faults   20,000 seeded faults
#   make lint    ruff and mypy          make fmt     format in place
#   make bench   measure this machine   make model   fetch the demo model
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
KILLS ?= 100

SHELL := /bin/bash
.DELETE_ON_ERROR:
.PHONY: demo demo-transformers test slow test-faults lint fmt bench model clean help
.DEFAULT_GOAL := help

help:
	@sed -n '2,6s/^# //p' Makefile

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Forebay needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) model
	$(BIN)/python bench/demo.py $(DEMO_FLAGS)

demo-transformers: $(STAMP) model
	$(BIN)/python bench/demo_transformers.py $(DEMO_FLAGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) -m "not slow" $(TEST_FLAGS)

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=890 $(TEST_FLAGS)

# 20,000 seeded faults; FAULT_FLAGS="--share 0.1" takes a tenth, "--seed N" replays.
test-faults: $(STAMP)
	PYTHONPATH=. $(BIN)/python -m tests.faults.campaign $(FAULT_FLAGS)
	FOREBAY_KILLS=$(KILLS) $(BIN)/python -m pytest -s -o faulthandler_timeout=890 tests/faults/test_kill_under_load.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/forebay bench local $(BENCH_FLAGS)
	$(BIN)/forebay bench index $(BENCH_FLAGS)

# Fetched once into $$FOREBAY_CACHE_DIR (default ~/.cache/forebay); the tool itself skips what is whole already.
model: $(STAMP)
	$(BIN)/python bench/fetch_model.py

clean:
	rm -rf out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
