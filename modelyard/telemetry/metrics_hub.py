"""`/metrics` of several gateway processes: the parent's `MetricsHub` and each child's `MetricsPeer`.

The hub and its peers talk over a unix socket: frames of four length bytes and MessagePack. A killed child cannot
report any more, so each child pushes its counters every two seconds; when its connection ends, the hub keeps them. The
pushes are also how the supervisor knows that a child still works.
Everything the hub has handed out once it keeps, so that no total decreases, even after kill -9.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Coroutine
from itertools import count
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from modelyard.telemetry.metrics import (
    Metrics,
    MetricsSnapshot,
    decode_snapshot,
    encode_snapshot,
    render_snapshots,
    sum_snapshots,
    without_gauges,
)

T = TypeVar("T")

_MAX_FRAME = 64 * 1024**2
_MAX_SOCKET_PATH = 100  # the kernel's limit is 108 bytes on Linux, 104 on macOS


# --- messages to the hub ----------------------------------------------------------------------------------------------


class SnapshotPush(Struct, frozen=True, tag=True):
    """A child's snapshot. `reply_to` is the id of a `SnapshotRequest`; 0 for a periodic push. `pid` is the child's."""

    snapshot: bytes
    reply_to: int = 0
    pid: int = 0


class CollectRequest(Struct, frozen=True, tag=True):
    """A child is being scraped and needs the snapshots of all processes."""

    id: int


# --- messages to a child ----------------------------------------------------------------------------------------------


class SnapshotRequest(Struct, frozen=True, tag=True):
    id: int


class CollectReply(Struct, frozen=True, tag=True):
    id: int
    snapshots: list[bytes]


_encoder = msgspec.msgpack.Encoder()
hub_decoder = msgspec.msgpack.Decoder(SnapshotPush | CollectRequest)
peer_decoder = msgspec.msgpack.Decoder(SnapshotRequest | CollectReply)


class MessageStream(Generic[T]):
    """`T` is the type of received messages."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[T]
    ) -> None:
        self._reader, self._writer, self._decoder = reader, writer, decoder

    async def receive(self) -> T | None:
        """The next message; None when the connection has ended or is broken."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            if size > _MAX_FRAME:
                return None
            return self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
            return None

    def send(self, message: Struct) -> None:
        data = _encoder.encode(message)
        if not self._writer.is_closing():
            self._writer.write(len(data).to_bytes(4, "big") + data)

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return  # the other side closed first


# --- the parent -------------------------------------------------------------------------------------------------------


class _Child:
    """A child's connection and its last snapshot."""

    def __init__(self, stream: MessageStream[SnapshotPush | CollectRequest]) -> None:
        self.stream = stream
        self.snapshot = encode_snapshot(MetricsSnapshot())
        self.pending: dict[int, asyncio.Future[None]] = {}

    def request_snapshot(self, id: int) -> asyncio.Future[None]:
        reply: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pending[id] = reply
        self.stream.send(SnapshotRequest(id))
        return reply

    def resolve(self, id: int) -> None:
        reply = self.pending.pop(id, None)
        if reply is not None and not reply.done():
            reply.set_result(None)


