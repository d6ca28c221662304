"""The debug journal: each request leaves four files with a common prefix, written off the event loop.

    <time>-<trace>.1-client-request.json     the body as the client sent it
    <time>-<trace>.2-prompt.txt              what the template made of it
    <time>-<trace>.3-model-output.txt        what the model said, before any parsing
    <time>-<trace>.4-client-response.json    what the client got (`.sse` for a stream)

Headers are never written, so that no API key is. One thread writes; when it falls behind, parts are dropped and
counted rather than a request held up. The oldest requests leave first, by count and by bytes.
"""

from __future__ import annotations

import logging
import os
import re
from collections import OrderedDict
from datetime import UTC, datetime
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Protocol

from msgspec import Struct

from modelyard.telemetry.log import log_event

_log = logging.getLogger(__name__)

_REQUEST, _PROMPT, _OUTPUT = "1-client-request.json", "2-prompt.txt", "3-model-output.txt"
_REPLY, _STREAM = "4-client-response.json", "4-client-response.sse"
# Only files that look like ours are ever deleted: the folder may hold somebody's notes.
_OURS = re.compile(r"(?P<entry>\d{8}T\d{6}\.\d{6}Z-[A-Za-z0-9_-]{0,64})\.[1-4]-[a-z-]+\.(json|txt|sse)")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_BACKLOG = 1024  # parts waiting for the disk
_FLUSH = 64 * 1024  # bytes of a growing part held back, so that a token is not a write


class RequestCapture(Protocol):
    """The journal's side of one request. `output` and `response` may be called often: they add up."""

    def request(self, body: bytes) -> None: ...
    def prompt(self, text: str) -> None: ...
    def output(self, text: str) -> None: ...
    def response(self, data: bytes) -> None: ...
    def close(self) -> None: ...


class NullCapture:
    """The entry of a journal that is off, so that callers need no ifs."""

    __slots__ = ()

    def request(self, body: bytes) -> None: ...
    def prompt(self, text: str) -> None: ...
    def output(self, text: str) -> None: ...
    def response(self, data: bytes) -> None: ...
    def close(self) -> None: ...


NULL_CAPTURE = NullCapture()


class _Part(Struct, frozen=True):
    """`data` for the end of the file `name`; `last` when its request is over and the folder may be tidied."""

    name: str
    data: bytes
    last: bool = False


