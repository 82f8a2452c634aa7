# Two commands: `make run` and `make test`. Each does everything it needs on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test lint types layers tests soak bench clean

run: $(VENV)/.installed  ## install, fetch the default model, and serve it at http://127.0.0.1:8000
	$(BIN)/segue serve

test: lint types layers tests  ## everything that must hold

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

layers: $(VENV)/.installed-dev
	$(BIN)/lint-imports

tests: $(VENV)/.installed-dev
	$(BIN)/segue models --fetch smollm2
	$(BIN)/python -m pytest

soak: $(VENV)/.installed-dev  ## the property tests at length, and the server under a crowd
	$(BIN)/python -m pytest tests/property --hypothesis-profile=soak --timeout=0
	$(BIN)/python -m pytest tests/e2e -m soak --timeout=0

bench: $(VENV)/.installed-dev  ## add VLLM=path/to/python to measure vLLM beside
	$(BIN)/python benchmarks/bookkeeping.py $(if $(VLLM),--vllm-python $(VLLM))
	$(BIN)/python benchmarks/states.py
	$(BIN)/python benchmarks/cpu.py $(if $(VLLM),--vllm-python $(VLLM))
	$(BIN)/python benchmarks/server.py $(if $(VLLM),--vllm-python $(VLLM))

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[server]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
