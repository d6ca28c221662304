"""The parent's half of `/metrics` on several gateway processes: it gathers their snapshots and remembers the dead.

Whatever the hub has handed out once it also keeps, so that no total ever goes backwards, not even after kill -9: when
a child's connection ends, its counters join `_departed`.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from itertools import count
from pathlib import Path

from modelyard.telemetry.frames import Ask, Everything, Frames, Push, Want, for_hub
from modelyard.telemetry.snapshot import Snapshot, add, decode, encode, lasting

_MAX_SOCKET_PATH = 100  # the kernel's limit is 108 bytes on Linux, 104 on macOS


class _Member:
    """A child's connection and the last that was heard from it."""

    def __init__(self, frames: Frames[Push | Ask]) -> None:
        self.frames = frames
        self.last = encode(Snapshot())
        self.awaited: dict[int, asyncio.Future[None]] = {}

    def want(self, id: int) -> asyncio.Future[None]:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.awaited[id] = answer
        self.frames.send(Want(id))
        return answer

    def heard(self, push: Push) -> None:
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
        self._departed = Snapshot()
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
        return [*(member.last for member in self._members), encode(self._departed)]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member = _Member(Frames(reader, writer, for_hub))
        self._members.add(member)
        self._keep(asyncio.current_task())
        try:
            while (message := await member.frames.receive()) is not None:
                if isinstance(message, Push):
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

    async def _answer(self, member: _Member, ask: Ask) -> None:
        member.frames.send(Everything(ask.id, await self.gather()))

    def _retire(self, member: _Member) -> None:
        self._members.discard(member)
        self._departed = add([self._departed, lasting(decode(member.last))])
        for id in list(member.awaited):
            member.settle(id)


def _private_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="modelyard-")
    if len(folder) > _MAX_SOCKET_PATH - 10:
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="modelyard-", dir="/tmp")
    return Path(folder)
