"""The texts of recent requests, in memory and only where switched on: what came, the prompt, the raw output, the reply.

For people who look into one request. Bounded in bytes; the oldest leave first. The debug journal is the same on disk.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from msgspec import Struct

from modelyard.telemetry.journal import Entry

_LONGEST = 1 << 20  # characters or bytes of one part; what is longer is cut, and says so
_CUT = "\n[cut here: too long to keep]"


class Scribe(Protocol):
    """Whoever writes requests down. None: not this one."""

    def entry(self, trace: str) -> Entry | None: ...


class Paper(Struct):
    request: str = ""
    prompt: str = ""
    output: str = ""
    response: str = ""

    @property
    def size(self) -> int:
        return len(self.request) + len(self.prompt) + len(self.output) + len(self.response)


class _Writing:
    """One request's paper while it is written; it is filed when the request is over."""

    __slots__ = ("_home", "_output", "_paper", "_response", "_trace")

    def __init__(self, home: Papers, trace: str) -> None:
        self._home, self._trace, self._paper = home, trace, Paper()
        self._output: list[str] = []
        self._response: list[bytes] = []

    def request(self, body: bytes) -> None:
        self._paper.request = _cut(body[: _LONGEST + 1].decode("utf-8", "replace"))

    def prompt(self, text: str) -> None:
        self._paper.prompt = _cut(text)

    def output(self, text: str) -> None:
        self._output.append(text)

    def response(self, data: bytes) -> None:
        self._response.append(data)

    def close(self) -> None:
        self._paper.output = _cut("".join(self._output))
        self._paper.response = _cut(b"".join(self._response)[: _LONGEST + 1].decode("utf-8", "replace"))
        self._home.file(self._trace, self._paper)


class Papers:
    """`on` may be switched at any time; switching it off forgets everything."""

    def __init__(self, max_bytes: int, *, on: bool) -> None:
        self._max_bytes, self._on, self._size = max_bytes, on, 0
        self._filed: OrderedDict[str, Paper] = OrderedDict()

    @property
    def on(self) -> bool:
        return self._on

    def switch(self, on: bool) -> None:
        self._on = on
        if not on:
            self._filed.clear()
            self._size = 0

    def entry(self, trace: str) -> Entry | None:
        return _Writing(self, trace) if self._on else None

    def find(self, trace: str) -> Paper | None:
        return self._filed.get(trace)

    def file(self, trace: str, paper: Paper) -> None:
        if not self._on:
            return
        self._filed[trace] = paper
        self._size += paper.size
        while self._size > self._max_bytes and self._filed:
            self._size -= self._filed.popitem(last=False)[1].size


class Copies:
    """Several scribes at once."""

    def __init__(self, *scribes: Scribe) -> None:
        self._scribes = scribes

    def entry(self, trace: str) -> Entry | None:
        entries = [entry for scribe in self._scribes if (entry := scribe.entry(trace)) is not None]
        if len(entries) < 2:
            return entries[0] if entries else None
        return _All(entries)


class _All:
    __slots__ = ("_entries",)

    def __init__(self, entries: list[Entry]) -> None:
        self._entries = entries

    def request(self, body: bytes) -> None:
        for entry in self._entries:
            entry.request(body)

    def prompt(self, text: str) -> None:
        for entry in self._entries:
            entry.prompt(text)

    def output(self, text: str) -> None:
        for entry in self._entries:
            entry.output(text)

    def response(self, data: bytes) -> None:
        for entry in self._entries:
            entry.response(data)

    def close(self) -> None:
        for entry in self._entries:
            entry.close()


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + _CUT
