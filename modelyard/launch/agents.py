"""The agents that `modelyard launch` supports: where each comes from, what it needs, and how it is told about a server.

A new agent is a function that makes its settings and a row in `AGENTS`, at the end of this file. Settings go into
variables, arguments and a private folder; only editors, which have no such folder, get theirs in the user's own file.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.launch.plan import LaunchPlan, LaunchTarget, as_json
from modelyard.library.cache_dir import cache_dir

_ARCHITECTURES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")


class Agent(Struct, frozen=True):
    """`settings(target, home)` makes the launch plan; `home` is the folder for the agent's settings under our launches.

    `version` is the one that the tests run; without one the agent was not run here, because no package registry has
    its program. `window` is the number of tokens below which its own prompt does not fit. An agent that `stays_open` is
    an editor: its command ends at once, so no server can be started for as long as it runs."""

    title: str
    program: str
    settings: Callable[[LaunchTarget, Path], LaunchPlan]
    window: int = 0
    source: Literal["npm", "PyPI", ""] = ""
    package: str = ""
    version: str = ""
    inside: str = ""  # the program in its package, if it is not where the registry's installer puts programs
    install: str = ""  # how a user installs it, if not as a package
    tools: bool = True
    stays_open: bool = False

    def plan(self, target: LaunchTarget, home: Path) -> LaunchPlan:
        plan = self.settings(target, home)
        if not target.is_smaller_than(self.window):
            return plan
        note = (
            f"{target.model} has a window of {target.window} tokens, and {self.title} itself needs about "
            f"{self.window}: its requests will be too long. Serve the model with a larger n_ctx, or launch aider, "
            "which needs 1,000."
        )
        return replace(plan, notes=(*plan.notes, note))

    # --- its program --------------------------------------------------------------------------------------------------

    @property
    def requirement(self) -> str:
        return f"{self.package}{'@' if self.source == 'npm' else '=='}{self.version}"

    @property
    def install_command(self) -> str:
        return self.install or f"{'npm install -g' if self.source == 'npm' else 'pipx install'} {self.package}"

    def install_dir(self, env: Mapping[str, str] = os.environ) -> Path:
        """Where setup/clients.py installs the pinned version."""
        return cache_dir(env) / "clients" / f"{self.program}-{self.version}"

    def pinned_program(self, env: Mapping[str, str] = os.environ) -> Path:
        where = self.inside or f"{'node_modules/.bin' if self.source == 'npm' else 'bin'}/{self.program}"
        return self.install_dir(env) / where.format(platform=npm_platform(sys.platform, platform.machine()))

    def find_program(self, env: Mapping[str, str] = os.environ) -> Path:
        """The user's installation comes first, since the user keeps it up to date; then the pinned version."""
        if found := shutil.which(self.program, path=env.get("PATH")):
            return Path(found)
        if self.version and (pinned := self.pinned_program(env)).is_file():
            return pinned
        raise NotFound(f"{self.title} is not installed; install it with: {self.install_command}")


def npm_platform(system: str, machine: str) -> str:
    """The platform as npm packages name it: linux-x64, darwin-arm64."""
    return f"{system}-{_ARCHITECTURES.get(machine.lower(), machine.lower())}"


def get_agent(name: str) -> Agent:
    if name not in AGENTS:
        raise InvalidRequest(f"unknown agent {name!r}; choose one of {', '.join(AGENTS)}")
    return AGENTS[name]


# --- the settings of each agent ---------------------------------------------------------------------------------------


