# `make` alone lists the targets. PYTHON picks the Python of the virtual environments: make setup PYTHON=python3.12
PYTHON ?= python3
OLDEST_TRANSFORMERS := 5.18.0

VENV := .venv
OLDEST := .venv-oldest
VLLM := .venv-vllm
SGLANG := .venv-sglang
SECONDS ?= 3600

.PHONY: help setup run test lint test-engines test-stack soak clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## make .venv and install everything into it; the targets below do it by themselves

run: setup ## the demo: a real engine under traffic, guarded (options: make run ARGS='--seconds 30 --port 0')
	$(VENV)/bin/kv-canary demo $(ARGS)

test: setup ## the unit tests, and the fault catalogue
	$(VENV)/bin/python -m pytest tests/unit tests/model tests/faults

lint: setup ## ruff and mypy
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy

test-engines: setup $(OLDEST)/.installed $(VLLM)/.installed $(SGLANG)/.installed ## real engines: the newest and the oldest transformers, vLLM, SGLang
	@echo "transformers, the newest that .venv has:"
	$(VENV)/bin/python -m pytest -m engines tests/engines
	@echo "transformers $(OLDEST_TRANSFORMERS):"
	$(OLDEST)/bin/python -m pytest -m engines tests/engines
	@echo "vLLM, in $(VLLM):"
	$(VLLM)/bin/python -m pytest -m engines tests/engines
	@echo "SGLang, in $(SGLANG):"
	SGLANG_USE_CPU_ENGINE=1 $(SGLANG)/bin/python -m pytest -m engines tests/engines

test-stack: setup ## the whole chain: image, Prometheus, Alertmanager; installs Debian packages that are missing
	tests/stack/install.sh
	$(VENV)/bin/python -m pytest -m stack tests/stack

# half of the time for each engine
soak: setup ## engines under pressure for an hour, with a fault now and then (less: make soak SECONDS=600)
	$(VENV)/bin/python -m kv_canary.faults.soak --seconds $$(($(SECONDS) / 2))
	$(VENV)/bin/python -m kv_canary_transformers.soak --seconds $$(($(SECONDS) / 2))

clean: ## remove all that make made: caches, build results and the virtual environments
	rm -rf $(VENV) $(OLDEST) $(VLLM) $(SGLANG) .stack build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find daemon adapters tests -name __pycache__ -exec rm -rf {} +

# One stamp an environment, so that it is installed anew only when what it is made from has changed.
$(OLDEST)/.installed: EXTRA := transformers==$(OLDEST_TRANSFORMERS)
$(VENV)/.installed $(OLDEST)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "$(PYTHON) is missing or older than Python 3.11; name another one: make setup PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' $(EXTRA)
	@touch $@

$(VLLM)/.installed: pyproject.toml tests/engines/vllm/make_env.sh
	tests/engines/vllm/make_env.sh $(PYTHON) $(@D)
	@touch $@

$(SGLANG)/.installed: pyproject.toml tests/engines/sglang/make_env.sh tests/engines/sglang/cpu_stubs.py
	tests/engines/sglang/make_env.sh $(PYTHON) $(@D)
	@touch $@