class _Growing:
    """A file's text that comes in many bits."""

    __slots__ = ("_bits", "_size", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self._bits: list[bytes] = []
        self._size = 0

    def add(self, bit: bytes) -> bool:
        self._bits.append(bit)
        self._size += len(bit)
        return self._size >= _FLUSH

    def take(self) -> _Part:
        part = _Part(self.name, b"".join(self._bits))
        self._bits, self._size = [], 0
        return part


class DiskCapture:
    def __init__(self, journal: DiskCaptureSink, prefix: str) -> None:
        self._journal, self._prefix = journal, prefix
        self._due = {_REQUEST, _PROMPT}
        self._output = _Growing(f"{prefix}.{_OUTPUT}")
        self._response: _Growing | None = None

    def request(self, body: bytes) -> None:
        self._write(_REQUEST, body)

    def prompt(self, text: str) -> None:
        self._write(_PROMPT, _utf8(text))

    def _write(self, name: str, data: bytes) -> None:
        self._due.discard(name)
        self._journal.submit(_Part(f"{self._prefix}.{name}", data))

    def output(self, text: str) -> None:
        if self._output.add(_utf8(text)):
            self._journal.submit(self._output.take())

    def response(self, data: bytes) -> None:
        if self._response is None:  # every JSON body is an object, and no SSE frame begins with its brace
            self._response = _Growing(f"{self._prefix}.{_REPLY if data[:1] in (b'{', b'[') else _STREAM}")
        if self._response.add(data):
            self._journal.submit(self._response.take())

    def close(self) -> None:
        """Called once, however the request ended; four files are on disk soon after, empty where it never got to."""
        for name in tuple(self._due):
            self._write(name, b"")
        self._journal.submit(self._output.take())
        reply = (self._response or _Growing(f"{self._prefix}.{_REPLY}")).take()
        self._journal.submit(_Part(reply.name, reply.data, last=True))


class DiskCaptureSink:
    """`dropped` counts the parts that never reached the disk."""

    def __init__(self, folder: Path, max_requests: int, max_bytes: int, backlog: int = _BACKLOG) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.dropped = 0
        self._folder, self._max_requests, self._max_bytes = folder, max_requests, max_bytes
        self._queue: Queue[_Part | None] = Queue(backlog)
        self._thread = Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()

    def entry(self, trace: str) -> DiskCapture:
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        return DiskCapture(self, f"{now}-{_UNSAFE.sub('_', trace)[:64]}")

    def submit(self, part: _Part) -> None:
        try:
            self._queue.put_nowait(part)
        except Full:
            self._drop("the debug journal falls behind: the disk is slower than the requests")

    def close(self) -> None:
        """Write what is waiting and end. It waits for the disk: not for the event loop's thread in mid-service."""
        self._queue.put(None)
        self._thread.join()

    def _drop(self, why: str, error: OSError | None = None) -> None:
        self.dropped += 1
        if self.dropped == 1 or self.dropped % 1000 == 0:
            log_event(_log, logging.WARNING, why, error=error, folder=str(self._folder), dropped=self.dropped)

    def _write_all(self) -> None:
        while (part := self._queue.get()) is not None:
            try:
                _append(self._folder / part.name, part.data)
                if part.last:
                    _tidy(self._folder, self._max_requests, self._max_bytes)
            except OSError as error:
                self._drop("the debug journal cannot write: check the folder and its disk", error)


def _append(path: Path, data: bytes) -> None:
    """For its owner's eyes only: prompts are private."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
        file.write(data)


def _tidy(folder: Path, max_requests: int, max_bytes: int) -> None:
    """Looks at the folder itself, not at a memory of it: several processes may write here."""
    entries = _entries(folder)
    total = sum(size for files in entries.values() for _, size in files)
    for count, prefix in zip(range(len(entries), 0, -1), sorted(entries), strict=True):
        if count <= max_requests and total <= max_bytes:
            return
        for path, size in entries[prefix]:
            Path(path).unlink(missing_ok=True)
            total -= size


def _entries(folder: Path) -> dict[str, list[tuple[str, int]]]:
    entries: dict[str, list[tuple[str, int]]] = {}
    with os.scandir(folder) as files:
        for file in files:
            if found := _OURS.fullmatch(file.name):
                entries.setdefault(found["entry"], []).append((file.path, _size(file)))
    return entries


def _size(file: os.DirEntry[str]) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0  # another process tidied it away


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


# The texts of recent requests, in memory and only where switched on: what came, the prompt, the raw output, the reply.
#
# For people who look into one request. Bounded in bytes; the oldest leave first. The debug journal is the same on disk.

_LONGEST = 1 << 20  # characters or bytes of one part; what is longer is cut, and says so
_CUT = "\n[cut here: too long to keep]"


class CaptureSink(Protocol):
    """Whoever writes requests down. None: not this one."""

    def entry(self, trace: str) -> RequestCapture | None: ...


class CapturedRequest(Struct):
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

    def __init__(self, home: MemoryCaptureSink, trace: str) -> None:
        self._home, self._trace, self._paper = home, trace, CapturedRequest()
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


class MemoryCaptureSink:
    """`on` may be switched at any time; switching it off forgets everything."""

    def __init__(self, max_bytes: int, *, on: bool) -> None:
        self._max_bytes, self._on, self._size = max_bytes, on, 0
        self._filed: OrderedDict[str, CapturedRequest] = OrderedDict()

    @property
    def on(self) -> bool:
        return self._on

    def switch(self, on: bool) -> None:
        self._on = on
        if not on:
            self._filed.clear()
            self._size = 0

    def entry(self, trace: str) -> RequestCapture | None:
        return _Writing(self, trace) if self._on else None

    def find(self, trace: str) -> CapturedRequest | None:
        return self._filed.get(trace)

    def file(self, trace: str, paper: CapturedRequest) -> None:
        if not self._on:
            return
        self._filed[trace] = paper
        self._size += paper.size
        while self._size > self._max_bytes and self._filed:
            self._size -= self._filed.popitem(last=False)[1].size


class CombinedCaptureSink:
    """Several scribes at once."""

    def __init__(self, *scribes: CaptureSink) -> None:
        self._scribes = scribes

    def entry(self, trace: str) -> RequestCapture | None:
        entries = [entry for scribe in self._scribes if (entry := scribe.entry(trace)) is not None]
        if len(entries) < 2:
            return entries[0] if entries else None
        return _All(entries)


class _All:
    __slots__ = ("_entries",)

    def __init__(self, entries: list[RequestCapture]) -> None:
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
