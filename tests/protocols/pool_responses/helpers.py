"""The cases of the golden files, and helpers that decode what was written."""

from __future__ import annotations

from typing import Any

import msgspec

from modelyard.core.errors import Unavailable
from modelyard.core.events import BlockDelta, BlockStart, Event, Failed, Finished, Started, Timings, Usage
from modelyard.core.request import Message, Request, Text
from modelyard.protocols import pool_responses
from modelyard.protocols.common.sse import SseParser
from tests.protocols.event_streams import text, thinking

TRACE = "abc123"
REQUEST = Request(
    model="tiny", messages=(Message("user", (Text("hello"),)),), stream=True, dialect=pool_responses.DIALECT
)
TIMES = Timings(queue=0.001, tokenize=0.002, first_token=0.03, decode=0.07, backend=0.101, engine=0.105, total=0.106)
STARTED, FINISHED = Started(TRACE, "tiny", 1_700_000_000), Finished("end", Usage(20, 12, 7, 3), timings=TIMES)

CASES: dict[str, list[Event]] = {
    "text": [STARTED, *text(0, "Hel", "lo."), FINISHED],
    "thought_and_text": [STARTED, *thinking(0, "Hm."), *text(1, "Yes."), FINISHED],
    "empty": [STARTED, FINISHED],
    "failed": [STARTED, BlockStart(0, "text"), BlockDelta(0, "Hal"), Failed(Unavailable("the engine was lost"))],
}


def stream(events: list[Event]) -> bytes:
    writer = pool_responses.writer(REQUEST, TRACE)
    return b"".join(writer.write(event) for event in events) + writer.end()


def data_of(written: bytes) -> list[Any]:
    """The data of every event; checks that the `event:` lines agree with it."""
    events = SseParser().feed(written)
    decoded = [msgspec.json.decode(event.data) for event in events]
    assert [event.event for event in events] == [data["type"] for data in decoded]
    return decoded
