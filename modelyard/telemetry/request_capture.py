"""Request capture: the texts of requests, in files (`log.debug_dir`) or in memory (for the admin API).

Each captured request leaves four files with a common prefix:

    <time>-<trace>.1-client-request.json     the body as the client sent it
    <time>-<trace>.2-prompt.txt              the rendered prompt; of another server, the request that it was sent
    <time>-<trace>.3-model-output.txt        the model's raw output, before parsing; of another server, its raw stream
    <time>-<trace>.4-client-response.json    what the client received (`.sse` for a stream)

Headers are never captured, and known secrets are masked. One thread writes the files. When it falls behind, parts are
dropped and counted; requests are never delayed. Both kinds are bounded, and the oldest requests are removed first.
"""

from __future__ import annotations

import logging
import os
import re
from collections import OrderedDict
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Protocol

from msgspec import Struct

from modelyard.telemetry.log import log_event
from modelyard.telemetry.masking import mask_secret_bytes

_log = logging.getLogger(__name__)


class RequestCapture(Protocol):
    """Captures one request. `output` and `response` may be called often; their parts are joined."""

    def request(self, body: bytes) -> None: ...
    def prompt(self, text: str) -> None: ...
    def output(self, text: str) -> None: ...
    def response(self, data: bytes) -> None: ...
    def close(self) -> None: ...


# Of the request whose engine is started: an engine that forwards it adds what it sends and receives.
current_capture: ContextVar[RequestCapture | None] = ContextVar("current_capture", default=None)


class CaptureSink(Protocol):
    def start(self, trace: str) -> RequestCapture | None:
        """None if this request is not captured."""


# --- files ------------------------------------------------------------------------------------------------------------

_REQUEST, _PROMPT, _OUTPUT = "1-client-request.json", "2-prompt.txt", "3-model-output.txt"
_REPLY, _STREAM = "4-client-response.json", "4-client-response.sse"
# Only files with our names are ever deleted: the folder may hold other files.
_FILE_NAME = re.compile(r"(?P<prefix>\d{8}T\d{6}\.\d{6}Z-[A-Za-z0-9_-]{0,64})\.[1-4]-[a-z-]+\.(json|txt|sse)")
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_MAX_QUEUED = 1024  # parts waiting for the disk
_FLUSH_BYTES = 64 * 1024  # buffered for a growing file, so that a token is not a write


class _FilePart(Struct, frozen=True):
    """Data to append to a file. `last` marks the end of a request: the folder may be pruned."""

    name: str
    data: bytes
    last: bool = False


class DiskCapture:
    def __init__(self, sink: DiskCaptureSink, prefix: str) -> None:
        self._sink, self._prefix, self._response_name = sink, prefix, ""
        self._unwritten = {name: bytearray() for name in (_REQUEST, _PROMPT, _OUTPUT)}

    def request(self, body: bytes) -> None:
        self._unwritten.pop(_REQUEST, None)
        self._write(_REQUEST, body)

    def prompt(self, text: str) -> None:
        self._unwritten.pop(_PROMPT, None)
        self._write(_PROMPT, _utf8(text))

    def output(self, text: str) -> None:
        self._add(_OUTPUT, _utf8(text))

    def response(self, data: bytes) -> None:
        if not self._response_name:  # a JSON body is an object or a list; no SSE frame begins like one
            self._response_name = _REPLY if data[:1] in (b"{", b"[") else _STREAM
        self._add(self._response_name, data)

    def close(self) -> None:
        """Call once, however the request ended. All four files are written; parts never reached are empty."""
        name = self._response_name or _REPLY
        response = self._unwritten.pop(name, b"")
        for other, data in self._unwritten.items():
            self._write(other, bytes(data))
        self._write(name, bytes(response), last=True)

    def _add(self, name: str, data: bytes) -> None:
        buffer = self._unwritten.setdefault(name, bytearray())
        buffer += data
        if len(buffer) >= _FLUSH_BYTES:
            self._write(name, bytes(buffer))
            buffer.clear()

    def _write(self, name: str, data: bytes, *, last: bool = False) -> None:
        self._sink.submit(_FilePart(f"{self._prefix}.{name}", data, last))


class DiskCaptureSink:
    """`dropped` counts the parts that did not reach the disk."""

    def __init__(self, folder: Path, max_requests: int, max_bytes: int, max_queued: int = _MAX_QUEUED) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.dropped = 0
        self._folder, self._max_requests, self._max_bytes = folder, max_requests, max_bytes
        self._queue: Queue[_FilePart | None] = Queue(max_queued)
        self._thread = Thread(target=self._run, name="request-capture", daemon=True)
        self._thread.start()

    def start(self, trace: str) -> DiskCapture:
        now = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        return DiskCapture(self, f"{now}-{_UNSAFE.sub('_', trace)[:64]}")

    def submit(self, part: _FilePart) -> None:
        try:
            self._queue.put_nowait(part)
        except Full:
            self._drop("request capture falls behind: the disk is slower than the requests")

    def close(self) -> None:
        """Write what is queued and stop the thread. Waits for the disk: do not call it on the event loop."""
        self._queue.put(None)
        self._thread.join()

    def _drop(self, reason: str, error: OSError | None = None) -> None:
        self.dropped += 1
        if self.dropped == 1 or self.dropped % 1000 == 0:
            log_event(_log, logging.WARNING, reason, error=error, folder=str(self._folder), dropped=self.dropped)

    def _run(self) -> None:
        while (part := self._queue.get()) is not None:
            try:
                _append(self._folder / part.name, mask_secret_bytes(part.data))
                if part.last:
                    _prune(self._folder, self._max_requests, self._max_bytes)
            except OSError as error:
                self._drop("request capture cannot write: check the folder and its disk", error)


