"""JSON with errors is repaired if it has only one possible meaning."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.scanner.lenient_json import JsonReader, repair_json, repair_literal
from modelyard.scanner.lexer import ParseError, TextBuffer

_leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
_json = st.recursive(
    _leaves, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(), v, max_size=4), max_leaves=12
)


def _streamed(text: str, size: int) -> str:
    buffer, out = TextBuffer({}), []
    steps = JsonReader(buffer, out.append).read()
    chunks = iter([text[i : i + size] for i in range(0, len(text), size)])
    for _ in steps:
        chunk = next(chunks, None)
        buffer.ended = chunk is None
        buffer.push(chunk or "")
    return "".join(out)


@settings(max_examples=100, deadline=None)
@given(_json, st.integers(1, 7), st.sampled_from([None, 2]), st.booleans())
def test_valid_json_passes_unchanged(value: Any, size: int, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert _streamed(text, size) == text


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text("ab'\"\\\n é"),
        lambda v: st.lists(v) | st.dictionaries(st.text("ab'"), v),
        max_leaves=8,
    )
)
def test_python_literals_mean_the_same(value: Any) -> None:
    fixed = repair_json(repr(value).replace("\\x", "\\u00"))
    assert fixed is not None
    assert json.loads(fixed) == value


@pytest.mark.parametrize(
    ("broken", "meant"),
    [
        ("{'a': 1}", '{"a": 1}'),
        ('{"a": 1,}', '{"a": 1}'),
        ('{"a": [1, 2,], }', '{"a": [1, 2] }'),
        ('{"a": 1,, "b": 2}', '{"a": 1, "b": 2}'),
        ('{"a": 1 "b": 2}', '{"a": 1, "b": 2}'),
        ("{a: 1, b_c: 2}", '{"a": 1, "b_c": 2}'),
        ('{"a": True, "b": None}', '{"a": true, "b": null}'),
        ('{"a": [1, {"b": 2', '{"a": [1, {"b": 2}]}'),
        ('{"a": [1, 2}', '{"a": [1, 2]}'),
        ('"a\nb\x01"', '"a\\nb\\u0001"'),
        (r'"\d \u12 \x"', r'"\\d \\u12 \\x"'),
        (r'"\ud800"', r'"\ufffd"'),
        ("[.5, 5., +5]", "[0.5, 5.0, 5]"),
        ("[]", "[]"),
        ("{", "{}"),
    ],
)
def test_an_error_with_one_possible_meaning_is_repaired(broken: str, meant: str) -> None:
    assert repair_json(broken) == meant
    json.loads(meant)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{]",
        '{"a"}',
        '{"a": }',
        '{, "a": 1}',
        '{"a": oops}',
        '"abc',
        '{"a": "b',
        "007",
        "NaN",
        "[1] 2",
        "}",
        '"a" b"',
        '"\\',
        "[" * 300,
    ],
)
def test_json_without_a_certain_meaning_is_not_repaired(text: str) -> None:
    assert repair_json(text) is None


def test_a_container_that_the_output_leaves_open_is_not_closed() -> None:
    buffer = TextBuffer({})
    buffer.push('{"a": 1')
    buffer.ended = True
    with pytest.raises(ParseError, match="ends inside"):
        list(JsonReader(buffer, lambda text: None).read())


@settings(max_examples=100, deadline=None)
@given(st.text("{}[]\"',:\\ab1 \nu0<"))
def test_repaired_json_is_valid(text: str) -> None:
    fixed = repair_json(text)
    if fixed is not None:
        json.loads(fixed)


def test_the_error_names_the_word_that_is_not_a_value() -> None:
    with pytest.raises(ParseError, match="'undefined' is not a value"):
        repair_literal("undefined")
