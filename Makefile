# Needs only make and Python 3.10 or newer. Everything is installed into $(VENV), once, and again when pyproject.toml
# changes.
#
#   make test VENV=/path/to/venv       another environment (made if it is not there)
#   make test PYTHON=python3.12        another interpreter for a new environment
#   make test ARGS="-k conv"           further arguments for pytest, the demo or the benchmark

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

# Pinned, and installed before anything that would ask for "some torch": the newest one may bring gigabytes of CUDA
# libraries with it.
TORCH  ?= torch==2.13.0

PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --disable-pip-version-check --no-input $(if $(CI),--progress-bar=off --quiet)
DEV    := $(VENV)/.tilewright-dev
BENCH  := $(VENV)/.tilewright-bench

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint format bench clean distclean

help:
	@echo "make demo       compile a model and show what was gained"
	@echo "make test       the tests (ARGS=\"-m slow\" for the slow ones)"
	@echo "make lint       ruff, mypy, and the one-way rule for imports"
	@echo "make format     let ruff format the code and fix what it can"
	@echo "make bench      the CPU benchmark against the other compilers (ARGS=\"--models resnet50\")"
	@echo "make venv       only make the environment in $(VENV)"
	@echo "make clean      remove caches and build output (make distclean: the environment .venv too)"

venv: $(DEV)

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "make: Tilewright needs Python 3.10 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "      Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)

# The interpreter itself is an order-only prerequisite: it is a link, and its date says nothing.
$(DEV): pyproject.toml | $(PY)
	$(PIP) "$(TORCH)"
	$(PIP) "$(TORCH)" -e ".[dev]"
	@touch $@

$(BENCH): pyproject.toml $(DEV)
	$(PIP) "$(TORCH)" -e ".[bench]"
	@touch $@

demo: $(DEV)
	$(PY) -m tilewright.cli demo $(ARGS)

# One file of tests stays in one process, so that its module-wide fixtures are made once.
test: $(DEV)
	$(PY) -m pytest -n auto --maxprocesses=8 --dist=loadfile $(ARGS)

lint: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

format: $(DEV)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

bench: $(BENCH)
	$(PY) benchmarks/cpu_models.py $(ARGS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find tilewright tests benchmarks docs examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf .venv
