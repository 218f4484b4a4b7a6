# make run: set up and rebuild the demo. make test: set up and run the tests. Nothing outside this folder is changed.
PYTHON ?= python3
VENV := $(CURDIR)/.venv
export PATH := $(VENV)/bin:$(PATH)
export DO_NOT_TRACK := 1
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export MLFLOW_DISABLE_TELEMETRY := true
# For example TORCH_INDEX=https://download.pytorch.org/whl/cpu, where PyPI's wheel (with CUDA) is not wanted.
TORCH_INDEX ?=
# Tests that run side by side, and which `make test` runs.
WORKERS ?= 2
TESTS ?= not slow
INSTALL := python -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints.txt
# On all cores; pip takes one. A few files are templates, not Python: no error.
COMPILE := python -m compileall -qq -j 0 $(VENV)/lib || true
INSTALL_TORCH := $(INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch

.PHONY: run smollm2 test test-slow test-exhaustive test-quantize test-real test-all setup setup-dev lint types layers check site seeds frontier audit help

run: setup  ## Rebuild the demo: data, models, metrics, report
	dvc repro
	@echo; echo "report: report/index.html   answers: leash chat models/policy --beside models/sft   one PPO step: leash trace"
	@echo "MLflow's page: leash ui   commit and checks: leash doctor"

test: setup-dev  ## Run the fast tests: the mathematics, the contract, a tiny whole pipeline
	python -m pytest --numprocesses $(WORKERS) --dist worksteal --durations 40 -m "$(TESTS)"

test-slow: setup-dev  ## Run the slow tests: kills, a million rows, dead servers, full disks
	python -m pytest --numprocesses $(WORKERS) --dist worksteal --durations 40 -m "slow and not exhaustive"

test-exhaustive: setup-dev  ## Run what repeats a mechanism that other tests have covered: all kills, all architectures
	python -m pytest --numprocesses $(WORKERS) --dist worksteal -m exhaustive

test-quantize: $(VENV)/quantize  ## Run the tests of 4-bit weights, with bitsandbytes, which is optional
	PYTHONPATH=$(VENV)/quantize python -m pytest -m quantize $$(grep -rl mark.quantize tests --include='test_*.py')

test-real: setup-dev  ## Run the tests of a pretrained model, SmolLM2-135M-Instruct (3 minutes, a download of 93 MB)
	LEASH_FETCH=1 python -m pytest -m real_model

test-all:  ## Run all of them
	$(MAKE) test
	$(MAKE) test-quantize
	$(MAKE) test-real
	$(MAKE) test-slow
	$(MAKE) test-exhaustive

help:  ## This list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 12

smollm2: setup  ## SmolLM2-135M-Instruct as a base model: 93 MB into data/raw/, checked, tracked by DVC
	$(INSTALL) --editable '.[gguf]'
	python -m flows.cli fetch-model smollm2

setup: $(VENV)/.run-installed  ## Create .venv and install exact versions

setup-dev: $(VENV)/.dev-installed  ## The same, with what the tests need

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Leash needs Python 3.11 or newer: make run PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run-installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing into .venv: about 2 GB with a CPU wheel of PyTorch, several GB more with CUDA; some minutes."
	$(INSTALL_TORCH)
	$(INSTALL) --editable .
	@$(COMPILE)
	@touch $@

$(VENV)/.dev-installed: $(VENV)/.run-installed
	$(INSTALL) --editable '.[dev]'
	@$(COMPILE)
	@touch $@

$(VENV)/quantize: $(VENV)/.dev-installed
	$(INSTALL) --no-deps --target $@ bitsandbytes
	@touch $@

lint: setup-dev  ## Format and lint, changing nothing
	ruff format --check .
	ruff check .

types: setup-dev  ## mypy, strict
	mypy

layers: setup-dev  ## Imports go down only; every stage depends on exactly the code it imports
	lint-imports
	python tests/closure.py

check: lint types layers test  ## Lint, types, layers and the fast tests; CI runs the slow ones, too

site: setup  ## Copy the demo's report and a trace into docs/site/, as static pages; commit its results first
	python -m flows.cli run report
	python -m flows.cli trace --page work/trace.html 'What are good options for breakfast?'
	python docs/make_site.py demo 'The demo: a model of one million parameters, trained from nothing on two CPU cores.' report work/trace.html

seeds: setup  ## The demo for three training seeds (half an hour; continues where it stopped)
	python -m flows.cli study -S seed=1,2,3 --objective gold_policy --name seeds

frontier: setup  ## Three seeds at three β: the frontier at equal KL, tokens and samples (an hour and a half)
	python -m flows.cli study -S ppo.kl.coef=0.05,0.13,0.3 -S seed=1,2,3 --objective gold_policy --constraint 'kl_per_sequence < 3' --name frontier

audit: setup-dev  ## Known vulnerabilities of the pinned versions; needs a network, and fails without one
	@pip-audit --strict --requirement constraints.txt --no-deps --disable-pip \
		&& echo "audit: passed; no known vulnerability in constraints.txt" \
		|| { echo "audit: FAILED; raise the versions listed above in constraints.txt, or give pip-audit a network"; exit 1; }
