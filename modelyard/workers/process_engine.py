"""An engine in a child process of its own: same seam, but its death costs one replica, and no GIL is shared.

start the child ─→ it listens ─→ Welcome ─→ OpenEngine ─→ Opened ─→ ready ─→ close: CloseEngine, SIGTERM, SIGKILL
     └─ it ends before that: the reason stands in its own last words
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from modelyard import plugins
from modelyard.core.engine import (
    Chunk,
    Control,
    Embeddings,
    EngineInfo,
    EngineSpec,
    EngineStats,
    Generation,
    OnProgress,
    Prompt,
)
from modelyard.core.errors import ModelyardError, Timeout, Unavailable
from modelyard.core.events import Event
from modelyard.core.request import Request
from modelyard.processes.child_process import ChildProcess, describe_exit
from modelyard.workers import interpreter
from modelyard.workers.client import (
    RemoteChatEngine,
    RemoteEmbeddingEngine,
    RemoteTextEngine,
    WorkerSession,
    remote_engine,
)
from modelyard.workers.transport import HeartbeatConfig
from modelyard.workers.worker import open_engine_message

T = TypeVar("T")

_START_S = 120.0  # Python, on a machine that is busy with loading something else
_CLOSE_S = 60.0  # an engine may have much to save
_STOP_S = 5.0  # a worker without engines has nothing left to do
_MOMENT_S = 0.1  # between a broken connection and the news of the process's end
_WORDS = 5  # lines of its output that explain a death


class ProcessEngine:
    """What the engines of both kinds share. `pid` is the child's."""

    def __init__(self, backend: str, spec: EngineSpec, pace: HeartbeatConfig = HeartbeatConfig()) -> None:
        self._backend, self._spec, self._pace = backend, spec, pace
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self.info = EngineInfo(backend, dict(spec.caches))
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._child: ChildProcess | None = None
        self._session: WorkerSession | None = None
        self._engine: Any = None
        self._watching: asyncio.Task[None] | None = None
        self._over: ModelyardError = Unavailable("the engine is not open")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._spec.model} in process {self.pid}>"

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def log_tail(self) -> list[str]:
        return self._child.log.lines() if self._child is not None else []

    # --- life -------------------------------------------------------------------------------------------------------

    async def open(self, progress: OnProgress) -> None:
        progress(0.0, "starting a process")
        self._folder = tempfile.TemporaryDirectory(prefix="modelyard-", ignore_cleanup_errors=True)
        endpoint, python = f"ipc://{Path(self._folder.name) / 'worker'}", self._spec.python
        if python is not None:
            await interpreter.check_interpreter(python)
        env = interpreter.worker_environment(python, Path(self._folder.name), os.environ)
        self._child = await ChildProcess.start(worker_command(endpoint, python), env)
        name = f"gateway-{os.getpid()}"
        self._session = session = WorkerSession(endpoint, name, pace=self._pace, broke=self._broke)
        try:
            async with asyncio.timeout(_START_S):
                await self._while_it_lives(session.meet())
        except TimeoutError:
            raise Timeout(f"the engine's process did not answer within {_START_S:g} s", code="load_timeout") from None
        order = open_engine_message(uuid4().hex[:16], self._backend, self._spec)
        try:
            opened = await self._while_it_lives(session.open(order, progress))
        except ModelyardError as error:
            raise await self._explained(error) from error
        self.info = opened.info
        self._engine = remote_engine(session, opened, self.lost)
        self._watching = asyncio.get_running_loop().create_task(self._watch(self._child, session))

    async def _while_it_lives(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result, or why the child has ended before there was one."""
        assert self._child is not None  # noqa: S101  the caller has started it
        task = asyncio.get_running_loop().create_task(work)
        try:
            await asyncio.wait({task, self._child.ended}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or (task.exception() is not None and self._child.ended.done()):
                raise self._death(self._child)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _explained(self, error: ModelyardError) -> ModelyardError:
        """Some engines have helpers of their own: what these say of a fault stands in the child's output alone."""
        explain = getattr(plugins.load("engines", self._backend), "explain", None)
        if explain is None:
            return error
        await asyncio.sleep(_MOMENT_S)  # what was written before the news may come after it
        explained: ModelyardError = explain(error, self.log_tail())
        return explained

    def _death(self, child: ChildProcess) -> Unavailable:
        words = child.log.tail(_WORDS)
        told = f"the process of the engine of {self._spec.model!r} {describe_exit(child.ended.result())}"
        return Unavailable(f"{told}: {words}" if words else told)

    async def _watch(self, child: ChildProcess, session: WorkerSession) -> None:
        await asyncio.shield(child.ended)
        session.end(self._death(child))

    def _broke(self, error: ModelyardError) -> None:
        """The process's end says more than the broken connection that comes with it: it gets a moment to be first."""
        if self._session is not None:
            asyncio.get_running_loop().call_later(_MOMENT_S, self._session.end, error)

    async def close(self) -> None:
        """Idempotent. A child that does not answer any more is ended at once."""
        self._over = self.lost.result() if self.lost.done() else Unavailable("the engine was closed")
        if self._watching is not None:
            self._watching.cancel()
        child, session = self._child, self._session
        try:
            if child is not None and session is not None:
                await self._end(child, session)
            elif child is not None:
                await child.stop(0.0)
        finally:
            if session is not None:
                await session.close()
            if self._folder is not None:
                self._folder.cleanup()

    async def _end(self, child: ChildProcess, session: WorkerSession) -> None:
        if self._engine is not None and not session.over and not self.lost.done():
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await session.close_engine(self._engine.id)
            except TimeoutError:
                child.signal(signal.SIGKILL)
        session.end(self._over)
        if self.lost.done() or self._engine is None:
            child.signal(signal.SIGKILL)  # it may be stopped, and would not hear a milder word
        await child.stop(_STOP_S)

    def stats(self) -> EngineStats:
        return EngineStats() if self._engine is None else self._engine.stats()

    def _there(self) -> Any:
        if self._engine is None:
            raise self._over
        return self._engine


class ProcessTextEngine(ProcessEngine):
    def generate(self, prompt: Prompt) -> Generation[Chunk]:
        engine: RemoteTextEngine = self._there()
        return engine.generate(prompt)

    async def control(self, op: Control) -> None:
        engine: RemoteTextEngine = self._there()
        await engine.control(op)


class ProcessEmbeddingEngine(ProcessTextEngine):
    async def embed(self, batch: Sequence[Sequence[int]]) -> Embeddings:
        engine: RemoteEmbeddingEngine = self._there()
        return await engine.embed(batch)


class ProcessChatEngine(ProcessEngine):
    def chat(self, request: Request) -> Generation[Event]:
        engine: RemoteChatEngine = self._there()
        return engine.chat(request)

    async def count(self, request: Request) -> int | None:
        engine: RemoteChatEngine = self._there()
        return await engine.count(request)


def create_process_engine(
    backend: str, spec: EngineSpec, kind: str, pace: HeartbeatConfig = HeartbeatConfig()
) -> ProcessTextEngine | ProcessChatEngine:
    """The engine of this kind in a process of its own, not yet opened."""
    return (ProcessChatEngine if kind == "chat" else ProcessEmbeddingEngine)(backend, spec, pace)


def worker_command(endpoint: str, python: str | None = None) -> list[str]:
    return [interpreter.interpreter_path(python), "-m", "modelyard.workers", endpoint]
