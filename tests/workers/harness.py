"""Shared by the tests of workers: a worker on this loop, its clients, and fake engines."""

from __future__ import annotations

import asyncio
import atexit
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

import modelyard_fake as fake
from modelyard.core.engine import CacheInfo, EngineSpec, Prompt, TokenRun
from modelyard.workers.client import WorkerSession, remote_engine
from modelyard.workers.definitions import define, message_spec, not_defined
from modelyard.workers.messages import LinkMessage, OpenEngine, decode_for_client, encode
from modelyard.workers.transport import ClusterKeys, DealerSocket, HeartbeatConfig
from modelyard.workers.worker import Worker
from tests.engines.fake import helpers as fake_helpers

LENIENT = HeartbeatConfig(worker_misses=1000, client_misses=1000)  # the machine may be busy
STRICT = HeartbeatConfig(interval_s=0.01, worker_misses=5, client_misses=5)  # for peers that are known to be silent
DEADLINE_S = 180.0
HANGING: dict[str, Any] = {"script": [{"steps": [{"text": "so far"}, {"hang": True}]}]}


class TestDefinitions:
    """The configuration of the workers on this loop: the last definition of each model in a test."""

    __test__ = False

    def __init__(self) -> None:
        self._definitions: dict[str, EngineSpec] = {}

    def add(self, backend: str, spec: EngineSpec) -> EngineSpec:
        made = replace(spec, backend=backend)
        self._definitions[spec.model] = define(made)
        return made

    def find(self, model: str) -> EngineSpec:
        if model not in self._definitions:
            raise not_defined(model)
        return self._definitions[model]

    def models(self) -> tuple[str, ...]:
        return tuple(self._definitions)


DEFINITIONS = TestDefinitions()

_ROOT = tempfile.TemporaryDirectory(prefix="my-")  # the path of a socket is limited, and pytest's folders are long
_NUMBERS = itertools.count()
atexit.register(_ROOT.cleanup)


def short_folder() -> Path:
    """A new folder with a short path, removed at exit."""
    folder = Path(_ROOT.name) / str(next(_NUMBERS))
    folder.mkdir(mode=0o700)
    return folder


def ipc_endpoint() -> str:
    return f"ipc://{short_folder() / 'w'}"


@asynccontextmanager
async def running_worker(
    endpoint: str | None = None, *, keys: ClusterKeys | None = None, heartbeat: HeartbeatConfig = LENIENT
) -> AsyncIterator[Worker]:
    worker = Worker(endpoint or ipc_endpoint(), DEFINITIONS, keys=keys, name="w", heartbeat=heartbeat)
    try:
        yield worker
    finally:
        await worker.close()


@asynccontextmanager
async def connected(
    worker: Worker, name: str = "client", *, keys: ClusterKeys | None = None, heartbeat: HeartbeatConfig = LENIENT
) -> AsyncIterator[WorkerSession]:
    session = WorkerSession(worker.endpoint, name, keys=keys, heartbeat=heartbeat)
    try:
        await asyncio.wait_for(session.connect(), DEADLINE_S)
        yield session
    finally:
        await session.close()


def expect_silence(session: WorkerSession) -> None:
    """The worker is known to be silent: use short heartbeats from now on."""
    assert session._timer is not None
    session._timer.cancel()
    session._heartbeat, session._monitor = STRICT, type(session._monitor)(STRICT.worker_misses)
    session._tick()


def fake_spec(caches: dict[str, CacheInfo] | None = None, **options: Any) -> EngineSpec:
    chosen = {"token_delay": 0} | options
    spec = EngineSpec("demo", fake.Options(**chosen), caches or {"main": CacheInfo(4096, 8)})
    return DEFINITIONS.add("fake", spec)


async def open_fake(
    session: WorkerSession, engine: str = "e", *, caches: dict[str, CacheInfo] | None = None, **options: Any
) -> Any:
    """A fake engine in the worker."""
    message = OpenEngine(engine, message_spec(fake_spec(caches, **options)))
    return remote_engine(session, await session.open(message, lambda *_: None))


def prompt(text: str = "Hello.", **fields: Any) -> Prompt:
    ids = fake_helpers.tokenizer().encode(fake_helpers.chatml(("user", text)))
    return Prompt(parts=(TokenRun(ids),), **({"max_tokens": 3000, "cache": "main"} | fields))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  there is no event to wait for
            await asyncio.sleep(0.002)


class RawPeer:
    """A peer that sends arbitrary messages and bytes. `received` are the messages that came back."""

    def __init__(self, endpoint: str, keys: ClusterKeys | None = None) -> None:
        self.received: list[Any] = []
        self._socket = DealerSocket(
            endpoint, lambda data: self.received.append(decode_for_client(data)), lambda _: None, keys
        )

    def send(self, message: LinkMessage | bytes) -> None:
        assert self._socket.send(message if isinstance(message, bytes) else encode(message))

    async def close(self) -> None:
        await self._socket.close()
