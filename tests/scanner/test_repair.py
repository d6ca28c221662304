from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.scanner.lexer import Tape, Unreadable
from modelyard.scanner.repair import JsonValue, mend, mended

_leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
_json = st.recursive(
    _leaves, lambda v: st.lists(v, max_size=4) | st.dictionaries(st.text(), v, max_size=4), max_leaves=12
)


def _streamed(text: str, size: int) -> str:
    tape, out = Tape({}), []
    steps = JsonValue(tape, out.append).read()
    chunks = iter([text[i : i + size] for i in range(0, len(text), size)])
    for _ in steps:
        chunk = next(chunks, None)
        tape.ended = chunk is None
        tape.push(chunk or "")
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
    fixed = mend(repr(value).replace("\\x", "\\u00"))
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
def test_one_certain_reading_is_taken(broken: str, meant: str) -> None:
    assert mend(broken) == meant
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
def test_uncertain_json_is_unreadable(text: str) -> None:
    assert mend(text) is None


def test_a_cut_off_container_is_not_closed() -> None:
    tape = Tape({})
    tape.push('{"a": 1')
    tape.ended = tape.cut = True
    with pytest.raises(Unreadable, match="cut off"):
        list(JsonValue(tape, lambda text: None).read())


@settings(max_examples=100, deadline=None)
@given(st.text("{}[]\"',:\\ab1 \nu0<"))
def test_whatever_is_mended_is_json(text: str) -> None:
    fixed = mend(text)
    if fixed is not None:
        json.loads(fixed)


def test_a_word_that_is_no_value_is_named() -> None:
    with pytest.raises(Unreadable, match="'undefined' is no value"):
        mended("undefined")
