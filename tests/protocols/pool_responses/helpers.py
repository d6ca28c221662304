"""The replies that the golden files hold, and small readers of what was written."""

from __future__ import annotations

from typing import Any

import msgspec

from modelyard.core.errors import Unavailable
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event, Failed, Finished, Started, Timings, Usage
from modelyard.core.request import Message, Request, Text
from modelyard.protocols import pool_responses as wire
from modelyard.protocols.common.sse import SseParser

TRACE = "abc123"
ASKED = Request(model="tiny", messages=(Message("user", (Text("hello"),)),), stream=True, dialect=wire.DIALECT)
TIMES = Timings(queue=0.001, tokenize=0.002, first_token=0.03, decode=0.07, backend=0.101, engine=0.105, total=0.106)
STARTED, FINISHED = Started(TRACE, "tiny", 1_700_000_000), Finished("end", Usage(20, 12, 7, 3), timings=TIMES)


def said(index: int, kind: Any, *deltas: str) -> list[Event]:
    return [BlockStart(index, kind), *(BlockDelta(index, delta) for delta in deltas), BlockEnd(index)]


CASES: dict[str, list[Event]] = {
    "text": [STARTED, *said(0, "text", "Hel", "lo."), FINISHED],
    "thought_and_text": [STARTED, *said(0, "thinking", "Hm."), *said(1, "text", "Yes."), FINISHED],
    "empty": [STARTED, FINISHED],
    "failed": [STARTED, BlockStart(0, "text"), BlockDelta(0, "Hal"), Failed(Unavailable("the engine was lost"))],
}


def stream(events: list[Event]) -> bytes:
    writer = wire.writer(ASKED, TRACE)
    return b"".join(writer.write(event) for event in events) + writer.end()


def told(written: bytes) -> list[Any]:
    """Every event's data, after a look at its `event:` line."""
    events = SseParser().feed(written)
    data = [msgspec.json.decode(event.data) for event in events]
    assert [event.event for event in events] == [each["type"] for each in data]
    return data