def _aider(target: LaunchTarget, home: Path) -> LaunchPlan:
    """Variables for the address, and a file with the window."""
    model, small_model = f"openai/{target.model}", f"openai/{target.small_model}"
    arguments = ["--model", model, "--weak-model", small_model, "--timeout", "3600"]
    arguments += ["--no-show-model-warnings", "--no-check-update", "--no-show-release-notes"]
    files: dict[Path, str] = {}
    if target.window is not None:
        metadata = {
            **target.limits("max_input_tokens", "max_tokens"),
            "max_output_tokens": target.max_output,
            "litellm_provider": "openai",
            "mode": "chat",
        }
        path = home / "models.json"
        # The small model's name as well: aider looks up unknown names on the internet.
        files[path] = as_json(dict.fromkeys((model, small_model), metadata))
        arguments += ["--model-metadata-file", str(path)]
    return LaunchPlan(
        arguments=tuple(arguments),
        env={"OPENAI_API_BASE": target.v1_url, "OPENAI_API_KEY": target.key, "AIDER_ANALYTICS": "false"},
        files=files,
    )


# Claude Code's full prompt takes 11,000 to 16,000 tokens, and it compacts as soon as less than 13,000 tokens plus its
# longest answer are free. Below this window it would only compact, so it runs in its bare mode.
CLAUDE_MIN_WINDOW = 36_000
CLAUDE_GOOD_WINDOW = 64_000


