# Every target does its own set-up on a fresh machine.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help demo test check format bench clean

help:
	@echo "make demo    set up, train four mechanisms on real data, write primaldual-demo/report.html"
	@echo "make test    set up, run the tests"
	@echo "make check   set up, lint, check formatting and types"
	@echo "make format  reformat"
	@echo "make bench   speed on this machine, as ratios to torch's fused attention"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[demo,test,dev]"
	touch $@

demo: $(READY)
	$(BIN)/primaldual demo

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/attention_cpu.py
	$(BIN)/primaldual bench kernels
	$(BIN)/primaldual bench layers

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
