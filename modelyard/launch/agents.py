"""The agents that `modelyard launch` supports: where each comes from, and how it is configured for a local model.

A new agent is one more section here: a function that makes its plan, an `Agent`, and a row in `AGENTS`.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field

from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.library.cache_dir import cache_dir

# --- how to start an agent, as data -----------------------------------------------------------------------------------

PLACEHOLDER_KEY = "modelyard"  # agents refuse to start without a key, even if the server needs none
_HEREDOC_END = "END_OF_FILE"


class LaunchTarget(Struct, frozen=True, kw_only=True):
    """The server and the model that an agent uses. `background` is the model name for small side requests."""

    url: str
    model: str
    window: int | None = None  # tokens; None: a remote model that does not report it
    background: str = ""
    key: str = PLACEHOLDER_KEY

    @property
    def v1_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def small_model(self) -> str:
        return self.background or self.model

    def is_smaller_than(self, tokens: int) -> bool:
        return self.window is not None and self.window < tokens


class LaunchPlan(Struct, frozen=True, kw_only=True):
    """`arguments` go before the user's. `files` are written at every launch, `initial_files` only if they do not exist,
    because the agent writes to them. `notes` are shown to the user before the agent starts."""

    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    files: Mapping[Path, str] = field(default_factory=dict)
    initial_files: Mapping[Path, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def shell_script(plan: LaunchPlan, program: str, arguments: Sequence[str]) -> str:
    """The plan as commands for a POSIX shell: what `modelyard launch --print` shows."""
    return "\n".join(_shell_lines(plan, [program, *plan.arguments, *arguments])) + "\n"


def _shell_lines(plan: LaunchPlan, command: Sequence[str]) -> Iterator[str]:
    for note in plan.notes:
        yield f"# {note}"
    for path, text in plan.initial_files.items():
        file = shlex.quote(str(path))
        yield f"mkdir -p {shlex.quote(str(path.parent))}"
        yield f"[ -e {file} ] || printf %s {shlex.quote(text)} > {file}"
    for path, text in plan.files.items():
        yield f"mkdir -p {shlex.quote(str(path.parent))}"
        yield f"cat > {shlex.quote(str(path))} <<'{_HEREDOC_END}'\n{text.rstrip()}\n{_HEREDOC_END}"
    if plan.unset:
        yield f"unset {' '.join(plan.unset)}"
    for name, value in plan.env.items():
        yield f"export {name}={shlex.quote(value)}"
    yield shlex.join(command)


Planner = Callable[[LaunchTarget, Path], LaunchPlan]

_ARCHITECTURES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
_MAX_OUTPUT = 32_000


class Agent(Struct, frozen=True, kw_only=True):
    """`version` is the version that the tests run; `inside` is the path of its program in its installation.
    `plan(target, home)` makes the launch plan; `home` is the folder for the agent's settings under our launches."""

    title: str
    program: str
    package: str
    version: str
    source: Literal["npm", "PyPI"]
    inside: str
    plan: Planner

    @property
    def requirement(self) -> str:
        return f"{self.package}{'@' if self.source == 'npm' else '=='}{self.version}"

    @property
    def install_command(self) -> str:
        return f"npm install -g {self.package}" if self.source == "npm" else f"pipx install {self.package}"

    def install_dir(self, env: Mapping[str, str] = os.environ) -> Path:
        """Where setup/clients.py installs the pinned version."""
        return cache_dir(env) / "clients" / f"{self.program}-{self.version}"

    def pinned_program(self, env: Mapping[str, str] = os.environ) -> Path:
        return self.install_dir(env) / self.inside.format(platform=npm_platform(sys.platform, platform.machine()))

    def find_program(self, env: Mapping[str, str] = os.environ) -> Path:
        """The user's installation comes first, since the user keeps it up to date; then the pinned version."""
        if found := shutil.which(self.program, path=env.get("PATH")):
            return Path(found)
        if (pinned := self.pinned_program(env)).is_file():
            return pinned
        raise NotFound(f"{self.title} is not installed; install it with: {self.install_command}")


def npm_platform(system: str, machine: str) -> str:
    """The platform as npm packages name it: linux-x64, darwin-arm64."""
    return f"{system}-{_ARCHITECTURES.get(machine.lower(), machine.lower())}"


def get_agent(name: str) -> Agent:
    if name not in AGENTS:
        raise InvalidRequest(f"unknown agent {name!r}; choose one of {', '.join(AGENTS)}")
    return AGENTS[name]


