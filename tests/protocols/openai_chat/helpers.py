"""Chat bodies and streams for the tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from modelyard.core.events import (
    Block,
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Finished,
    Reply,
    Started,
    StopReason,
    Usage,
)
from modelyard.core.request import Request, Text, Thinking, ToolCall
from modelyard.protocols import openai_chat

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


def body(**fields: Any) -> bytes:
    return msgspec.json.encode({"model": "m", "messages": HELLO} | fields)


def read(**fields: Any) -> Request:
    return openai_chat.read_request(body(**fields), {})


def written(request: Request) -> dict[str, Any]:
    out: dict[str, Any] = msgspec.json.decode(openai_chat.write_request(request))
    return out


STARTED = Started("abc123", "tiny", 1_700_000_000, Usage(9, 4))
USAGE = Usage(9, 4, 6, 2)
REQUEST = Request(model="tiny", stream=True)


def answer(*blocks: list[Event], reason: StopReason = "end", stop: str | None = None) -> list[Event]:
    return [STARTED, *(event for block in blocks for event in block), Finished(reason, USAGE, stop)]


def stream(events: Iterable[Event], request: Request = REQUEST) -> bytes:
    writer = openai_chat.writer(request, "trace")
    return b"".join(writer.write(event) for event in events) + writer.end()


def read_stream(*chunks: bytes) -> list[Event]:
    reader = openai_chat.reader()
    return [event for chunk in chunks for event in reader.feed(chunk)] + reader.finish()


def expressible(reply: Reply) -> Reply:
    """The protocol joins neighbouring blocks of one kind and has one name for both limits.

    After a limit, a last custom call is always incomplete.
    """
    limited = reply.finished.reason in ("max_tokens", "window")
    blocks = _joined(reply.blocks)
    last = blocks[-1] if blocks else None
    if limited and last is not None and isinstance(last.part, ToolCall) and last.part.custom:
        blocks[-1] = replace(last, complete=False)
    finished = replace(reply.finished, reason="max_tokens") if limited else reply.finished
    return Reply(replace(reply.started, usage=Usage()), tuple(blocks), finished)


def _joined(blocks: Sequence[Block]) -> list[Block]:
    out: list[Block] = []
    for block in blocks:
        last = out[-1] if out else None
        if last and isinstance(block.part, Text | Thinking) and type(last.part) is type(block.part):
            out[-1] = Block(type(block.part)(last.part.text + block.part.text), last.logprobs + block.logprobs)
        else:
            out.append(block)
    return out


def check_grammar(events: Sequence[Event]) -> None:
    """Started comes first, blocks are numbered and never overlap, and there is one end."""
    assert isinstance(events[0], Started)
    opened: int | None = None
    count = 0
    for event in events[1:-1]:
        if isinstance(event, BlockStart):
            assert opened is None
            assert event.index == count
            opened, count = event.index, count + 1
        elif isinstance(event, BlockDelta):
            assert event.index == opened
        else:
            assert isinstance(event, BlockEnd)
            assert event.index == opened
            opened = None
    assert not isinstance(events[-1], Started | BlockStart | BlockDelta | BlockEnd)
