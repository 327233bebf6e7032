# make train and make test set up everything that they need, once; `make help` lists all targets.
#   PYTHON=python3.12    the interpreter that makes the environment
#   VENV=                use PYTHON's own packages: no environment, nothing is installed
#   TORCH=torch==2.11.0 VENV=.venv-2.11    another PyTorch, in an environment of its own
#   ARGS="..."           further arguments of the command

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=

# Without a GPU, an exact version lets pip choose a CPU build if one is available.
TORCH ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo torch triton || echo torch==2.13.0)

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
else
PY        := $(VENV)/bin/python
HAS_TORCH := $(VENV)/.has-torch
HAS_TRAIN := $(VENV)/.has-train
HAS_DEV   := $(VENV)/.has-dev
HAS_DOCS  := $(VENV)/.has-docs
HAS_TUTORIALS := $(VENV)/.has-tutorials
endif
# One more than the cores, because tests of several processes wait for each other.
WORKERS = $(shell $(PYTHON) -c 'import os; print(min(os.cpu_count() + 1, 8))')
PIP = $(PY) -m pip install --quiet --disable-pip-version-check

.PHONY: help train test attack parity lint format docs tutorials bench clean
.DEFAULT_GOAL := help

help:
	@echo "make train      train a small convolutional SNN on handwritten digits (options: ARGS='--help')"
	@echo "make test       run all tests (with another PyTorch: TORCH=torch==2.11.0 VENV=.venv-2.11)"
	@echo "make attack     random networks, damaged files, faults and folders (ARGS='--minutes 60 --seed 1')"
	@echo "make parity     compare with SpikingJelly, snnTorch and Norse, which it downloads"
	@echo "make lint       ruff and mypy"
	@echo "make format     fix and format the code with ruff"
	@echo "make docs       build the documentation site in build/site"
	@echo "make bench      run the benchmarks and rebuild the tables of the documentation"
	@echo "make tutorials  run the notebooks in docs/tutorials"
	@echo "make clean      remove caches and build outputs (not $(VENV), not runs/)"

train: $(HAS_TRAIN)
	$(PY) -m spikefuse train $(ARGS)

test: $(HAS_DEV)
	$(PY) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

attack: $(HAS_DEV)
	$(PY) -m tests.attack $(ARGS)

# The other libraries get a folder of their own, because other tests would fail on their warnings.
PARITY = $(PIP) --no-deps --upgrade --target .parity --requirement tests/parity/requirements.txt

parity: $(HAS_DEV)
	$(PARITY)
	PYTHONPATH=.parity $(PY) -m pytest -n $(WORKERS) tests/parity $(ARGS)

lint: $(HAS_DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(HAS_DEV)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(HAS_DOCS)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

tutorials: $(HAS_TUTORIALS)
	$(PARITY)
	PYTHONPATH=.parity $(PY) docs/site/notebooks.py

bench: $(HAS_TRAIN)
	$(PY) -m benchmarks $(ARGS)

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find spikefuse tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

ifneq ($(strip $(VENV)),)
$(HAS_TORCH):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "spikefuse needs Python 3.11 or newer, this is %d.%d: try make PYTHON=python3.11" % sys.version_info[:2])'
	@echo "setting up $(VENV) with $(TORCH), once: about two minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(TORCH)
	@touch $@

$(HAS_TRAIN): pyproject.toml $(HAS_TORCH)
	@echo "installing spikefuse with the trainer"
	@$(PIP) --editable '.[train]'
	@touch $@

$(HAS_DEV): $(HAS_TRAIN)
	@echo "installing the test dependencies"
	@$(PIP) --editable '.[train,dev]'
	@touch $@

$(HAS_TUTORIALS): $(HAS_TRAIN)
	@echo "installing the tools of the notebooks"
	@$(PIP) --editable '.[train,tutorials]'
	@touch $@

$(HAS_DOCS): pyproject.toml $(HAS_TORCH)
	@echo "installing the tools of the documentation"
	@$(PIP) --editable '.[docs]'
	@touch $@
endif
