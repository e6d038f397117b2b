# Modelyard from a clean clone: `make serve`. `make` alone lists the targets.

CONFIG := deployments/local.yaml
TARGET := cpu
PYTHON ?= python3
SEED := 1
SCENARIO := local
URL := http://127.0.0.1:8000
REQUESTS := 20000

# One environment per target, so that switching back and forth installs nothing twice.
VENV := .venv$(if $(filter-out cpu,$(TARGET)),-$(TARGET))
LOCK := locks/$(TARGET).txt
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-deps

# What the CPU build of torch is called in the lock; empty for other targets.
CPU_TORCH := $(shell grep --no-messages '^torch==.*+cpu$$' $(LOCK))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: install serve stop loadtest test lint check chaos fuzz lock clean help

install: $(VENV)/.installed ## Install what TARGET needs, and start nothing

serve: $(VENV)/.installed ## Install if needed, deploy CONFIG on a local Ray, follow it; Ctrl-C stops everything
	@$(BIN)/modelyard serve $(CONFIG)

stop: $(VENV)/.installed ## Stop what `make serve` started, from another terminal
	@$(BIN)/modelyard stop

loadtest: $(VENV)/.installed-dev ## Two minutes of load on what `make serve` runs, with progress and a report
	@$(BIN)/python -m loadtest.load run $(SCENARIO) --url $(URL)

test: $(VENV)/.installed-dev ## Run every test, those with Ray Serve and with the real engine too
	@$(BIN)/python -m pytest --durations=20

lint: $(VENV)/.installed-dev ## Style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint ## Style, types, and the tests that need neither Ray Serve, an engine nor a browser (minutes)
	@$(BIN)/python -m pytest -m "not serve and not engine and not browser and not chaos and not fuzz"

chaos: $(VENV)/.installed-dev ## 1,000 requests from 64 clients while replicas, engines and gateways are killed; minutes
	@SEED=$(SEED) $(BIN)/python -m pytest -m chaos --capture=no tests/chaos

fuzz: $(VENV)/.installed-dev ## REQUESTS odd requests at a gateway with the fake engine; 2,000 examples of each property; minutes
	@SEED=$(SEED) REQUESTS=$(REQUESTS) $(BIN)/python -m pytest -m fuzz --capture=no tests/fuzz
	@$(BIN)/python -m pytest -m hypothesis --hypothesis-profile=many-examples --hypothesis-seed=$(SEED)

lock: ## Write locks/*.txt anew from pyproject.toml
	locks/refresh.sh $(PYTHON) .modelyard/lock

clean: ## Remove the environments and caches of this folder (not the models under MODELYARD_HOME)
	rm -rf .venv .venv-* .modelyard .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
	find serve_app tests loadtest -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s  %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@printf '\n  Variables: CONFIG=%s  TARGET=%s (cpu or gpu)  PYTHON=%s  SEED=%s (of chaos and fuzz)  REQUESTS=%s (of fuzz)\n' \
	  '$(CONFIG)' '$(TARGET)' '$(PYTHON)' '$(SEED)' '$(REQUESTS)'
	@printf '             SCENARIO=%s  URL=%s (of loadtest)\n' '$(SCENARIO)' '$(URL)'
	@printf '  On GPUs:   make serve CONFIG=deployments/gpu.yaml TARGET=gpu\n'

# Stamps: each environment is installed once per change of its lock, from scratch, so that it holds the lock and no more.
$(VENV)/.locked: $(LOCK)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Modelyard needs Python 3.11 or newer; $(PYTHON) is: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@echo "Installing $(LOCK) into $(VENV): once per change of the lock, a few minutes."
	@$(PYTHON) -m venv --clear $(VENV)
	@echo '*' > $(VENV)/.gitignore
	@# The CPU build of torch is not on PyPI. PyTorch's own index is asked for it only where pip finds it nowhere else.
	@$(if $(CPU_TORCH),$(PIP) $(CPU_TORCH) || { echo "Not there: asking PyTorch's own index."; \
	  $(PIP) --extra-index-url https://download.pytorch.org/whl/cpu $(CPU_TORCH); })
	@$(PIP) -r $(LOCK)
	@touch $@

$(VENV)/.installed: $(VENV)/.locked pyproject.toml
	@$(PIP) --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed locks/dev.txt
	@$(PIP) -r locks/dev.txt
	@touch $@
