"""A stream of server-sent events cut into frames, whole or as it arrives."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

DONE = "[DONE]"


class ServerSentEvent(NamedTuple):
    """One event: the name of its `event:` line ("" without one, ":" for a comment) and its data, decoded if JSON."""

    event: str
    data: Any


def parse_events(text: str) -> list[ServerSentEvent]:
    return list(iter_events([text]))


def iter_events(pieces: Iterable[str]) -> Iterator[ServerSentEvent]:
    """Frames as they become complete. Anything behind the last blank line would be a frame that was cut off."""
    rest = ""
    for piece in pieces:
        *blocks, rest = (rest + piece).split("\n\n")
        yield from (_frame(block) for block in blocks if block)
    assert rest == "", f"the stream ended within a frame: {rest!r}"


def _frame(block: str) -> ServerSentEvent:
    event, data = "", ""
    for line in block.split("\n"):
        name, _, value = line.partition(": ")
        if line.startswith(":"):
            return ServerSentEvent(":", line)
        if name == "event":
            event = value
        else:
            assert name == "data", f"neither event nor data: {line!r}"
            data = value
    return ServerSentEvent(event, data if data == DONE else json.loads(data))


def event_names(stream: Iterable[ServerSentEvent]) -> list[str]:
    return [frame.event for frame in stream]
