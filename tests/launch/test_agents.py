"""The plan of every agent for a given server, and where an agent's program is found."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.launch.agents import AGENTS, get_agent, npm_platform
from modelyard.launch.plan import LaunchPlan, LaunchTarget

AIDER, CLAUDE = AGENTS["aider"], AGENTS["claude"]
HOME = Path("/cache/launch/x")
TARGET = LaunchTarget(url="http://127.0.0.1:8000", model="qwen", window=65_536, background="local-haiku", key="sk-1")


def plan(name: str, **changes: Any) -> LaunchPlan:
    return AGENTS[name].plan(replace(TARGET, **changes), HOME)


def executable(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)
    return path


# --- finding an agent -------------------------------------------------------------------------------------------------


def test_unknown_agent_is_refused_with_the_names_of_the_others() -> None:
    with pytest.raises(
        InvalidRequest, match="unknown agent 'emacs'; choose one of aider, claude, cline, codex, continue"
    ):
        get_agent("emacs")


def test_users_installation_comes_before_the_pinned_version(tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path / "bin"), "MODELYARD_CACHE": str(tmp_path / "cache")}
    pinned = executable(CLAUDE.pinned_program(env))
    assert CLAUDE.find_program(env) == pinned
    installed = executable(tmp_path / "bin" / "claude")
    assert CLAUDE.find_program(env) == installed


def test_missing_program_is_an_error_with_the_install_command(tmp_path: Path) -> None:
    commands = {CLAUDE: "npm install -g @anthropic-ai/claude-code", AIDER: "pipx install aider-chat"}
    for agent, command in commands.items():
        with pytest.raises(NotFound) as caught:
            agent.find_program({"PATH": "", "MODELYARD_CACHE": str(tmp_path)})
        assert caught.value.message == f"{agent.title} is not installed; install it with: {command}"


def test_platform_is_named_as_npm_packages_name_it() -> None:
    assert npm_platform("linux", "x86_64") == "linux-x64"
    assert npm_platform("darwin", "arm64") == "darwin-arm64"
    assert npm_platform("linux", "aarch64") == "linux-arm64"


# --- every agent ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", AGENTS)
def test_files_are_written_only_in_the_agents_private_folder(name: str) -> None:
    for window in (None, 2048, 1 << 20):
        made = plan(name, window=window)
        assert all(path.is_relative_to(HOME) for path in (*made.files, *made.initial_files))


@pytest.mark.parametrize("name", AGENTS)
def test_address_key_model_and_window_reach_the_agent(name: str) -> None:
    made = plan(name)
    settings = [json.dumps(added) for added in made.user_settings.values()]
    text = " ".join([*made.arguments, *made.env.values(), *made.files.values(), *settings])
    window = "compressionThreshold" if name == "gemini" else str(TARGET.window)  # it takes a share of its own number
    for value in (TARGET.url, TARGET.key, TARGET.model, window):
        assert value in text


@pytest.mark.parametrize("name", ["claude", "opencode", "aider", "crush"])
def test_side_requests_use_the_background_model(name: str) -> None:
    made = plan(name)
    assert "local-haiku" in " ".join([*made.arguments, *made.env.values(), *made.files.values()])
    assert "local-haiku" not in " ".join(plan(name, background="").env.values())


@pytest.mark.parametrize("name", [name for name, agent in AGENTS.items() if agent.window > 4096])
def test_too_small_a_window_is_noted(name: str) -> None:
    (note,) = set(plan(name, window=4096).notes) - set(plan(name).notes)
    assert "window of 4096 tokens" in note
    assert "larger n_ctx" in note
    assert set(plan(name).notes) == set(plan(name, window=None).notes)


# --- each agent -------------------------------------------------------------------------------------------------------


def test_claude_code() -> None:
    made = plan("claude")
    assert made.arguments == ("--model", "qwen")
    assert made.unset == ("ANTHROPIC_API_KEY",)
    assert dict(made.env) == {
        "CLAUDE_CONFIG_DIR": str(HOME),
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:8000",
        "ANTHROPIC_AUTH_TOKEN": "sk-1",
        "ANTHROPIC_DEFAULT_OPUS_MODEL": "qwen",
        "ANTHROPIC_DEFAULT_SONNET_MODEL": "qwen",
        "ANTHROPIC_DEFAULT_FABLE_MODEL": "qwen",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": "local-haiku",
        "API_TIMEOUT_MS": "3600000",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "65536",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "8192",
    }
    assert made.notes == ()


@pytest.mark.parametrize(
    ("window", "bare", "note"),
    [(8192, True, "in its bare mode"), (40_000, False, "64000 tokens are better"), (None, False, "")],
)
def test_claude_code_runs_in_bare_mode_in_a_small_window(window: int | None, bare: bool, note: str) -> None:
    made = plan("claude", window=window)
    assert ("--bare" in made.arguments) == bare
    assert note in "".join(made.notes)
    assert bool(made.notes) == bool(note)


def test_codex() -> None:
    made = plan("codex")
    flags, settings = made.arguments[::2], made.arguments[1::2]
    assert set(flags) == {"-c"}
    assert tomllib.loads("\n".join(settings)) == {
        "model": "qwen",
        "model_provider": "modelyard",
        "model_context_window": 65_536,
        "model_providers": {
            "modelyard": {
                "name": "Modelyard",
                "base_url": "http://127.0.0.1:8000/v1",
                "wire_api": "responses",
                "env_key": "CODEX_MODELYARD_KEY",
                "stream_idle_timeout_ms": 3_600_000,
            }
        },
    }
    assert dict(made.env) == {"CODEX_HOME": str(HOME), "CODEX_MODELYARD_KEY": "sk-1"}


def test_codex_truncates_tool_results_that_could_overflow_a_small_window() -> None:
    for window, limit in ((None, None), (65_536, None), (20_000, 1250), (4096, 500)):
        settings = tomllib.loads("\n".join(plan("codex", window=window).arguments[1::2]))
        assert settings.get("tool_output_token_limit") == limit


def test_gemini_leads_its_side_requests_to_the_server_and_compresses_in_time() -> None:
    made = plan("gemini", window=100_000)
    (settings,) = (json.loads(text) for text in made.files.values())
    assert settings["model"]["compressionThreshold"] * 1_048_576 == pytest.approx(70_000, rel=1e-3)
    rules = settings["modelConfigs"]["customOverrides"]
    assert [rule["modelConfig"]["model"] for rule in rules] == ["local-haiku", TARGET.model]
    assert "GOOGLE_GENAI_USE_VERTEXAI" in made.unset


def test_opencode() -> None:
    settings = json.loads(plan("opencode").env["OPENCODE_CONFIG_CONTENT"])
    assert (settings["model"], settings["small_model"]) == ("modelyard/qwen", "modelyard/local-haiku")
    provider = settings["provider"]["modelyard"]
    assert provider["options"] == {"baseURL": "http://127.0.0.1:8000/v1", "apiKey": "sk-1", "timeout": False}
    limit = {"limit": {"context": 65_536, "output": 16_384}}
    assert provider["models"] == {"qwen": limit, "local-haiku": limit}


def test_opencode_does_not_compact_if_its_prompt_does_not_fit() -> None:
    """It would compact for ever."""
    small = json.loads(plan("opencode", window=4096).env["OPENCODE_CONFIG_CONTENT"])
    assert small["compaction"] == {"auto": False}
    assert "compaction" not in json.loads(plan("opencode").env["OPENCODE_CONFIG_CONTENT"])


def test_continue() -> None:
    made = plan("continue")
    (path,) = made.files
    assert made.arguments == ("--config", str(path))
    (model,) = json.loads(made.files[path])["models"]
    assert (model["provider"], model["model"], model["apiBase"]) == ("openai", "qwen", "http://127.0.0.1:8000/v1")
    assert (model["contextLength"], model["apiKey"]) == (65_536, "sk-1")
    assert 1800 * 1000 < model["requestOptions"]["timeout"] < 2**31 / 1000, "it is read in both units"


def test_aider() -> None:
    made = plan("aider")
    (path,) = made.files
    assert made.arguments[:4] == ("--model", "openai/qwen", "--weak-model", "openai/local-haiku")
    assert made.arguments[-2:] == ("--model-metadata-file", str(path))
    metadata = json.loads(made.files[path])
    assert {name: model["max_input_tokens"] for name, model in metadata.items()} == {
        "openai/qwen": 65_536,
        "openai/local-haiku": 65_536,
    }
    assert made.env["OPENAI_API_BASE"] == "http://127.0.0.1:8000/v1"


def test_cline_gets_its_provider_in_a_file_and_starts_no_process_that_outlives_it() -> None:
    made = plan("cline")
    (settings,) = (json.loads(text) for text in made.files.values())
    provider = settings["providers"][settings["lastUsedProvider"]]["settings"]
    assert (provider["baseUrl"], provider["apiKey"], provider["model"]) == ("http://127.0.0.1:8000/v1", "sk-1", "qwen")
    assert (provider["contextWindow"], provider["maxTokens"]) == (65_536, 16_384)
    assert made.env["CLINE_SESSION_BACKEND_MODE"] == "local"


def test_crush_reads_the_key_from_a_variable_because_its_file_expands_dollar_signs() -> None:
    made = plan("crush", key="sk-$HOME")
    (settings,) = (json.loads(text) for text in made.files.values())
    name = settings["providers"]["modelyard"]["api_key"]
    assert made.env[name.removeprefix("$")] == "sk-$HOME"
    assert settings["models"]["small"] == {"provider": "modelyard", "model": "local-haiku"}
    large, small = settings["providers"]["modelyard"]["models"]
    assert (large["id"], small["id"], large["context_window"]) == ("qwen", "local-haiku", 65_536)


def test_goose_is_set_by_variables_only() -> None:
    made = plan("goose")
    assert made.arguments == ()
    assert (made.env["GOOSE_PROVIDER"], made.env["GOOSE_MODEL"]) == ("openai", "qwen")
    assert (made.env["OPENAI_HOST"], made.env["GOOSE_CONTEXT_LIMIT"]) == ("http://127.0.0.1:8000", "65536")
    assert "OPENAI_BASE_URL" in made.unset, "it would win over OPENAI_HOST"


def test_roo_imports_a_profile_of_our_folder() -> None:
    made = plan("roo", capabilities=("completion", "tools", "vision"))
    ((path, text),) = made.files.items()
    (added,) = made.user_settings.values()
    assert added == {"roo-cline.autoImportSettingsPath": str(path)}
    profiles = json.loads(text)["providerProfiles"]
    profile = profiles["apiConfigs"][profiles["currentApiConfigName"]]
    assert (profile["openAiBaseUrl"], profile["openAiModelId"]) == ("http://127.0.0.1:8000/v1", "qwen")
    assert profile["openAiCustomModelInfo"]["supportsImages"] is True


def test_zed_gets_a_provider_whose_key_is_in_the_variable_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/ada/.config")
    made = plan("zed")
    assert list(made.user_settings) == [Path("/home/ada/.config/zed/settings.json")]
    (added,) = made.user_settings.values()
    provider = added["language_models"]["openai_compatible"]["Modelyard"]
    (model,) = provider["available_models"]
    assert (provider["api_url"], model["name"], model["max_tokens"]) == ("http://127.0.0.1:8000/v1", "qwen", 65_536)
    assert made.env == {"MODELYARD_API_KEY": "sk-1"}


def test_gemini_does_not_ask_about_a_new_folder() -> None:
    (text,) = plan("gemini").files.values()
    assert json.loads(text)["security"]["folderTrust"] == {"enabled": False}


def test_an_agent_as_data_gets_numbers_as_numbers_and_leaves_out_what_is_unknown() -> None:
    (text,) = plan("pi").files.values()
    (model,) = json.loads(text)["providers"]["modelyard"]["models"]
    assert model["contextWindow"] == TARGET.window
    (text,) = plan("pi", window=None).files.values()
    (model,) = json.loads(text)["providers"]["modelyard"]["models"]
    assert "contextWindow" not in model
    (text,) = plan("kimi").files.values()
    assert tomllib.loads(text)["models"]["modelyard"]["max_context_size"] == TARGET.window


def test_a_key_with_braces_is_not_taken_for_a_placeholder() -> None:
    (text,) = plan("vscode", key="{model}").files.values()
    assert json.loads(text)[0]["apiKey"] == "{model}"
