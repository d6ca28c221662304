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


def test_parse_returns_a_broken_call_as_text() -> None:
    raw = '<tool_call>{"name": "f", "arguments": {"x": oops}}</tool_call>'
    assert parse([raw], format="hermes") == Parsed("", '{"name": "f", "arguments": {"x": oops}}', ())


def test_an_unknown_format_lists_the_known_ones() -> None:
    with pytest.raises(UnknownPlugin, match=r"harmony, hermes, .*plain, .*qwen3_coder, .*think"):
        parse([""], format="xml")
