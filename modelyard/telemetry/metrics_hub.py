"""The messages between gateway processes and their hub, grouped by who receives them, and how they are framed."""

from __future__ import annotations

import asyncio
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

__all__ = ["MetricsHub", "MetricsPeer"]

T = TypeVar("T")

_MAX_FRAME = 64 * 1024**2

# --- for the hub ----------------------------------------------------------------------------------------------------


class SnapshotPush(Struct, frozen=True, tag=True):
    """A child's snapshot: now and then on its own, or as the answer to `Want`."""

    snapshot: bytes
    answers: int = 0


class CollectRequest(Struct, frozen=True, tag=True):
    """A child is being scraped and wants everybody's snapshots."""

    id: int


# --- for a child ----------------------------------------------------------------------------------------------------


class SnapshotRequest(Struct, frozen=True, tag=True):
    id: int


class CollectReply(Struct, frozen=True, tag=True):
    """The answer to `Ask`."""

    id: int
    snapshots: list[bytes]


class MessageStream(Generic[T]):
    """A stream of messages: four bytes of length, then MessagePack. `T` is what comes in."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[T]
    ) -> None:
        self._reader, self._writer, self._decoder = reader, writer, decoder

    async def receive(self) -> T | None:
        """The next message, or None when the other side is gone, in whatever way."""
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
            return  # the other side was faster


_encoder = msgspec.msgpack.Encoder()
for_hub = msgspec.msgpack.Decoder(SnapshotPush | CollectRequest)
for_child = msgspec.msgpack.Decoder(SnapshotRequest | CollectReply)


# The parent's half of `/metrics` on several gateway processes: it gathers their snapshots and remembers the dead.
#
# Whatever the hub has handed out once it also keeps, so that no total ever goes backwards, not even after kill -9: when
# a child's connection ends, its counters join `_departed`.

_MAX_SOCKET_PATH = 100  # the kernel's limit is 108 bytes on Linux, 104 on macOS


class _Member:
    """A child's connection and the last that was heard from it."""

    def __init__(self, frames: MessageStream[SnapshotPush | CollectRequest]) -> None:
        self.frames = frames
        self.last = encode_snapshot(MetricsSnapshot())
        self.awaited: dict[int, asyncio.Future[None]] = {}

    def want(self, id: int) -> asyncio.Future[None]:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.awaited[id] = answer
        self.frames.send(SnapshotRequest(id))
        return answer

    def heard(self, push: SnapshotPush) -> None:
        self.last = push.snapshot
        self.settle(push.answers)

    def settle(self, id: int) -> None:
        answer = self.awaited.pop(id, None)
        if answer is not None and not answer.done():
            answer.set_result(None)


class MetricsHub:
    """`path`, once it is open, is a unix socket in a folder that only this user may enter."""

    def __init__(self, deadline_s: float = 1.0) -> None:
        self.path = ""
        self._folder: Path | None = None
        self._deadline = deadline_s
        self._ids = count(1)
        self._members: set[_Member] = set()
        self._departed = MetricsSnapshot()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._folder = _private_folder()
        self.path = str(self._folder / "hub")
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for member in list(self._members):
            await member.frames.close()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._folder is not None:
            shutil.rmtree(self._folder)

    async def gather(self) -> list[bytes]:
        """Everybody's snapshot, fresh where it came in time, and what the dead have left."""
        id = next(self._ids)
        answers = {member: member.want(id) for member in self._members}
        if answers:
            await asyncio.wait(answers.values(), timeout=self._deadline)
        for member in answers:
            member.settle(id)
        # Looked up only now, in one go: a child that died meanwhile is among the departed, and counts once.
        return [*(member.last for member in self._members), encode_snapshot(self._departed)]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member = _Member(MessageStream(reader, writer, for_hub))
        self._members.add(member)
        self._keep(asyncio.current_task())
        try:
            while (message := await member.frames.receive()) is not None:
                if isinstance(message, SnapshotPush):
                    member.heard(message)
                else:
                    # Not in this task: the asker must be able to answer its own `Want`.
                    self._keep(asyncio.create_task(self._answer(member, message)))
        finally:
            self._retire(member)
            await member.frames.close()

    def _keep(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, member: _Member, ask: CollectRequest) -> None:
        member.frames.send(CollectReply(ask.id, await self.gather()))

    def _retire(self, member: _Member) -> None:
        self._members.discard(member)
        self._departed = sum_snapshots([self._departed, without_gauges(decode_snapshot(member.last))])
        for id in list(member.awaited):
            member.settle(id)


def _private_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="modelyard-")
    if len(folder) > _MAX_SOCKET_PATH - 10:
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="modelyard-", dir="/tmp")
    return Path(folder)


# A gateway child's half of `/metrics` on several gateway processes: answers the hub, and asks it for everybody.
#
# A child that is killed can say nothing any more, so each one tells the hub its counters every two seconds. Without a
# hub (it died, or there is one process only) the own snapshot is all there is.


class MetricsPeer:
    """`lost` is set when the hub has gone, and with it the parent: where no tether holds, the child should end."""

    def __init__(self, path: str, metrics: Metrics, push_every_s: float = 2.0, deadline_s: float = 2.0) -> None:
        self.lost = asyncio.Event()
        self._path, self._metrics = path, metrics
        self._push_every, self._deadline = push_every_s, deadline_s
        self._ids = count(1)
        self._frames: MessageStream[SnapshotRequest | CollectReply] | None = None
        self._asked: dict[int, asyncio.Future[list[bytes]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError:
            self.lost.set()
            return
        self._frames = MessageStream(reader, writer, for_child)
        self._spawn(self._listen(self._frames))
        self._spawn(self._keep_pushing(self._frames))

    async def close(self) -> None:
        """The last push goes out first: a child that ends in peace loses no count."""
        if self._frames is not None:
            self._frames.send(SnapshotPush(self._metrics.snapshot()))
            await self._frames.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def scrape(self) -> bytes:
        return render_snapshots(await self.collect())

    async def collect(self) -> list[bytes]:
        """Everybody's snapshots, the dead ones' counters among them; only the own one where the hub fails us."""
        if self._frames is None or self.lost.is_set():
            return await self._own()
        id = next(self._ids)
        answer = self._asked[id] = asyncio.get_running_loop().create_future()
        self._frames.send(CollectRequest(id))
        try:
            return await asyncio.wait_for(answer, self._deadline)
        except (TimeoutError, ConnectionError):
            return await self._own()
        finally:
            del self._asked[id]

    async def _own(self) -> list[bytes]:
        await self._metrics.measure_system()
        return [self._metrics.snapshot()]

    async def _listen(self, frames: MessageStream[SnapshotRequest | CollectReply]) -> None:
        while (message := await frames.receive()) is not None:
            if isinstance(message, SnapshotRequest):
                self._spawn(self._answer(frames, message))
            elif message.id in self._asked and not self._asked[message.id].done():
                self._asked[message.id].set_result(message.snapshots)
        self.lost.set()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConnectionError("the hub is gone"))

    async def _answer(self, frames: MessageStream[SnapshotRequest | CollectReply], want: SnapshotRequest) -> None:
        await self._metrics.measure_system()
        frames.send(SnapshotPush(self._metrics.snapshot(), want.id))

    async def _keep_pushing(self, frames: MessageStream[SnapshotRequest | CollectReply]) -> None:
        while not self.lost.is_set():
            frames.send(SnapshotPush(self._metrics.snapshot()))
            await asyncio.sleep(self._push_every)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
