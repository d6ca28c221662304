"""Builders of blocks and tokens for the event streams of the protocol tests."""

from __future__ import annotations

from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event, TokenLogprob


def text(index: int, *deltas: str) -> list[Event]:
    return [BlockStart(index, "text"), *(BlockDelta(index, delta) for delta in deltas), BlockEnd(index)]


def thinking(index: int, *deltas: str, signature: str = "") -> list[Event]:
    return [BlockStart(index, "thinking"), *(BlockDelta(index, delta) for delta in deltas), BlockEnd(index, signature)]


def call(
    index: int,
    call_id: str,
    name: str,
    *deltas: str,
    complete: bool = True,
    custom: bool = False,
    namespace: str | None = None,
) -> list[Event]:
    start = BlockStart(index, "tool_call", call_id, name, namespace, custom)
    return [start, *(BlockDelta(index, delta) for delta in deltas), BlockEnd(index, complete=complete)]


def token(text: str, *others: str) -> TokenLogprob:
    """A token with a log probability of -0.25, and -1.5 in the list of alternatives."""
    top = tuple(TokenLogprob(t, -1.5, t.encode()) for t in (text, *others)) if others else ()
    return TokenLogprob(text, -0.25, text.encode(), top)
