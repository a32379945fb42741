# Everything below works on a machine that has only Python 3.11-3.13 and a package registry: the environment in
# $(VENV) is made on first use, and a stamp file keeps a second run from installing anything.

# The first supported interpreter found. Name another by `make test PYTHON=python3.13`.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo $$python && break; done)
VENV ?= .venv
# Installed before the package, so that pip takes a CPU build where its configuration offers one and this machine
# has no GPU, and so that another release or build can be named without touching pyproject.toml.
TORCH ?= torch==2.13.0
# Further pins installed with it (`make test-versions` pins the ends of the supported ranges).
PINS ?=
WORKERS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
# Nothing here may reach for a hub; one thread a test worker, as the workers share the cores.
TEST_ENV := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: help demo test test-gpu test-versions test-oldest test-newest lint format docs clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.installed  ## train a tiny CLIP, fine-tune it with LoRA, load it back; minutes on two CPU cores
	HF_HUB_OFFLINE=1 $(BIN)/hf-infcl demo

test: $(VENV)/.installed-test  ## everything that needs no GPU
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

test-gpu: $(VENV)/.installed-test  ## tests/gpu, on a machine with a CUDA device
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)

test-versions: test-oldest test-newest  ## the suite at both ends of the supported releases (each in its own environment)

# The interpreter of torch 2.11's Triton (3.6) takes arrays of one element for numbers, which NumPy 2.4 ended.
test-oldest:
	$(MAKE) test VENV=.venvs/oldest TORCH=torch==2.11.0 \
		PINS="transformers==5.17.0 peft==0.21.0 accelerate==1.10.0 datasets==4.0.0 numpy==2.3.5"

test-newest:
	$(MAKE) test VENV=.venvs/newest TORCH=torch==2.13.0 PINS="transformers==5.24.0"

lint: $(VENV)/.installed-lint  ## ruff, mypy and the layering
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-lint  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-docs  ## the reference, from the docstrings, into docs/reference
	HF_HUB_OFFLINE=1 $(BIN)/python docs/build_reference.py

clean:  ## remove the environments, the caches and the built reference
	rm -rf $(VENV) .venvs .mypy_cache .ruff_cache .pytest_cache .import_linter_cache docs/reference dist build

$(VENV)/.created:
	@test -n "$(PYTHON)" || { echo "hf_infcl needs Python 3.11, 3.12 or 3.13 on the PATH; name one by PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	touch $@

$(VENV)/.torch: $(VENV)/.created
	$(PIP) install "$(TORCH)" $(PINS)
	touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	$(PIP) install -e .
	touch $@

$(VENV)/.installed-%: pyproject.toml $(VENV)/.torch
	$(PIP) install -e ".[$*]"
	touch $@
