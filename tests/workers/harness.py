"""What the tests of workers share: a worker on this loop, and clients of it, with scripted engines."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from modelyard.core.engine import CacheInfo, EngineSpec, Prompt, TokenRun
from modelyard.engines import fake
from modelyard.workers.client import WorkerSession, remote_engine
from modelyard.workers.messages import LinkMessage, decode_for_client, encode, open_engine_message
from modelyard.workers.transport import ClusterKeys, DealerSocket, HeartbeatConfig
from modelyard.workers.worker import Worker
from tests.engines.fake import helpers as fake_helpers

PATIENT = HeartbeatConfig(worker_misses=1000, client_misses=1000)  # the machine may be busy
HASTY = HeartbeatConfig(interval_s=0.01, worker_misses=5, client_misses=5)  # for those who are known to be silent
DEADLINE_S = 180.0


_HOME = tempfile.TemporaryDirectory(prefix="my-")  # a socket's path may not be long: pytest's own folders are
_NUMBERS = itertools.count()
atexit.register(_HOME.cleanup)


def folder() -> Path:
    """A new one, gone when the tests are."""
    made = Path(_HOME.name) / str(next(_NUMBERS))
    made.mkdir()
    return made


def address() -> str:
    return f"ipc://{folder() / 'w'}"


@asynccontextmanager
async def working(
    endpoint: str | None = None, *, keys: ClusterKeys | None = None, heartbeat: HeartbeatConfig = PATIENT
) -> AsyncIterator[Worker]:
    worker = Worker(endpoint or address(), keys=keys, name="w", heartbeat=heartbeat)
    try:
        yield worker
    finally:
        await worker.close()


@asynccontextmanager
async def talking(
    worker: Worker, name: str = "client", *, keys: ClusterKeys | None = None, heartbeat: HeartbeatConfig = PATIENT
) -> AsyncIterator[WorkerSession]:
    session = WorkerSession(worker.endpoint, name, keys=keys, heartbeat=heartbeat)
    try:
        await asyncio.wait_for(session.connect(), DEADLINE_S)
        yield session
    finally:
        await session.close()


def hurry(session: WorkerSession) -> None:
    """From now on it waits for no sign of life that is late: its worker is known to be silent."""
    assert session._timer is not None
    session._timer.cancel()
    session._heartbeat, session._monitor = HASTY, type(session._monitor)(HASTY.worker_misses)
    session._tick()


def spec(caches: dict[str, CacheInfo] | None = None, **options: Any) -> EngineSpec:
    chosen = {"token_delay": 0} | options
    return EngineSpec("demo", fake.Options(**chosen), caches or {"main": CacheInfo(4096, 8)})


async def opened(
    session: WorkerSession, engine: str = "e", *, caches: dict[str, CacheInfo] | None = None, **options: Any
) -> Any:
    """An engine of the fake in the worker."""
    told = await session.open(open_engine_message(engine, "fake", spec(caches, **options)), lambda *_: None)
    return remote_engine(session, told)


def prompt(text: str = "Hello.", **fields: Any) -> Prompt:
    ids = fake_helpers.tokenizer().encode(fake_helpers.chatml(("user", text)))
    return Prompt(parts=(TokenRun(ids),), **({"max_tokens": 3000, "cache": "main"} | fields))


async def until(condition: Callable[[], bool]) -> None:
    """Looks again and again, and gives up long after everybody else would have."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  whatever is looked at, nobody there sets events for us
            await asyncio.sleep(0.002)


class Stranger:
    """A peer that says what it likes. `heard` are the messages that came back."""

    def __init__(self, endpoint: str, keys: ClusterKeys | None = None) -> None:
        self.heard: list[Any] = []
        self.drops: list[str] = []
        self._dialer = DealerSocket(
            endpoint, lambda data: self.heard.append(decode_for_client(data)), self.drops.append, keys
        )

    def say(self, what: LinkMessage | bytes) -> None:
        assert self._dialer.send(what if isinstance(what, bytes) else encode(what))

    async def close(self) -> None:
        await self._dialer.close()
