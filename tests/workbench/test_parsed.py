"""A reply's bytes as events: streamed or whole, in every protocol, and sentences for what is none."""

from __future__ import annotations

import pytest

from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event, Finished, ReplyBuilder, Started, Usage
from modelyard.core.request import Request
from modelyard.workbench.parsed import parsed
from modelyard.workbench.talk import WIRES, wire

EVENTS: list[Event] = [
    Started("t", "m", 0),
    BlockStart(0, "text"),
    BlockDelta(0, "Hel"),
    BlockDelta(0, "lo"),
    BlockEnd(0),
    Finished("end", Usage(3, 0, 2)),
]


@pytest.mark.parametrize("name", WIRES)
def test_a_stream_is_read_and_its_deltas_stand_together(name: str) -> None:
    spoken, request = wire(name), Request(model="m", stream=True, include_usage=True)
    writer = spoken.writer(request, "t")
    text = b"".join([*(writer.write(event) for event in EVENTS), writer.end()]).decode()
    lines = parsed(spoken.PATHS[0], text)
    assert "delta ×2  Hello" in lines
    assert lines[-1] == "finished  end, 3 + 2 tokens"


@pytest.mark.parametrize("name", WIRES)
def test_a_whole_reply_is_read_as_the_same_events(name: str) -> None:
    fold = ReplyBuilder()
    fold.feed(EVENTS)
    spoken = wire(name)
    lines = parsed(spoken.PATHS[0], spoken.write_reply([fold.reply()], Request(model="m")).decode())
    assert lines == ["started  m", "block 0  text", "delta ×1  Hello", "end of block 0", "finished  end, 3 + 2 tokens"]


def test_what_has_no_events_says_so() -> None:
    assert parsed("/v1/embeddings", "{}") == ["This reply has no events."]
    assert parsed("/v1/messages", "") == ["This reply has no events."]


def test_an_error_is_told_in_its_own_words() -> None:
    told = parsed("/v1/chat/completions", '{"error": {"message": "no such model", "type": "x", "code": "y"}}')
    assert told != []
    assert all(isinstance(line, str) for line in told)