def _output_limit(window: int) -> int:
    return min(_MAX_OUTPUT, window // 4)


# --- aider: environment variables for the address, and a file with the window --------------------------------------


def _plan_aider(target: LaunchTarget, home: Path) -> LaunchPlan:
    model, small_model = f"openai/{target.model}", f"openai/{target.small_model}"
    arguments = ["--model", model, "--weak-model", small_model, "--timeout", "3600"]
    arguments += ["--no-show-model-warnings", "--no-check-update", "--no-show-release-notes"]
    files: dict[Path, str] = {}
    if target.window is not None:
        output = _output_limit(target.window)
        metadata = {
            "max_input_tokens": target.window,
            "max_tokens": output,
            "max_output_tokens": output,
            "litellm_provider": "openai",
            "mode": "chat",
        }
        path = home / "models.json"
        # The small model's name as well: aider looks up unknown names on the internet.
        files[path] = json.dumps(dict.fromkeys((model, small_model), metadata), indent=2) + "\n"
        arguments += ["--model-metadata-file", str(path)]
    return LaunchPlan(
        arguments=tuple(arguments),
        env={"OPENAI_API_BASE": target.v1_url, "OPENAI_API_KEY": target.key, "AIDER_ANALYTICS": "false"},
        files=files,
    )


AIDER = Agent(
    title="aider",
    program="aider",
    package="aider-chat",
    version="0.86.2",
    source="PyPI",
    inside="bin/aider",
    plan=_plan_aider,
)


# --- Claude Code: everything is set by environment variables --------------------------------------------------------

# Its full prompt takes 11,000 to 16,000 tokens, and it compacts as soon as less than 13,000 tokens plus its longest
# answer are free. Below this window it would only compact, so it runs in its bare mode.
CLAUDE_MIN_WINDOW = 36_000
CLAUDE_GOOD_WINDOW = 64_000


def _plan_claude(target: LaunchTarget, home: Path) -> LaunchPlan:
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
        env["CLAUDE_CODE_MAX_OUTPUT_TOKENS"] = str(min(_MAX_OUTPUT, max(1024, target.window // 8)))
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


CLAUDE = Agent(
    title="Claude Code",
    program="claude",
    package="@anthropic-ai/claude-code",
    version="2.1.325",
    source="npm",
    inside="node_modules/@anthropic-ai/claude-code-{platform}/claude",
    plan=_plan_claude,
)


# --- Codex: uses the Responses API only and takes every setting as an argument --------------------------------------

_CODEX_MIN_WINDOW = 16_000  # its own prompt takes about 12,000
# Codex compacts when nine tenths of the window are full, but counts four bytes as one token: a tool result with twice
# as many tokens must still fit into the last tenth. By default it truncates results at 2,500 of its tokens.
_CODEX_SAFE_WINDOW = 40_000
_CODEX_KEY = "CODEX_MODELYARD_KEY"  # not MODELYARD_API_KEY, because the agent may run modelyard itself


def _plan_codex(target: LaunchTarget, home: Path) -> LaunchPlan:
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
    notes: tuple[str, ...] = ()
    if target.is_smaller_than(_CODEX_MIN_WINDOW):
        notes = (
            f"{target.model} has a window of {target.window} tokens, and Codex itself needs about {_CODEX_MIN_WINDOW}: "
            "every request will be too long. Serve the model with a larger n_ctx, or launch aider, which needs 1,000.",
        )
    return LaunchPlan(
        arguments=tuple(word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")),
        env={"CODEX_HOME": str(home), _CODEX_KEY: target.key},
        initial_files={home / ".keep": ""},  # it refuses a home folder that does not exist
        notes=notes,
    )


CODEX = Agent(
    title="Codex",
    program="codex",
    package="@openai/codex",
    version="0.166.0",
    source="npm",
    inside="node_modules/.bin/codex",
    plan=_plan_codex,
)


# --- Continue: a configuration file in its private folder -----------------------------------------------------------

# Continue reads this as milliseconds in one place and as seconds in another, whose timer is limited to 2**31 ms.
_CONTINUE_TIMEOUT = 2_100_000


def _plan_continue(target: LaunchTarget, home: Path) -> LaunchPlan:
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
        model["defaultCompletionOptions"] = {"contextLength": target.window, "maxTokens": _output_limit(target.window)}
    settings = {"name": "Modelyard", "version": "1.0.0", "schema": "v1", "models": [model]}
    path = home / "modelyard.yaml"
    return LaunchPlan(
        arguments=("--config", str(path)),
        env={"CONTINUE_GLOBAL_DIR": str(home), "CONTINUE_CLI_ENABLE_TELEMETRY": "0", "CONTINUE_METRICS_ENABLED": "0"},
        files={path: json.dumps(settings, indent=2) + "\n"},  # JSON is valid YAML
    )


CONTINUE = Agent(
    title="Continue",
    program="cn",
    package="@continuedev/cli",
    version="1.5.47",
    source="npm",
    inside="node_modules/.bin/cn",
    plan=_plan_continue,
)


# --- Gemini CLI: environment variables for the address, and a settings file in its private folder --------------------

_GEMINI_MIN_WINDOW = 16_000  # its own prompt takes about 12,000
_GEMINI_LIMIT = 1_048_576  # the window that it assumes for a model that it does not know
_GEMINI_COMPRESS_AT = 0.7  # of the window, since a tool's result must fit into the rest


def _plan_gemini(target: LaunchTarget, home: Path) -> LaunchPlan:
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
    notes: tuple[str, ...] = ()
    if target.is_smaller_than(_GEMINI_MIN_WINDOW):
        notes = (
            f"{target.model} has a window of {target.window} tokens, and Gemini CLI itself needs about "
            f"{_GEMINI_MIN_WINDOW}: every request will be too long. Serve the model with a larger n_ctx, or launch "
            "aider, which needs 1,000.",
        )
    return LaunchPlan(
        arguments=("--model", target.model),
        env={
            "GEMINI_CLI_HOME": str(home),
            "GOOGLE_GEMINI_BASE_URL": target.url,
            "GEMINI_API_KEY": target.key,
            "GEMINI_MODEL": target.model,
        },
        unset=("GOOGLE_API_KEY", "GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_GENAI_USE_GCA"),  # they select Google's servers
        files={home / ".gemini" / "settings.json": json.dumps(settings, indent=2) + "\n"},
        notes=notes,
    )


GEMINI = Agent(
    title="Gemini CLI",
    program="gemini",
    package="@google/gemini-cli",
    version="0.61.0",
    source="npm",
    inside="node_modules/.bin/gemini",
    plan=_plan_gemini,
)


# --- opencode: a provider in settings that are merged over the user's for this run ----------------------------------

_OPENCODE_MIN_WINDOW = 12_000  # its own prompt takes about 8,000


def _plan_opencode(target: LaunchTarget, home: Path) -> LaunchPlan:
    del home  # it needs no files
    model: dict[str, Any] = {}
    if target.window is not None:
        model["limit"] = {"context": target.window, "output": _output_limit(target.window)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Modelyard",
        "options": {"baseURL": target.v1_url, "apiKey": target.key, "timeout": False},
        "models": dict.fromkeys((target.model, target.small_model), model),
    }
    settings: dict[str, Any] = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"modelyard/{target.model}",
        "small_model": f"modelyard/{target.small_model}",
        "provider": {"modelyard": provider},
    }
    notes: tuple[str, ...] = ()
    if target.is_smaller_than(_OPENCODE_MIN_WINDOW):
        # Its own prompt does not fit, so compaction cannot help, and it would compact for ever.
        settings["compaction"] = {"auto": False}
        notes = (
            f"{target.model} has a window of {target.window} tokens, and opencode needs about {_OPENCODE_MIN_WINDOW}: "
            "its requests may be too long. Serve the model with a larger n_ctx, or launch aider, which needs 1,000.",
        )
    env = {
        "OPENCODE_CONFIG_CONTENT": json.dumps(settings),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    return LaunchPlan(env=env, notes=notes)


OPENCODE = Agent(
    title="opencode",
    program="opencode",
    package="opencode-ai",
    version="1.18.33",
    source="npm",
    inside="node_modules/opencode-{platform}/bin/opencode",
    plan=_plan_opencode,
)


# --- Qwen Code: environment variables for the address, and a settings file in its private folder --------------------

_QWEN_MIN_WINDOW = 28_000  # its own prompt takes about 22,000


def _plan_qwen(target: LaunchTarget, home: Path) -> LaunchPlan:
    generation: dict[str, Any] = {"timeout": 3_600_000}
    if target.window is not None:
        generation["contextWindowSize"] = target.window
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": target.model, "generationConfig": generation},
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
    }
    env = {
        "QWEN_HOME": str(home),
        "OPENAI_BASE_URL": target.v1_url,
        "OPENAI_API_KEY": target.key,
        "OPENAI_MODEL": target.model,
        # It would send requests to a local server through the proxy, too: it does not read NO_PROXY.
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), ""),
    }
    if target.window is not None:
        env["QWEN_CODE_MAX_OUTPUT_TOKENS"] = str(_output_limit(target.window))
    notes: tuple[str, ...] = ()
    if target.is_smaller_than(_QWEN_MIN_WINDOW):
        notes = (
            f"{target.model} has a window of {target.window} tokens, and Qwen Code itself needs about "
            f"{_QWEN_MIN_WINDOW}: every request will be too long. Serve the model with a larger n_ctx, or launch "
            "aider, which needs 1,000.",
        )
    return LaunchPlan(
        arguments=("--model", target.model),
        env=env,
        files={home / "settings.json": json.dumps(settings, indent=2) + "\n"},
        notes=notes,
    )


QWEN = Agent(
    title="Qwen Code",
    program="qwen",
    package="@qwen-code/qwen-code",
    version="0.15.10",
    source="npm",
    inside="node_modules/.bin/qwen",
    plan=_plan_qwen,
)


AGENTS: dict[str, Agent] = {
    "aider": AIDER,
    "claude": CLAUDE,
    "codex": CODEX,
    "continue": CONTINUE,
    "gemini": GEMINI,
    "opencode": OPENCODE,
    "qwen": QWEN,
}
