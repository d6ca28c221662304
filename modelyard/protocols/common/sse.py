"""Server-sent events: writing frames, parsing a byte stream that may be split anywhere, and reading an upstream's."""

from __future__ import annotations

from abc import ABC, abstractmethod

from msgspec import Struct

from modelyard.core.errors import Incomplete, ModelyardError
from modelyard.core.events import Event, Failed, Reply, collect_reply
from modelyard.protocols.common.json import JsonObject, encode


class SseEvent(Struct, frozen=True):
    event: str
    data: bytes


def frame(data: bytes, event: str | None = None) -> bytes:
    if event is None:
        return b"data: " + data + b"\n\n"
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


def delta_start(name: str, fields: JsonObject) -> bytes:
    """Everything of a numbered delta event before its number, encoded once per item."""
    start = encode({"type": name} | fields).removesuffix(b"}")
    return b"event: " + name.encode() + b"\ndata: " + start + b',"sequence_number":'


def comment(text: str = "keep-alive") -> bytes:
    return b": " + text.encode() + b"\n\n"


class SseParser:
    """Chunks of bytes to whole events. Drops comments and unknown fields; CR, LF and CRLF all end a line."""

    def __init__(self) -> None:
        self._rest = b""
        self._event = ""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[SseEvent]:
        if not self._rest and not self._data and data.startswith(b"data: ") and data.endswith(b"\n\n"):
            whole = data[6:-2].split(b"\n\ndata: ")
            # Two line breaks each: they have no other fields, and no second line.
            if data.count(b"\n") == 2 * len(whole) and b"\r" not in data and not self._event:
                return [SseEvent("", one) for one in whole]
        buffer = self._rest + data
        held = b"\r" if buffer.endswith(b"\r") else b""  # may be the first half of CRLF
        lines = buffer[: len(buffer) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + held
        return [event for line in lines if (event := self._line(line)) is not None]

    def finish(self) -> list[SseEvent]:
        """The last event of a stream that ended without its blank line."""
        return self.feed(b"\n\n")

    def _line(self, line: bytes) -> SseEvent | None:
        if not line:
            event, data = self._event, self._data
            self._event, self._data = "", []
            return SseEvent(event, b"\n".join(data)) if data else None
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")
        return None


class SseReader(ABC):
    """An upstream's stream, bytes to events. Ends with exactly one Finished or Failed and ignores what follows."""

    def __init__(self) -> None:
        self._sse = SseParser()
        self._done = self._is_whole = False
        self._has_answer = False  # or a part of one
        self._out: list[Event] = []

    @abstractmethod
    def _read(self, data: bytes) -> None:
        """Add the events of one frame to `_out`."""

    def _end(self) -> None:
        """The stream has ended, but not with an answer."""
        self._fail(Incomplete("the upstream's stream ended before its answer did"))

    def feed(self, data: bytes) -> list[Event]:
        for event in self._sse.feed(data):
            self._read(event.data)
        return self._take()

    def finish(self) -> list[Event]:
        for event in self._sse.finish():
            self._read(event.data)
        if not self._done:
            self._end()
        return self._take()

    def read_whole(self, body: bytes) -> Reply:
        """A reply that is not streamed is a stream of one frame. Raises what fails it."""
        self._is_whole = True
        self._read(body)
        if not self._has_answer and not self._done:
            raise Incomplete("the upstream's reply has no answer")
        self._read(b"[DONE]")
        return collect_reply(self._take())

    def _take(self) -> list[Event]:
        out, self._out = self._out, []
        return out

    def _fail(self, error: ModelyardError) -> None:
        if not self._done:
            self._done = True
            self._out.append(Failed(error))