class MetricsHub:
    """`path` is, after `open()`, a unix socket in a folder that only this user can enter. `heard` counts the messages
    of each connected child, by its process id."""

    def __init__(self, deadline_s: float = 1.0) -> None:
        self.path = ""
        self.heard: dict[int, int] = {}
        self._folder: Path | None = None
        self._deadline = deadline_s
        self._ids = count(1)
        self._children: set[_Child] = set()
        self._exited = MetricsSnapshot()  # the counters of children that have exited
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._folder = _private_folder()
        self.path = str(self._folder / "hub")
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for child in list(self._children):
            await child.stream.close()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._folder is not None:
            shutil.rmtree(self._folder)

    async def gather(self) -> list[bytes]:
        """The snapshots of all children (the last known one of a child that is late) and of those that have exited."""
        id = next(self._ids)
        replies = {child: child.request_snapshot(id) for child in self._children}
        if replies:
            await asyncio.wait(replies.values(), timeout=self._deadline)
        for child in replies:
            child.resolve(id)
        # Read only now, without awaiting: a child that exited meanwhile is in `_exited` and counts once.
        return [*(child.snapshot for child in self._children), encode_snapshot(self._exited)]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        child, pid = _Child(MessageStream(reader, writer, hub_decoder)), 0
        self._children.add(child)
        self._track(asyncio.current_task())
        try:
            while (message := await child.stream.receive()) is not None:
                if isinstance(message, SnapshotPush):
                    child.snapshot, pid = message.snapshot, message.pid
                    self.heard[pid] = self.heard.get(pid, 0) + 1
                    child.resolve(message.reply_to)
                else:
                    # Not in this task: it must receive the child's own reply to the `SnapshotRequest`.
                    self._track(asyncio.create_task(self._reply(child, message)))
        finally:
            self._children.discard(child)
            self.heard.pop(pid, None)
            self._exited = sum_snapshots([self._exited, without_gauges(decode_snapshot(child.snapshot))])
            for id in list(child.pending):
                child.resolve(id)
            await child.stream.close()

    async def _reply(self, child: _Child, request: CollectRequest) -> None:
        child.stream.send(CollectReply(request.id, await self.gather()))

    def _track(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


def _private_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="modelyard-")
    if len(folder) > _MAX_SOCKET_PATH - 10:
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="modelyard-", dir="/tmp")
    return Path(folder)


# --- a child ----------------------------------------------------------------------------------------------------------


class MetricsPeer:
    """`lost` is set when the hub, and with it the parent, is gone: a child that did not die with it should exit.

    Without a hub, `scrape` returns the metrics of this process only.
    """

    def __init__(self, path: str, metrics: Metrics, push_every_s: float = 2.0, deadline_s: float = 2.0) -> None:
        self.lost = asyncio.Event()
        self._path, self._metrics = path, metrics
        self._push_every, self._deadline = push_every_s, deadline_s
        self._ids = count(1)
        self._stream: MessageStream[SnapshotRequest | CollectReply] | None = None
        self._pending: dict[int, asyncio.Future[list[bytes]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            self.lost.set()
            return
        self._stream = MessageStream(reader, writer, peer_decoder)
        self._spawn(self._listen(self._stream))
        self._spawn(self._push_periodically(self._stream))

    async def close(self) -> None:
        """Push a last time, so that an orderly exit loses no count, and disconnect."""
        if self._stream is not None:
            self._push_now(self._stream)
            await self._stream.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def scrape(self) -> bytes:
        return render_snapshots(await self.collect())

    async def collect(self) -> list[bytes]:
        """The snapshots of all processes, including exited ones; only this one's if the hub does not reply."""
        if self._stream is None or self.lost.is_set():
            return await self._own()
        id = next(self._ids)
        reply = self._pending[id] = asyncio.get_running_loop().create_future()
        self._stream.send(CollectRequest(id))
        try:
            return await asyncio.wait_for(reply, self._deadline)
        except (TimeoutError, ConnectionError):
            return await self._own()
        finally:
            del self._pending[id]

    async def _own(self) -> list[bytes]:
        await self._metrics.measure_system()
        return [self._metrics.snapshot()]

    async def _listen(self, stream: MessageStream[SnapshotRequest | CollectReply]) -> None:
        while (message := await stream.receive()) is not None:
            if isinstance(message, SnapshotRequest):
                self._spawn(self._push(stream, message.id))
            elif message.id in self._pending and not self._pending[message.id].done():
                self._pending[message.id].set_result(message.snapshots)
        self.lost.set()
        for reply in self._pending.values():
            if not reply.done():
                reply.set_exception(ConnectionError("the metrics hub closed the connection"))

    async def _push(self, stream: MessageStream[SnapshotRequest | CollectReply], reply_to: int) -> None:
        await self._metrics.measure_system()
        self._push_now(stream, reply_to)

    def _push_now(self, stream: MessageStream[SnapshotRequest | CollectReply], reply_to: int = 0) -> None:
        stream.send(SnapshotPush(self._metrics.snapshot(), reply_to, os.getpid()))

    async def _push_periodically(self, stream: MessageStream[SnapshotRequest | CollectReply]) -> None:
        while not self.lost.is_set():
            self._push_now(stream)
            await asyncio.sleep(self._push_every)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
