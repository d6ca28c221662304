"""Texts, names, ids and JSON that everything else is drawn from."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

# Surrogates cannot stand in UTF-8; quotes, newlines and half of an SSE frame are what breaks writers.
_ALPHABET = st.characters(codec="utf-8")
_NASTY = st.sampled_from(['"', "\\", "\n\n", "\r", "data: {}", "\x00", "é", "🦜", "<tool_call>", "</think>"])


def texts(min_size: int = 0, max_size: int = 12) -> SearchStrategy[str]:
    plain = st.text(_ALPHABET, min_size=min_size, max_size=max_size)
    return plain | _NASTY


def names() -> SearchStrategy[str]:
    return st.text("abcxyz_", min_size=1, max_size=6)


def ids(prefix: str = "call_") -> SearchStrategy[str]:
    return st.text("abcXYZ0189", min_size=1, max_size=8).map(lambda tail: prefix + tail)


def json_values() -> SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | texts()
    return leaves | st.lists(leaves, max_size=2) | st.dictionaries(texts(), leaves, max_size=2)


def json_objects() -> SearchStrategy[dict[str, Any]]:
    return st.dictionaries(texts(), json_values(), max_size=3)


def arguments() -> SearchStrategy[str]:
    """The JSON text of a call's arguments, spelled with and without spaces."""
    compact = json_objects().map(lambda o: msgspec.json.encode(o).decode())
    return compact | compact.map(lambda text: msgspec.json.format(text, indent=1))


def broken_arguments() -> SearchStrategy[str]:
    """What is left of arguments that a limit cut off: never valid JSON."""
    return texts().map(lambda text: '{"path": ' + msgspec.json.encode(text).decode()[:-1])
