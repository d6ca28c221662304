"""Messages and their parts, in the normal form of `core/request.py`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from modelyard.core.request import Image, Message, Part, Text, Thinking, ToolCall, ToolReference, ToolResult
from tests.strategies.values import arguments, broken_arguments, ids, names, texts


def images(*, details: bool = False) -> SearchStrategy[Image]:
    data = st.binary(min_size=1, max_size=6).map(lambda b: "data:image/png;base64," + base64.b64encode(b).decode())
    url = names().map(lambda name: f"https://example.com/{name}.png")
    return st.builds(Image, data | url, st.sampled_from([None, "low", "high"]) if details else st.none())


def thinkings(*, redacted: bool = False) -> SearchStrategy[Thinking]:
    shown = st.builds(Thinking, texts(), st.sampled_from(["", "sig", "EqQBCgIYAg=="]))
    return shown | st.builds(Thinking, st.just(""), ids("enc_"), st.just(True)) if redacted else shown


def tool_calls(*, custom: bool = False, namespaces: bool = False, broken: bool = False) -> SearchStrategy[ToolCall]:
    spaces = st.sampled_from([None, "space"]) if namespaces else st.none()
    text = arguments() | broken_arguments() if broken else arguments()
    ordinary = st.builds(ToolCall, ids(), names(), text, spaces)
    return ordinary | st.builds(ToolCall, ids(), names(), texts(), spaces, st.just(True)) if custom else ordinary


def tool_results(
    *, images_in_results: bool = False, errors: bool = False, references: bool = False, custom: bool = False
) -> SearchStrategy[ToolResult]:
    parts: SearchStrategy[Any] = st.builds(Text, texts())
    if images_in_results:
        parts |= images()
    if references:
        parts |= st.builds(ToolReference, names())
    content = st.lists(parts, min_size=1, max_size=3).map(tuple)
    return st.builds(
        ToolResult,
        ids(),
        content,
        st.booleans() if errors else st.just(False),
        st.booleans() if custom else st.just(False),
    )


def _message(role: str, parts: SearchStrategy[Any], most: int = 3) -> SearchStrategy[Message]:
    return st.builds(Message, st.just(role), st.lists(parts, min_size=1, max_size=most).map(tuple))


def conversations(
    *,
    thinking: bool = True,
    redacted: bool = False,
    tools: bool = True,
    custom: bool = False,
    namespaces: bool = False,
    broken: bool = False,
    pictures: bool = True,
    details: bool = False,
    errors: bool = False,
    references: bool = False,
    images_in_results: bool = False,
    developer: bool = False,
    system_anywhere: bool = True,
) -> SearchStrategy[tuple[Message, ...]]:
    """Messages in normal form: never two `tool` messages in a row, every message with at least one part."""
    text: SearchStrategy[Part] = st.builds(Text, texts())
    said: SearchStrategy[Part] = text | thinkings(redacted=redacted) if thinking else text
    if tools:
        said = said | tool_calls(custom=custom, namespaces=namespaces, broken=broken)
    turns = [_message("user", text | images(details=details) if pictures else text), _message("assistant", said)]
    if system_anywhere:
        turns.append(_message("system", text))
    if developer:
        turns.append(_message("developer", text))
    if tools:
        results = tool_results(images_in_results=images_in_results, errors=errors, references=references, custom=custom)
        turns.append(_message("tool", results))
    rest = st.lists(st.one_of(turns), min_size=1, max_size=5)
    head = st.lists(_message("system", text), max_size=1)
    return st.tuples(head, _message("user", text), rest).map(lambda t: _normal([*t[0], t[1], *t[2]]))


def _normal(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Neighbouring tool messages become one, as every reader makes them."""
    out: list[Message] = []
    for message in messages:
        if out and message.role == "tool" == out[-1].role:
            out[-1] = Message("tool", out[-1].parts + message.parts)
        else:
            out.append(message)
    return tuple(out)
