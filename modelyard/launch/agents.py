"""The agents that `modelyard launch` supports: where each comes from, what it needs, and how it is told about a server.

A new agent is a table in `agents.toml`, or a function that makes its settings and a row in `AGENTS`, at the end of this
file. Settings go into variables, arguments and a private folder; only editors, which have no such folder, get theirs in
the user's own file.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import msgspec
import tomlkit
from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.launch.plan import LaunchPlan, LaunchTarget, as_json
from modelyard.library.cache_dir import cache_dir

_ARCHITECTURES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}


class Agent(Struct, frozen=True):
    """`settings(target, home)` makes the launch plan; `home` is the folder for the agent's settings under our launches.

    `version` is the one that the tests run; without one the agent was not run here, because no package registry has
    its program. `window` is the number of tokens below which its own prompt does not fit, `good` the one from which it
    works as it is meant to. An agent that `stays_open` is an editor: its command ends at once, so no server can be
    started for as long as it runs. `private` is the variable of its private folder; None: it takes the server from a
    file there, so that the user's own settings cannot be kept."""

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
    good: int = 0
    private: str | None = None

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

    def with_own_config(self, plan: LaunchPlan) -> LaunchPlan:
        """The plan with the user's own settings of the agent: only variables and arguments name the server."""
        if self.private is None:
            able = ", ".join(name for name, agent in AGENTS.items() if agent.private is not None)
            raise InvalidRequest(
                f"{self.title} takes its server from a settings file, so it cannot keep yours; --keep-my-config is for "
                f"{able}"
            )
        env = {name: value for name, value in plan.env.items() if name != self.private}
        return replace(plan, env=env, initial_files={})

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
        # It would ask about a folder that is new to it, and refuse it where nobody can answer.
        "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
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


# --- agents as data ---------------------------------------------------------------------------------------------------


class _AgentTable(Struct, forbid_unknown_fields=True):
    """`agents.toml` explains the fields."""

    title: str
    program: str
    window: int
    source: Literal["npm", "PyPI", ""] = ""
    package: str = ""
    version: str = ""
    install: str = ""
    inside: str = ""
    stays_open: bool = False
    good: int = 0
    private: str | None = None
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = {}
    unset: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    files: dict[str, Any] = {}
    initial_files: dict[str, str] = {}

    def plan(self, target: LaunchTarget, home: Path) -> LaunchPlan:
        words = {name: str(getattr(target, name)) for name in ("url", "v1_url", "key", "model", "small_model")}
        numbers = {"{window}": target.window, "{max_output}": target.max_output}

        def fill(value: Any) -> Any:
            if isinstance(value, dict):
                filled = {fill(key): fill(each) for key, each in value.items()}
                return {key: each for key, each in filled.items() if each is not None}
            if isinstance(value, list | tuple):
                return [fill(each) for each in value]
            return numbers.get(value, _replaced(value, words)) if isinstance(value, str) else value

        words["home"] = str(home)
        files = {home / name: _as_text(name, fill(content)) for name, content in self.files.items()}
        env = {name: str(value) for name, value in fill(self.env).items()}
        return LaunchPlan(
            arguments=tuple(fill(self.arguments)),
            env=env,
            unset=self.unset,
            files=files,
            initial_files={home / name: text for name, text in self.initial_files.items()},
            notes=tuple(fill(self.notes)),
        )


def _replaced(text: str, words: Mapping[str, str]) -> str:
    """In one pass: what a client's key or a model's name contains is not replaced again."""
    return re.sub(r"\{(\w+)\}", lambda found: words.get(found[1], found[0]), text)


def _as_text(name: str, content: Any) -> str:
    return tomlkit.dumps(content) if name.endswith(".toml") else as_json(content)  # JSON is valid YAML


def _read_agents() -> dict[str, Agent]:
    text = files("modelyard.launch").joinpath("agents.toml").read_text(encoding="utf-8")
    tables = msgspec.convert(tomllib.loads(text), dict[str, _AgentTable])
    shared = tuple(name for name in Agent.__struct_fields__ if name in _AgentTable.__struct_fields__)
    return {
        name: Agent(settings=table.plan, **{field: getattr(table, field) for field in shared})
        for name, table in tables.items()
    }


# --- the agents -------------------------------------------------------------------------------------------------------

_CLAUDE = "node_modules/@anthropic-ai/claude-code-{platform}/claude"
_OPENCODE = "node_modules/opencode-{platform}/bin/opencode"
_ROO_INSTALL = "code --install-extension RooVeterinaryInc.roo-cline (in VS Code)"
_ZED_INSTALL = "curl -f https://zed.dev/install.sh | sh"
# The package of Crush fetches the program from GitHub.
_CRUSH_INSTALL = "npm install -g @charmland/crush"

# The prompts of Codex and Gemini CLI take about 12,000 tokens, that of opencode 8,000. Claude Code needs 4,000 in its
# bare mode.
AGENTS: dict[str, Agent] = {
    "aider": Agent("aider", "aider", _aider, 1_000, "PyPI", "aider-chat", "0.86.2", tools=False, private=""),
    "claude": Agent(
        *("Claude Code", "claude", _claude, 4_000, "npm", "@anthropic-ai/claude-code", "2.1.325", _CLAUDE),
        good=CLAUDE_GOOD_WINDOW,
        private="CLAUDE_CONFIG_DIR",
    ),
    "codex": Agent("Codex", "codex", _codex, 16_000, "npm", "@openai/codex", "0.166.0", private="CODEX_HOME"),
    "crush": Agent("Crush", "crush", _crush, 16_000, install=_CRUSH_INSTALL),
    "gemini": Agent("Gemini CLI", "gemini", _gemini, 16_000, "npm", "@google/gemini-cli", "0.61.0"),
    "opencode": Agent(
        "opencode", "opencode", _opencode, 12_000, "npm", "opencode-ai", "1.18.33", _OPENCODE, private=""
    ),
    "roo": Agent("Roo Code", "code", _roo, 16_000, install=_ROO_INSTALL, stays_open=True),
    "zed": Agent("Zed", "zed", _zed, 8_000, install=_ZED_INSTALL, stays_open=True),
}
AGENTS = dict(sorted({**AGENTS, **_read_agents()}.items()))
