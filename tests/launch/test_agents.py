"""Every agent by its plan: what a given server comes to, and that nothing of the user's own is written."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.launch import agents
from modelyard.launch.plan import Facts, Plan

HOME = Path("/cache/launch/x")
FACTS = Facts(url="http://127.0.0.1:8000", model="qwen", window=65_536, background="local-haiku", key="sk-1")


def planned(name: str, **more: Any) -> Plan:
    facts = {field: getattr(FACTS, field) for field in FACTS.__struct_fields__} | more
    return agents.find(name)[1](Facts(**facts), HOME)


def test_every_file_here_is_an_agent_by_its_name() -> None:
    assert agents.names() == ("aider", "claude", "codex", "continue", "opencode")
    with pytest.raises(InvalidRequest, match="no agent 'emacs'; there are aider, claude"):
        agents.find("emacs")


@pytest.mark.parametrize("name", agents.names())
@pytest.mark.parametrize("window", [None, 2048, 1 << 20])
def test_everything_that_is_written_lies_in_the_agents_private_folder(name: str, window: int | None) -> None:
    plan = planned(name, window=window)
    assert all(path.is_relative_to(HOME) for path in (*plan.files, *plan.initial))


@pytest.mark.parametrize("name", agents.names())
def test_address_key_model_and_window_reach_the_agent(name: str) -> None:
    plan = planned(name)
    told = " ".join([*plan.arguments, *plan.env.values(), *plan.files.values()])
    for fact in (FACTS.url, FACTS.key, FACTS.model, str(FACTS.window)):
        assert fact in told


@pytest.mark.parametrize("name", ["claude", "opencode", "aider"])
def test_small_side_requests_get_the_name_that_the_routes_have_for_them(name: str) -> None:
    plan = planned(name)
    assert "local-haiku" in " ".join([*plan.arguments, *plan.env.values()])
    assert "local-haiku" not in " ".join(planned(name, background="").env.values())


def test_claude_code() -> None:
    plan = planned("claude")
    assert plan.arguments == ("--model", "qwen")
    assert plan.unset == ("ANTHROPIC_API_KEY",)
    assert dict(plan.env) == {
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
    assert plan.notes == ()


@pytest.mark.parametrize(
    ("window", "bare", "note"),
    [(8192, True, "in its bare mode"), (40_000, False, "64000 are better"), (None, False, "")],
)
def test_claude_code_starts_bare_below_its_smallest_window_and_the_user_is_told(
    window: int | None, bare: bool, note: str
) -> None:
    plan = planned("claude", window=window)
    assert ("--bare" in plan.arguments) == bare
    assert note in "".join(plan.notes)
    assert bool(plan.notes) == bool(note)


def test_codex() -> None:
    plan = planned("codex")
    flags, settings = plan.arguments[::2], plan.arguments[1::2]
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
    assert dict(plan.env) == {"CODEX_HOME": str(HOME), "CODEX_MODELYARD_KEY": "sk-1"}


@pytest.mark.parametrize(("window", "limit"), [(None, None), (65_536, None), (20_000, 1250), (4096, 500)])
def test_codex_cuts_results_of_tools_where_one_could_overfill_the_window(window: int | None, limit: int | None) -> None:
    settings = tomllib.loads("\n".join(planned("codex", window=window).arguments[1::2]))
    assert settings.get("tool_output_token_limit") == limit


def test_opencode() -> None:
    settings = json.loads(planned("opencode").env["OPENCODE_CONFIG_CONTENT"])
    assert (settings["model"], settings["small_model"]) == ("modelyard/qwen", "modelyard/local-haiku")
    provider = settings["provider"]["modelyard"]
    assert provider["options"] == {"baseURL": "http://127.0.0.1:8000/v1", "apiKey": "sk-1", "timeout": False}
    limit = {"limit": {"context": 65_536, "output": 16_384}}
    assert provider["models"] == {"qwen": limit, "local-haiku": limit}


def test_opencode_makes_no_summaries_where_they_cannot_help() -> None:
    """It would make one after another for ever."""
    small = json.loads(planned("opencode", window=4096).env["OPENCODE_CONFIG_CONTENT"])
    assert small["compaction"] == {"auto": False}
    assert "compaction" not in json.loads(planned("opencode").env["OPENCODE_CONFIG_CONTENT"])


def test_continue() -> None:
    plan = planned("continue")
    (path,) = plan.files
    assert plan.arguments == ("--config", str(path))
    (model,) = json.loads(plan.files[path])["models"]
    assert (model["provider"], model["model"], model["apiBase"]) == ("openai", "qwen", "http://127.0.0.1:8000/v1")
    assert (model["contextLength"], model["apiKey"]) == (65_536, "sk-1")
    assert 1800 * 1000 < model["requestOptions"]["timeout"] < 2**31 / 1000, "it is read as either unit"


def test_aider() -> None:
    plan = planned("aider")
    (path,) = plan.files
    assert plan.arguments[:4] == ("--model", "openai/qwen", "--weak-model", "openai/local-haiku")
    assert plan.arguments[-2:] == ("--model-metadata-file", str(path))
    known = json.loads(plan.files[path])
    assert {name: told["max_input_tokens"] for name, told in known.items()} == {
        "openai/qwen": 65_536,
        "openai/local-haiku": 65_536,
    }
    assert plan.env["OPENAI_API_BASE"] == "http://127.0.0.1:8000/v1"


@pytest.mark.parametrize("name", ["codex", "opencode"])
def test_an_agent_that_cannot_fit_is_launched_with_a_word_about_it(name: str) -> None:
    (note,) = planned(name, window=4096).notes
    assert "window of 4096 tokens" in note
    assert "larger n_ctx" in note
    assert planned(name).notes == ()
