# Needs Python 3.11 and make, nothing else: every target prepares what it needs itself.
#
#   make demo    tune the bundled classifier, in a small environment of its own (build/demo)
#   make docs    write the pages of the reference, and the site of the documents to build/site, and check its links
#   make test    lint, type check and run the tests
#   make simulate  play 100,000 whole runs with faults on a simulated machine: SEEDS=1000 for fewer, SEED=17 for one
#   make setup   prepare .venv for the tests, with every extra but tensorrt, which needs a GPU
#   make dist    build wheel and source distribution into dist, check them, and run what the wheel installs
#   make torch   add PyTorch to .venv, for the tests that export modules; they are skipped without it
#   make lock    resolve requirements.lock again after a change in pyproject.toml
#   make clean   remove .venv, build, caches and what the demo wrote

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
LOCKED := $(VENV)/.locked
READY := $(VENV)/.ready
DEMO := build/demo
DOCS := build/docs
LOCKER := build/locker
PACKER := build/packer
PIP := -m pip --disable-pip-version-check --no-input install --quiet --no-compile

.PHONY: python setup test simulate torch demo docs dist lock clean
.DEFAULT_GOAL := setup

setup: $(READY)

$(READY): $(LOCKED) pyproject.toml
	$(BIN)/python $(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(LOCKED): requirements.lock | python
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python $(PIP) -r requirements.lock
	@touch $@

test: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -n auto --dist loadgroup -rs

SEEDS ?= 100000
simulate: setup
	PYTHONPATH=tests $(BIN)/python -m simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

# Not in the lock: on Linux its usual wheel brings gigabytes for GPUs, of which the tests need none.
torch: setup
	$(BIN)/python $(PIP) -c requirements.lock torch==2.13.0 onnxscript==0.7.2

demo: $(DEMO)/.ready
	$(DEMO)/bin/python demo/run.py

# The package with nothing but its own dependencies, in the versions of the lock.
$(DEMO)/.ready: requirements.lock pyproject.toml | python
	$(PYTHON) -m venv --clear $(DEMO)
	$(DEMO)/bin/python $(PIP) -c requirements.lock -e .
	@touch $@

# The wheel is made of the source distribution, as an index's users may do.
dist: | python
	rm -rf dist
	$(PYTHON) -m venv --clear $(PACKER)
	$(PACKER)/bin/python $(PIP) build twine
	$(PACKER)/bin/python -m build
	$(PACKER)/bin/twine check --strict dist/*
	$(PYTHON) -m venv --clear $(PACKER)
	$(PACKER)/bin/python $(PIP) -c requirements.lock dist/*.whl
	$(PACKER)/bin/qdqtune --version
	$(PACKER)/bin/qdqtune doctor

# A warning, such as one about a link that leads nowhere, is an error.
docs: $(DOCS)/.ready
	$(DOCS)/bin/python docs/site/reference.py
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html is the first page"

$(DOCS)/.ready: requirements.lock pyproject.toml | python
	$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python $(PIP) 'pip>=25.1'
	$(DOCS)/bin/python $(PIP) -c requirements.lock -e . --group docs
	@touch $@

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "qdqtune needs Python 3.11 or newer, which '$(PYTHON)' is not: make PYTHON=/path/to/python3.11" >&2; exit 2; }

# uv resolves for every platform and Python at once; pins of the present file are kept where they still fit.
lock:
	$(PYTHON) -m venv --clear $(LOCKER)
	$(LOCKER)/bin/python $(PIP) uv
	$(LOCKER)/bin/uv pip compile pyproject.toml --extra openvino --extra tensorrt-rtx --extra qnn --extra ray --extra data \
	  --group dev --group docs --universal --python-version 3.11 \
	  --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" --quiet -o requirements.lock

clean:
	rm -rf $(VENV) build dist demo_output src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