def _claude(target: LaunchTarget, home: Path) -> LaunchPlan:
    """Everything is set by variables."""
    env = {
        "CLAUDE_CONFIG_DIR": str(home),
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": target.model for tier in ("OPUS", "SONNET", "FABLE")},
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.small_model,
        "API_TIMEOUT_MS": "3600000",  # its default of ten minutes is too short for a long prompt on a CPU
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it differs per session and would invalidate the cached prompt
    }
    if target.window is not None:
        env["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(target.window)
        env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(min(32_000, max(1024, target.window // 8)))
    notes: tuple[str, ...] = ()
    if target.is_smaller_than(CLAUDE_MIN_WINDOW):
        notes = (
            f"{target.model} has a window of {target.window} tokens. Claude Code needs about {CLAUDE_MIN_WINDOW}, so "
            "it starts in its bare mode, with three tools.",
        )
    elif target.is_smaller_than(CLAUDE_GOOD_WINDOW):
        notes = (
            f"{target.model} has a window of {target.window} tokens. Claude Code works with it but compacts often; "
            f"{CLAUDE_GOOD_WINDOW} tokens are better.",
        )
    bare = ("--bare",) if target.is_smaller_than(CLAUDE_MIN_WINDOW) else ()
    return LaunchPlan(
        arguments=("--model", target.model, *bare),
        env=env,
        unset=("ANTHROPIC_API_KEY",),  # a real key would be sent to the local server in addition to the token
        initial_files={home / ".claude.json": json.dumps({"hasCompletedOnboarding": True, "theme": "dark"})},
        notes=notes,
    )


def _cline(target: LaunchTarget, home: Path) -> LaunchPlan:
    """A file with its providers in its private folder. Its extension for editors keeps its own settings."""
    settings = {
        "provider": "openai-compatible",
        "apiKey": target.key,
        "model": target.model,
        "baseUrl": target.v1_url,
        **target.limits("contextWindow", "maxTokens"),
    }
    provider = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    providers = {
        "version": 1,
        "lastUsedProvider": settings["provider"],
        "modes": {},
        "providers": {settings["provider"]: provider},
    }
    return LaunchPlan(
        env={
            "CLINE_DIR": str(home),
            "CLINE_SESSION_BACKEND_MODE": "local",  # else it starts a process that outlives it
            "CLINE_NO_AUTO_UPDATE": "1",
        },
        files={home / "data" / "settings" / "providers.json": as_json(providers)},
    )


# Codex compacts when nine tenths of the window are full, but counts four bytes as one token: a tool result with twice
# as many tokens must still fit into the last tenth. By default it truncates results at 2,500 of its tokens.
_CODEX_SAFE_WINDOW = 40_000
_CODEX_KEY = "CODEX_MODELYARD_KEY"  # not MODELYARD_API_KEY, because the agent may run modelyard itself


def _codex(target: LaunchTarget, home: Path) -> LaunchPlan:
    """Every setting is an argument. It speaks Responses only."""
    settings: dict[str, str | int] = {
        "model": target.model,
        "model_provider": "modelyard",
        "model_providers.modelyard.name": "Modelyard",
        "model_providers.modelyard.base_url": target.v1_url,
        "model_providers.modelyard.wire_api": "responses",
        "model_providers.modelyard.env_key": _CODEX_KEY,
        "model_providers.modelyard.stream_idle_timeout_ms": 3_600_000,
    }
    if target.window is not None:
        settings["model_context_window"] = target.window
        if target.window < _CODEX_SAFE_WINDOW:
            settings["tool_output_token_limit"] = max(500, target.window // 16)
    return LaunchPlan(
        arguments=tuple(word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")),
        env={"CODEX_HOME": str(home), _CODEX_KEY: target.key},
        initial_files={home / ".keep": ""},  # it refuses a home folder that does not exist
    )


# Continue reads this as milliseconds in one place and as seconds in another, whose timer is limited to 2**31 ms.
_CONTINUE_TIMEOUT = 2_100_000


def _continue(target: LaunchTarget, home: Path) -> LaunchPlan:
    """A configuration file in its private folder."""
    model: dict[str, Any] = {
        "name": target.model,
        "provider": "openai",
        "model": target.model,
        "apiBase": target.v1_url,
        "apiKey": target.key,
        "roles": ["chat"],
        "capabilities": ["tool_use"],
        "requestOptions": {"timeout": _CONTINUE_TIMEOUT},
    }
    if target.window is not None:
        model["contextLength"] = target.window
        model["defaultCompletionOptions"] = target.limits("contextLength", "maxTokens")
    path = home / "modelyard.yaml"
    return LaunchPlan(
        arguments=("--config", str(path)),
        env={"CONTINUE_GLOBAL_DIR": str(home), "CONTINUE_CLI_ENABLE_TELEMETRY": "0", "CONTINUE_METRICS_ENABLED": "0"},
        # JSON is valid YAML.
        files={path: as_json({"name": "Modelyard", "version": "1.0.0", "schema": "v1", "models": [model]})},
    )


_CRUSH_KEY = "MODELYARD_CRUSH_KEY"  # its file expands variables: a key in it could contain a dollar sign


def _crush(target: LaunchTarget, home: Path) -> LaunchPlan:
    """A configuration file in its private folder; it also reads the project's own."""
    names = dict.fromkeys((target.model, target.small_model))
    limits = target.limits("context_window", "default_max_tokens")
    provider = {
        "name": "Modelyard",
        "type": "openai-compat",
        "base_url": target.v1_url,
        "api_key": f"${_CRUSH_KEY}",
        "models": [{"id": name, "name": name, **limits} for name in names],
    }
    settings = {
        "$schema": "https://charm.land/crush.json",
        "providers": {"modelyard": provider},
        "models": {
            "large": {"provider": "modelyard", "model": target.model},
            "small": {"provider": "modelyard", "model": target.small_model},
        },
        "options": {"disable_metrics": True, "disable_provider_auto_update": True},
    }
    return LaunchPlan(
        env={
            "CRUSH_GLOBAL_CONFIG": str(home),
            "CRUSH_GLOBAL_DATA": str(home / "data"),
            "CRUSH_DISABLE_METRICS": "1",
            "CRUSH_DISABLE_PROVIDER_AUTO_UPDATE": "1",
            _CRUSH_KEY: target.key,
        },
        files={home / "crush.json": as_json(settings)},
    )


_GEMINI_LIMIT = 1_048_576  # the window that it assumes for a model that it does not know
_GEMINI_COMPRESS_AT = 0.7  # of the window, since a tool's result must fit into the rest


def _gemini(target: LaunchTarget, home: Path) -> LaunchPlan:
    """Variables for the address, and a settings file in its private folder."""
    # Its side requests name Google's models. The first rule leads all of them here, the second is for conversations.
    rules = [
        {"match": {}, "modelConfig": {"model": target.small_model}},
        {"match": {"model": target.model}, "modelConfig": {"model": target.model}},
    ]
    model: dict[str, Any] = {"name": target.model}
    if target.window is not None:
        model["compressionThreshold"] = round(_GEMINI_COMPRESS_AT * target.window / _GEMINI_LIMIT, 6)
    settings = {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "model": model,
        "modelConfigs": {"customOverrides": rules},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    return LaunchPlan(
        arguments=("--model", target.model),
        env={
            "GEMINI_CLI_HOME": str(home),
            "GOOGLE_GEMINI_BASE_URL": target.url,
            "GEMINI_API_KEY": target.key,
            "GEMINI_MODEL": target.model,
        },
        unset=("GOOGLE_API_KEY", "GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_GENAI_USE_GCA"),  # they select Google's servers
        files={home / ".gemini" / "settings.json": as_json(settings)},
    )


def _goose(target: LaunchTarget, home: Path) -> LaunchPlan:
    """Everything is set by variables."""
    limits = target.limits("GOOSE_CONTEXT_LIMIT", "GOOSE_MAX_TOKENS")
    return LaunchPlan(
        env={
            "GOOSE_PATH_ROOT": str(home),
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": target.model,
            "OPENAI_HOST": target.url,
            "OPENAI_BASE_PATH": "v1/chat/completions",
            "OPENAI_API_KEY": target.key,
            "OPENAI_TIMEOUT": "3600",
            "GOOSE_DISABLE_KEYRING": "1",
            "GOOSE_TELEMETRY_ENABLED": "false",
            **{name: str(tokens) for name, tokens in limits.items()},
        },
        unset=("OPENAI_BASE_URL", "OPENAI_ORGANIZATION", "OPENAI_PROJECT", "OPENAI_CUSTOM_HEADERS"),
        initial_files={home / "config" / "config.yaml": ""},
    )


def _opencode(target: LaunchTarget, home: Path) -> LaunchPlan:
    """A provider in settings that are merged over the user's for this run."""
    del home  # it needs no files
    limit = {"limit": limits} if (limits := target.limits("context", "output")) else {}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Modelyard",
        "options": {"baseURL": target.v1_url, "apiKey": target.key, "timeout": False},
        "models": dict.fromkeys((target.model, target.small_model), limit),
    }
    settings: dict[str, Any] = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"modelyard/{target.model}",
        "small_model": f"modelyard/{target.small_model}",
        "provider": {"modelyard": provider},
    }
    if target.is_smaller_than(AGENTS["opencode"].window):
        # Its own prompt does not fit, so compaction cannot help, and it would compact for ever.
        settings["compaction"] = {"auto": False}
    env = {
        "OPENCODE_CONFIG_CONTENT": json.dumps(settings),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    return LaunchPlan(env=env)


def _qwen(target: LaunchTarget, home: Path) -> LaunchPlan:
    """Variables for the address, and a settings file in its private folder."""
    generation: dict[str, Any] = {"timeout": 3_600_000}
    env = {
        "QWEN_HOME": str(home),
        "OPENAI_BASE_URL": target.v1_url,
        "OPENAI_API_KEY": target.key,
        "OPENAI_MODEL": target.model,
        # It would send requests to a local server through the proxy, too: it does not read NO_PROXY.
        **dict.fromkeys(_PROXIES, ""),
    }
    if target.window is not None:
        generation["contextWindowSize"] = target.window
        env["QWEN_CODE_MAX_OUTPUT_TOKENS"] = str(target.max_output)
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": target.model, "generationConfig": generation},
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    return LaunchPlan(arguments=("--model", target.model), env=env, files={home / "settings.json": as_json(settings)})


def _roo(target: LaunchTarget, home: Path) -> LaunchPlan:
    """A profile that Roo Code imports when VS Code starts. The user's own profiles stay."""
    profile = {
        "apiProvider": "openai",
        "openAiBaseUrl": target.v1_url,
        "openAiApiKey": target.key,
        "openAiModelId": target.model,
        "openAiCustomModelInfo": {
            **target.limits("contextWindow", "maxTokens"),
            "supportsImages": "vision" in target.capabilities,
            "supportsPromptCache": False,
        },
    }
    profiles = {"currentApiConfigName": "modelyard", "apiConfigs": {"modelyard": profile}}
    path = home / "profiles.json"
    return LaunchPlan(
        files={path: as_json({"providerProfiles": profiles, "globalSettings": {}})},
        user_settings={_vs_code_settings(): {"roo-cline.autoImportSettingsPath": str(path)}},
    )


def _zed(target: LaunchTarget, home: Path) -> LaunchPlan:
    """A provider in the user's settings, and its key in a variable that Zed names after the provider."""
    del home  # it has one settings file
    model = {
        "name": target.model,
        "display_name": target.model,
        **target.limits("max_tokens", "max_output_tokens"),
        "capabilities": {
            "tools": "tools" in target.capabilities,
            "images": "vision" in target.capabilities,
            "parallel_tool_calls": False,
            "prompt_cache_key": False,
        },
    }
    provider = {"api_url": target.v1_url, "available_models": [model]}
    return LaunchPlan(
        env={"MODELYARD_API_KEY": target.key},
        user_settings={
            _config_home() / "zed" / "settings.json": {
                "language_models": {"openai_compatible": {"Modelyard": provider}}
            }
        },
        notes=(f"choose {target.model} of Modelyard in Zed's agent panel; Zed remembers it",),
    )


def _config_home() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _vs_code_settings() -> Path:
    home = Path.home() / "Library" / "Application Support" if sys.platform == "darwin" else _config_home()
    return home / "Code" / "User" / "settings.json"


# --- the agents -------------------------------------------------------------------------------------------------------

_CLAUDE = "node_modules/@anthropic-ai/claude-code-{platform}/claude"
_CLINE = "node_modules/@cline/cli-{platform}/bin/cline"
_GOOSE = "node_modules/@aaif/goose-binary-{platform}/bin/goose"
_OPENCODE = "node_modules/opencode-{platform}/bin/opencode"
_ROO_INSTALL = "code --install-extension RooVeterinaryInc.roo-cline (in VS Code)"
_ZED_INSTALL = "curl -f https://zed.dev/install.sh | sh"
# The package of Crush fetches the program from GitHub.
_CRUSH_INSTALL = "npm install -g @charmland/crush"

# The prompts of Codex and Gemini CLI take about 12,000 tokens, that of opencode 8,000, that of Qwen Code 22,000. Claude
# Code needs 4,000 in its bare mode.
AGENTS: dict[str, Agent] = {
    "aider": Agent("aider", "aider", _aider, 1_000, "PyPI", "aider-chat", "0.86.2", tools=False),
    "claude": Agent("Claude Code", "claude", _claude, 4_000, "npm", "@anthropic-ai/claude-code", "2.1.325", _CLAUDE),
    "cline": Agent("Cline", "cline", _cline, 12_000, "npm", "cline", "3.0.65", _CLINE),
    "codex": Agent("Codex", "codex", _codex, 16_000, "npm", "@openai/codex", "0.166.0"),
    "continue": Agent("Continue", "cn", _continue, 4_000, "npm", "@continuedev/cli", "1.5.47"),
    "crush": Agent("Crush", "crush", _crush, 16_000, install=_CRUSH_INSTALL),
    "gemini": Agent("Gemini CLI", "gemini", _gemini, 16_000, "npm", "@google/gemini-cli", "0.61.0"),
    "goose": Agent("goose", "goose", _goose, 8_000, "npm", "@aaif/goose-acp", "1.50.0", _GOOSE),
    "opencode": Agent("opencode", "opencode", _opencode, 12_000, "npm", "opencode-ai", "1.18.33", _OPENCODE),
    "qwen": Agent("Qwen Code", "qwen", _qwen, 28_000, "npm", "@qwen-code/qwen-code", "0.15.10"),
    "roo": Agent("Roo Code", "code", _roo, 16_000, install=_ROO_INSTALL, stays_open=True),
    "zed": Agent("Zed", "zed", _zed, 8_000, install=_ZED_INSTALL, stays_open=True),
}
