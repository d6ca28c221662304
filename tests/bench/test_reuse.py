"""The counts of a session's turns, the scripted sessions, recorded requests, and the model cut to a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.reuse import (
    SessionResult,
    Tally,
    Turn,
    configuration,
    count_tokens,
    cut_model,
    ratio,
    shorten,
    table,
    tally,
)
from bench.reuse_sessions import SESSIONS, write_files
from modelyard.config.load import load_config
from modelyard.launch.agents import AGENTS
from modelyard.library import default_model
from modelyard.library.gguf import read_contents
from modelyard_fake.script import ScriptRule

OURS = (Turn("a", 100, 0, 10), Turn("b", 50, 0, 5), Turn("a", 130, 108), Turn("b", 70, 55))


def test_only_tokens_cached_before_count_and_each_session_alone() -> None:
    found = tally(OURS)
    assert (found.requests, found.known, found.again, found.evaluated) == (4, 165, 2, 37)
    assert found.share == pytest.approx(2 / 165)


def test_another_conversation_with_the_same_session_name_starts_over() -> None:
    title = Turn("a", 60, 0, 10, "new_session")
    assert tally([title, Turn("a", 500, 0, 10, "other_session"), Turn("a", 600, 510, 0, "none")]).known == 510


def test_a_side_request_between_two_turns_is_not_a_predecessor() -> None:
    first, second = Turn("a", 500, 0, 10, "new_session"), Turn("a", 600, 400, 0, "evicted")
    title = Turn("a", 60, 0, 10, "other_session")
    assert tally([first, title, second]) == Tally(3, 510, 110, 200)
    assert tally([title, first, second]) == Tally(3, 510, 110, 200)


def test_a_shorter_prompt_reuses_no_more_than_its_length() -> None:
    assert tally([Turn("a", 100, 0, 10), Turn("a", 60, 60)]).share == 0
    assert tally([Turn("a", 100, 0)]).share == 0


def test_generated_tokens_are_subtracted_from_those_of_the_other_server() -> None:
    theirs = (Turn("a", 100, 0), Turn("b", 50, 0), Turn("a", 130, 100), Turn("b", 70, 50))
    found = SessionResult("x", OURS, theirs)
    assert ratio(found) == pytest.approx(37 / (50 - 15))
    assert table([found]).row_count == 1


def test_every_session_has_rules_and_an_agent(tmp_path: Path) -> None:
    write_files(tmp_path)
    assert "line 0 of file 5:" in (tmp_path / "f5.txt").read_text()
    for session in SESSIONS:
        rules = [ScriptRule.model_validate(rule) for rule in session.rules(tmp_path)]
        assert sum(any(step.calls for step in rule.steps) for rule in rules) >= 6
        assert session.agent in AGENTS


def test_the_configuration_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("bench.reuse.shallow_model", lambda: tmp_path / "model.gguf")
    loaded = load_config(env={}, overrides=configuration("generic"))
    assert loaded.config.caches["main"].n_ctx == 65536


@pytest.mark.parametrize(
    ("path", "tool", "kept"),
    [
        ("/v1/messages", {"name": "Bash", "input_schema": {}}, True),
        ("/v1/messages", {"type": "web_search_20250305", "name": "web_search"}, False),
        ("/v1/responses", {"type": "function", "name": "exec"}, True),
        ("/v1/responses", {"type": "namespace", "name": "agents", "tools": []}, False),
        ("/v1/chat/completions", {"type": "function", "function": {"name": "read"}}, True),
    ],
)
def test_a_recorded_request_is_shortened_to_one_token_and_local_tools(
    path: str, tool: dict[str, Any], kept: bool
) -> None:
    sent = shorten({"tools": [tool], "max_tokens": 9, "max_output_tokens": 9, "stream": True, "model": "m"}, path)
    limit = "max_output_tokens" if path.endswith("responses") else "max_tokens"
    assert sent == {"tools": [tool] if kept else [], "model": "m", "stream": False, limit: 1}


@pytest.mark.parametrize(
    "reply",
    [
        {"timings": {"prompt_n": 30, "cache_n": 70}},
        {"usage": {"input_tokens": 30, "cache_read_input_tokens": 70}},
        {"usage": {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 70}}},
        {"usage": {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 70}}},
    ],
)
def test_cached_tokens_are_read_from_every_protocol(reply: dict[str, Any]) -> None:
    assert count_tokens(reply) == (100, 70)


def test_a_model_is_cut_to_its_first_layers(tmp_path: Path) -> None:
    source, target = default_model.fetch(), tmp_path / "cut.gguf"
    cut_model(source, target, 2)
    (before, _), (after, tensors) = read_contents(source), read_contents(target)
    assert {tensor.name.split(".")[1] for tensor in tensors if tensor.name.startswith("blk.")} == {"0", "1"}
    assert (after["llama.block_count"], after["llama.context_length"]) == (2, 131072)
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_template", "llama.embedding_length"):
        assert after[name] == before[name]
