# Everything a person does with the project. `make help` lists it.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ENGINE := $(VENV)/.engine
BUILD := $(BIN)/python setup/llama_cpp_build.py
ARGS ?=

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(ENGINE) ## make the environment in .venv and build the llama.cpp engine for this machine

$(STAMP): pyproject.toml modelyard/__init__.py
	@if command -v uv >/dev/null 2>&1; then \
		uv venv --quiet --allow-existing --python $(PYTHON) $(VENV) && uv pip install --python $(BIN)/python -e '.[dev]'; \
	else \
		$(PYTHON) -m venv $(VENV) && $(BIN)/pip install --disable-pip-version-check --progress-bar on 'pip>=24.1' -e '.[dev]'; \
	fi
	@touch $@

# A machine that cannot build the engine is told why here, and neither serves nor tests without it.
$(ENGINE): $(STAMP) setup/llama_cpp_build.py modelyard/engines/llama_cpp/library.py
	@$(BUILD)
	@touch $@

rebuild-engine: $(STAMP) ## build the engine anew; CC, CXX and CMAKE_ARGS of your own are honoured
	@$(BUILD) --rebuild
	@touch $(ENGINE)

serve: install ## run the server; more options with ARGS="--port 9000"
	@$(BIN)/modelyard serve $(ARGS)

test: check ## format, lint, types, layers, tests: all that must pass
	$(BIN)/pytest

check: install ## the same without the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-clients: install ## install the real coding agents (about 2 GB, once) and run each against a running server
	$(BIN)/python setup/clients.py
	$(BIN)/pytest -m clients tests/clients

test-cluster: install ## the tests that need a Ray cluster: one of three nodes is started, in a network of its own
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(VENV)/ray 'ray>=2.50,<3'
	PYTHONPATH=$(CURDIR)/$(VENV)/ray unshare --map-root-user --net sh -c \
		'ip link set lo up && $(BIN)/pytest -m cluster tests/workers tests/engines/conformance'

vllm-env: install ## build an environment in which vLLM runs without a GPU (3.5 GB, once, in the cache folder)
	$(BIN)/python setup/vllm_env.py

test-vllm: vllm-env ## the tests that run a real vLLM, on the CPU
	$(BIN)/pytest -m vllm tests/engines tests/e2e

format: install ## format the code and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

architecture: install ## write the tree in ARCHITECTURE.md anew from the docstrings
	$(BIN)/python docs/tree.py --write

bench: install ## measure the gateway beside a LiteLLM proxy (installed on demand)
	$(BIN)/python bench/gateway.py $(ARGS)

bench-engine: install ## measure the llama.cpp engine beside llama-server (fetched on demand, on Debian)
	$(BIN)/python bench/engine.py $(ARGS)

bench-agents: install ## replay an agent's session against ours and llama-server
	$(BIN)/python bench/agents.py $(ARGS)

bench-reuse: install ## run real agents and count the tokens that are read again
	$(BIN)/python -m bench.reuse $(ARGS)

.PHONY: help install rebuild-engine serve test check test-clients test-cluster vllm-env test-vllm format architecture bench bench-engine bench-agents bench-reuse
