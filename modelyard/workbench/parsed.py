"""A reply's bytes as the events they mean, read by the client role of the protocol that wrote them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from modelyard.core.errors import ModelyardError
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event, Failed, Finished, Started
from modelyard.core.protocol import WireProtocol
from modelyard.workbench.talk import WIRES, wire


def parsed(endpoint: str, response: str) -> list[str]:
    """One line an event, neighbouring deltas together; a sentence where the bytes tell nothing."""
    spoken = next((one for one in map(wire, WIRES) if endpoint in one.PATHS), None)
    if spoken is None or not response:
        return ["This reply has no events."]
    try:
        return list(_lines(_events(spoken, response.encode("utf-8", "replace"))))
    except ModelyardError as error:
        return [error.message]


def _events(spoken: WireProtocol, body: bytes) -> list[Event]:
    if body.lstrip().startswith(b"{"):
        return _whole(spoken, body)
    reader = spoken.reader()
    return [*reader.feed(body), *reader.finish()]


def _whole(spoken: WireProtocol, body: bytes) -> list[Event]:
    reply = spoken.read_reply(body)
    events: list[Event] = [reply.started]
    for index, block in enumerate(reply.blocks):
        part = block.part
        kind = part.__struct_config__.tag
        text = getattr(part, "text", "") or getattr(part, "arguments", "")
        events.append(BlockStart(index, kind, name=getattr(part, "name", "")))  # type: ignore[arg-type]
        events += [BlockDelta(index, text), BlockEnd(index)]
    return [*events, reply.finished]


def _lines(events: Iterable[Event]) -> Iterator[str]:
    deltas: list[str] = []
    for event in events:
        if isinstance(event, BlockDelta):
            deltas.append(event.text)
            continue
        if deltas:
            yield f"delta ×{len(deltas)}  {''.join(deltas)}"
            deltas = []
        yield _line(event)
    if deltas:
        yield f"delta ×{len(deltas)}  {''.join(deltas)}"


def _line(event: Event) -> str:
    match event:
        case Started():
            return f"started  {event.model}"
        case BlockStart():
            return f"block {event.index}  {event.kind} {event.name}".rstrip()
        case BlockEnd():
            return f"end of block {event.index}" + ("" if event.complete else ", cut off")
        case Finished():
            usage = event.usage
            return f"finished  {event.reason}, {usage.prompt} + {usage.output} tokens"
        case Failed():
            return f"failed  {event.error.message}"
        case BlockDelta():
            return event.text
