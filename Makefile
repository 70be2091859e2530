# Every target does its own set-up on a fresh machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal
READY  := $(VENV)/.ready

.PHONY: help demo test test-deep test-gpu check format bench clean

help:
	@echo "make demo       set up, train four mechanisms on real data, write primaldual-demo/report.html"
	@echo "make test       set up, run the tests"
	@echo "make test-deep  set up, run the long sweeps: kernels as they are compiled for a GPU, full cross products"
	@echo "make test-gpu   set up, run the tests that need a GPU, each file in a process of its own"
	@echo "make check      set up, lint, check formatting and types"
	@echo "make format     reformat"
	@echo "make bench      speed on this machine, as ratios to torch's fused attention"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[demo,test,dev]"
	touch $@

demo: $(READY)
	$(BIN)/primaldual demo

test: $(READY)
	$(PYTEST)

test-deep: $(READY)
	$(PYTEST) -m deep

test-gpu: $(READY)
	$(BIN)/python tests/on_gpu.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/primaldual bench kernels --preset targets
	$(BIN)/primaldual bench kernels
	$(BIN)/primaldual bench layers

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
