from __future__ import annotations

import pytest

from modelyard.core.request import Tool
from modelyard.plugins import UnknownPlugin
from modelyard.scanner import Call, Parsed, parse
from modelyard.scanner.formats import load

RAW = '<think>\nHm.\n</think>\n\nSo.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


def test_parse_gives_reasoning_content_and_calls() -> None:
    assert parse([RAW], format="hermes") == Parsed("Hm.", "So.", (Call("f", '{"x": 1}'),))


def test_parse_takes_chunks_of_any_size_and_a_format_itself() -> None:
    assert parse(RAW, format=load("hermes")) == parse(list(RAW), format="hermes") == parse([RAW], format="hermes")


def test_parse_with_tools_knows_only_those() -> None:
    assert parse([RAW], format="hermes", tools=[Tool("g")]).tool_calls == ()


def test_parse_is_primed_by_the_prompt() -> None:
    assert parse(["Hm.</think>So."], format="think", prefill="<think>\n") == Parsed("Hm.", "So.", ())


@pytest.mark.parametrize(
    ("format", "raw"),
    [
        ("hermes", "Hm.</think>So."),
        ("mistral", "Hm.[/THINK]So."),
        ("think", "Hm.◁/think▷So."),
        ("glm45", "Hm.</think>So."),
    ],
)
def test_a_closing_tag_that_comes_first_tells_what_the_prompt_opened(format: str, raw: str) -> None:
    assert parse([raw], format=format) == parse(list(raw), format=format) == Parsed("Hm.", "So.", ())


def test_one_that_comes_later_tells_nothing() -> None:
    raw = "A <tool_call>{} B</think> C"
    assert parse([raw], format="hermes").reasoning == ""


def test_parse_returns_a_broken_call_as_text() -> None:
    raw = '<tool_call>{"name": "f", "arguments": {"x": oops}}</tool_call>'
    assert parse([raw], format="hermes") == Parsed("", '{"name": "f", "arguments": {"x": oops}}', ())


def test_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(UnknownPlugin, match=r"harmony, hermes, .*plain, .*qwen3_coder, .*think"):
        parse([""], format="xml")
