"""A stream of server-sent events cut into frames, whole or as it arrives."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

DONE = "[DONE]"


class Frame(NamedTuple):
    """One event: the name of its `event:` line ("" without one, ":" for a comment) and its data, decoded if JSON."""

    event: str
    data: Any


def frames(text: str) -> list[Frame]:
    return list(arriving([text]))


def arriving(pieces: Iterable[str]) -> Iterator[Frame]:
    """Frames as they become complete. Anything behind the last blank line would be a frame that was cut off."""
    rest = ""
    for piece in pieces:
        *blocks, rest = (rest + piece).split("\n\n")
        yield from (_frame(block) for block in blocks if block)
    assert rest == "", f"the stream ended within a frame: {rest!r}"


def _frame(block: str) -> Frame:
    event, data = "", ""
    for line in block.split("\n"):
        name, _, value = line.partition(": ")
        if line.startswith(":"):
            return Frame(":", line)
        if name == "event":
            event = value
        else:
            assert name == "data", f"neither event nor data: {line!r}"
            data = value
    return Frame(event, data if data == DONE else json.loads(data))


def names(stream: Iterable[Frame]) -> list[str]:
    return [frame.event for frame in stream]
