# Everything runs in .venv; the first target that needs it makes it.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: install quickstart quickstart-zh test test-all test-smoke lint bench-smoke clean

install: $(VENV)/.installed

# torch first and pinned: an open range may bring a CUDA build of several gigabytes to a machine without a GPU
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[serve]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[hf,serve,export,dev]'
	touch $@

# 290 MB, for the interpreter that runs the kernels on a CPU; 165 MB, to drive the Chromium of this machine
$(VENV)/.installed-all: $(VENV)/.installed-dev
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[kernels,browser]'
	touch $@

quickstart: install
	$(BIN)/meshwright train examples/quickstart.yaml

quickstart-zh: install
	$(BIN)/meshwright train examples/quickstart-zh.yaml

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow and not gpu and not alone"
	$(BIN)/python -m pytest -m "alone and not slow and not gpu"

# may be stopped: the next one leaves out what passed on the same commit, files and packages (tests/resume.py)
test-all: $(VENV)/.installed-all
	$(BIN)/python -m pytest -rs -p tests.resume -n 2 --dist loadgroup -m "not gpu and not alone"
	$(BIN)/python -m pytest -rs -p tests.resume -m "alone and not gpu"

test-smoke: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/test_smoke.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check meshwright tests examples
	$(BIN)/ruff format --check meshwright tests examples
	$(BIN)/mypy

bench-smoke: $(VENV)/.installed-dev
	$(BIN)/meshwright bench overhead --repeat 3

clean:
	rm -rf $(VENV) runs build dist