def _append(path: Path, data: bytes) -> None:
    """Readable for the owner only: prompts are private."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
        file.write(data)


def _prune(folder: Path, max_requests: int, max_bytes: int) -> None:
    """Delete the oldest requests. Lists the folder each time: several processes may write to it."""
    requests: dict[str, list[tuple[str, int]]] = {}
    with os.scandir(folder) as files:
        for file in files:
            if found := _FILE_NAME.fullmatch(file.name):
                requests.setdefault(found["prefix"], []).append((file.path, _size(file)))
    total = sum(size for files in requests.values() for _, size in files)
    for count, prefix in zip(range(len(requests), 0, -1), sorted(requests), strict=True):
        if count <= max_requests and total <= max_bytes:
            return
        for path, size in requests[prefix]:
            Path(path).unlink(missing_ok=True)
            total -= size


def _size(file: os.DirEntry[str]) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0  # another process pruned it


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


# --- memory -----------------------------------------------------------------------------------------------------------

_MAX_PART = 1 << 20  # characters or bytes; longer parts are truncated
_TRUNCATED = "\n[cut here: too long to keep]"


class CapturedRequest(Struct):
    request: str = ""
    prompt: str = ""
    output: str = ""
    response: str = ""

    @property
    def size(self) -> int:
        return len(self.request) + len(self.prompt) + len(self.output) + len(self.response)


class MemoryCapture:
    __slots__ = ("_captured", "_output", "_response", "_sink", "_trace")

    def __init__(self, sink: MemoryCaptureSink, trace: str) -> None:
        self._sink, self._trace, self._captured = sink, trace, CapturedRequest()
        self._output: list[str] = []
        self._response: list[bytes] = []

    def request(self, body: bytes) -> None:
        self._captured.request = _truncate(body[: _MAX_PART + 1].decode("utf-8", "replace"))

    def prompt(self, text: str) -> None:
        self._captured.prompt = _truncate(text)

    def output(self, text: str) -> None:
        self._output.append(text)

    def response(self, data: bytes) -> None:
        self._response.append(data)

    def close(self) -> None:
        self._sink.add(self._trace, self.so_far())

    def so_far(self) -> CapturedRequest:
        self._captured.output = _truncate("".join(self._output))
        self._captured.response = _truncate(b"".join(self._response)[: _MAX_PART + 1].decode("utf-8", "replace"))
        return self._captured


class MemoryCaptureSink:
    """Disabling it forgets everything captured so far."""

    def __init__(self, max_bytes: int, *, enabled: bool) -> None:
        self._max_bytes, self._enabled, self._size = max_bytes, enabled, 0
        self._requests: OrderedDict[str, CapturedRequest] = OrderedDict()
        self._running: dict[str, MemoryCapture] = {}

    @property
    def enabled(self) -> bool:
        return self._enabled

    def set_enabled(self, enabled: bool) -> None:
        self._enabled = enabled
        if not enabled:
            self._requests.clear()
            self._size = 0

    def start(self, trace: str) -> RequestCapture | None:
        if not self._enabled:
            return None
        self._running[trace] = capture = MemoryCapture(self, trace)
        return capture

    def find(self, trace: str) -> CapturedRequest | None:
        """Of a running request, the texts so far. Secrets in it are masked where the admin API writes it."""
        running = self._running.get(trace)
        return self._requests.get(trace) if running is None else running.so_far()

    def add(self, trace: str, captured: CapturedRequest) -> None:
        self._running.pop(trace, None)
        if not self._enabled:
            return
        self._requests[trace] = captured
        self._size += captured.size
        while self._size > self._max_bytes and self._requests:
            self._size -= self._requests.popitem(last=False)[1].size


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_PART else text[:_MAX_PART] + _TRUNCATED


# --- both -------------------------------------------------------------------------------------------------------------


class CombinedCaptureSink:
    """Several sinks at once."""

    def __init__(self, *sinks: CaptureSink) -> None:
        self._sinks = sinks

    def start(self, trace: str) -> RequestCapture | None:
        captures = [capture for sink in self._sinks if (capture := sink.start(trace)) is not None]
        if len(captures) < 2:
            return captures[0] if captures else None
        return _CombinedCapture(captures)


class _CombinedCapture:
    __slots__ = ("_captures",)

    def __init__(self, captures: list[RequestCapture]) -> None:
        self._captures = captures

    def request(self, body: bytes) -> None:
        for capture in self._captures:
            capture.request(body)

    def prompt(self, text: str) -> None:
        for capture in self._captures:
            capture.prompt(text)

    def output(self, text: str) -> None:
        for capture in self._captures:
            capture.output(text)

    def response(self, data: bytes) -> None:
        for capture in self._captures:
            capture.response(data)

    def close(self) -> None:
        for capture in self._captures:
            capture.close()
