"""How a body is built is seen without parsing it, exactly as a parser would see it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from modelyard.http import json_limits
from modelyard.http.json_limits import MAX_CONTAINERS, MAX_VALUES, json_fault

TREES = st.recursive(
    st.none() | st.integers() | st.text('"\\[]{},a\u00e9', max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('"\\[]{}', max_size=3), inner, max_size=3),
    max_leaves=30,
)


def levels(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(levels, value.values()), default=0)
    return 1 + max(map(levels, value), default=0) if isinstance(value, list) else 0


@given(TREES, st.integers(1, 6), st.booleans(), st.integers(1, 9))
@example([["\\"]], 1, True, 1)
@example(['"', [["\\\\"]]], 2, False, 2)
def test_it_is_too_deep_where_a_parser_finds_it_too_deep(tree: Any, limit: int, ascii_only: bool, cut: int) -> None:
    """`cut` lets strings and escapes fall across the borders of the slices that are looked at."""
    whole, json_limits._SLICE = json_limits._SLICE, cut
    try:
        found = json_fault(json.dumps(tree, ensure_ascii=ascii_only).encode(), limit)
    finally:
        json_limits._SLICE = whole
    assert (found is not None) == (levels(tree) > limit)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 10_000,
        b"[" * 10_000 + b"]" * 10_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"messages":' + b"[" * 65 + b'"' + b'\\"' * 100,
        b"]" * 100 + b"[" * 65,
        b"[]" * 100 + b"[" * 65,
    ],
)
def test_hopeless_bodies_are_too_deep(body: bytes) -> None:
    assert json_fault(body, 64) == "the JSON body is nested more than 64 levels deep"


@pytest.mark.parametrize(
    "body", [b"", b"hello", b'"' + b"[" * 1000 + b'"', b'["' + b'\\"[' * 1000 + b'"]', b'["\\\\"]' * 200, b"]" * 1000]
)
def test_brackets_in_strings_and_brackets_that_only_close_are_not_deep(body: bytes) -> None:
    assert json_fault(body, 64) is None


def test_there_is_an_end_to_containers_and_to_values() -> None:
    assert json_fault(b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"[]]", 64) is None
    assert "arrays and objects" in str(json_fault(b"[" + b"[]," * MAX_CONTAINERS + b"[]]", 64))
    assert json_fault(b"[" + b"1," * (MAX_VALUES - 1) + b"1]", 64) is None
    assert "values" in str(json_fault(b"[" + b"1," * (MAX_VALUES + 1) + b"1]", 64))
    assert json_fault(b'["' + b"," * (MAX_VALUES + 1) + b'"]', 64) is None
