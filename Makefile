# All commands of the project; `make help` lists them.
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

install: $(ENGINE) ## create .venv and build the llama.cpp engine for this machine

$(STAMP): pyproject.toml modelyard/__init__.py
	@if command -v uv >/dev/null 2>&1; then \
		uv venv --quiet --allow-existing --python $(PYTHON) $(VENV) && uv pip install --python $(BIN)/python -e '.[dev]'; \
	else \
		$(PYTHON) -m venv $(VENV) && $(BIN)/pip install --disable-pip-version-check --progress-bar on 'pip>=24.1' -e '.[dev]'; \
	fi
	@touch $@

# If the engine cannot be built, this step fails with the reason; nothing is served or tested without it.
$(ENGINE): $(STAMP) setup/llama_cpp_build.py modelyard/engines/llama_cpp/library.py
	@$(BUILD)
	@touch $@

rebuild-engine: $(STAMP) ## rebuild the engine; CC, CXX and CMAKE_ARGS are used
	@$(BUILD) --rebuild
	@touch $(ENGINE)

serve: install ## run the server; more options with ARGS="--port 9000"
	@$(BIN)/modelyard serve $(ARGS)

test: check ## format, lint, types, layers and tests: everything that must pass
	$(BIN)/pytest -n 2 --dist loadfile

check: install ## format, lint, types and layers only
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-clients: install ## install the real coding agents (about 2 GB, once) and run each against a running server
	$(BIN)/python setup/clients.py
	$(BIN)/pytest -m clients tests/clients

test-cluster: install ## run the tests that need a Ray cluster, with three nodes in their own network namespace
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(VENV)/ray 'ray>=2.50,<3'
	PYTHONPATH=$(CURDIR)/$(VENV)/ray unshare --map-root-user --net sh -c \
		'ip link set lo up && $(BIN)/pytest -m cluster tests/workers tests/engines/conformance'

vllm-env: install ## build an environment in which vLLM runs without a GPU (3.5 GB, once, in the cache folder)
	$(BIN)/python setup/vllm_env.py

test-vllm: vllm-env ## the tests that run a real vLLM, on the CPU
	$(BIN)/pytest -m vllm tests/engines tests/e2e

format: install ## format the code and apply the linter's fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

architecture: install ## update the package tree in ARCHITECTURE.md from the docstrings
	$(BIN)/python docs/tree.py --write

bench: install ## compare the gateway with LiteLLM (installed on demand)
	$(BIN)/python bench/gateway.py $(ARGS)

bench-engine: install ## compare the llama.cpp engine with llama-server (fetched on demand, on Debian)
	$(BIN)/python bench/engine.py $(ARGS)

bench-agents: install ## replay an agent's session against Modelyard and llama-server
	$(BIN)/python bench/agents.py $(ARGS)

fuzz: install ## fuzz every interface for five minutes; ARGS="--minutes 60 --seed 1 --only api"
	$(BIN)/python -m tests.fuzz $(ARGS)

soak: install ## an hour of moderate load, and what the server holds meanwhile; ARGS="--minutes 10 --svg soak.svg"
	$(BIN)/python -m bench.soak $(ARGS)

bench-reuse: install ## run real agents and count the tokens that are evaluated again
	$(BIN)/python -m bench.reuse $(ARGS)

.PHONY: help install rebuild-engine serve test check test-clients test-cluster vllm-env test-vllm format architecture bench bench-engine bench-agents bench-reuse fuzz soak
