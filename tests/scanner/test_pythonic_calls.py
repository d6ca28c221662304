"""Calls as Python: literals, lists, and what is not a call."""

from __future__ import annotations

import ast
import json

import pytest

from modelyard.core.request import Tool
from modelyard.core.tokenizer import Piece
from modelyard.scanner import Scanner, parse
from modelyard.scanner.formats import load
from tests.scanner.helpers import delta_texts


def _value(literal: str) -> object:
    (call,) = parse([f"[f(x={literal})]"], format="pythonic").tool_calls
    return json.loads(call.arguments)["x"]


STRINGS = [
    "'a'",
    '"a"',
    "''",
    "'it\\'s'",
    "'\\x41\\u00e9\\U0001F600'",
    "'\\a\\v\\\\'",
    "'\\\nb'",
    "'''a\n\"b\" 'c' '''",
    "''''''",
]
OTHERS = ["-1", "2.5", "True", "None", "[]", "[1, ['a'], {}]", "{'a': {'b': [None, False]}}", "{ 'a' : 1, 'b': {} }"]
LOOSE = [("true", True), ("null", None), ('"\\ud83d\\ude00"', "😀"), ("'\\xz \\q'", "\\xz \\q"), ("{a: 1}", {"a": 1})]
SETS = [("{'a', 'b'}", ["a", "b"]), ("{1}", [1]), ("{'k': {True, None,}}", {"k": [True, None]}), ("{1: {}}", {"1": {}})]
QUOTED = [
    ("'sed -n '1,9p' f.py'", "sed -n '1,9p' f.py"),
    ("""'g "h(m='\\,')"'""", """g "h(m='\\,')\""""),
    ("'it's'", "it's"),
]


@pytest.mark.parametrize("literal", [*STRINGS, *OTHERS])
def test_literals_have_the_values_of_python(literal: str) -> None:
    assert _value(literal) == ast.literal_eval(literal)


@pytest.mark.parametrize(("literal", "value"), LOOSE)
def test_json_literals_and_wrong_escapes_are_read(literal: str, value: object) -> None:
    assert _value(literal) == value


@pytest.mark.parametrize(("literal", "value"), SETS)
def test_sets_become_lists_and_keys_become_strings(literal: str, value: object) -> None:
    assert _value(literal) == value


@pytest.mark.parametrize(("literal", "value"), QUOTED)
def test_quotes_without_escapes_do_not_end_a_string(literal: str, value: object) -> None:
    assert _value(literal) == value


@pytest.mark.parametrize("after", ["", " So.", "So.", "]", "\n"])
def test_text_after_the_list_does_not_matter(after: str) -> None:
    assert parse([f"[f(x='a')]{after}"], format="pythonic").tool_calls[0].arguments == '{"x": "a"}'


@pytest.mark.parametrize(
    "raw",
    [
        "[f(x={'a')]",
        "[f(x={'a' 1})]",
        "[f(x={y})]",
        "[f(x=y)]",
        "[f(1)]",
        "[f(**x)]",
        "[f(x='a)]",
        "[f(x=(1, 2))]",
        "[f]",
        "[]",
        "[(x)]",
    ],
)
def test_a_call_with_other_values_is_text(raw: str) -> None:
    parsed = parse([raw], format="pythonic")
    assert (parsed.content, parsed.tool_calls) == (raw, ())


def test_arguments_are_streamed() -> None:
    scanner = Scanner(load("pythonic"), tools=[Tool("f")], new_id=lambda: "c")
    fed = [scanner.feed([Piece(text)]) for text in ("Hm. [", "f(", "x='a", "b", "', y=", "[1, ", "2])]")]
    assert [delta_texts(events) for events in fed] == [
        ["Hm. "],
        [],
        ['{"x": "a'],
        ["b"],
        ['"'],
        [', "y": [1'],
        [", 2]}"],
    ]
