"""An engine in a child process: its death costs one replica only, and it does not share the GIL.

start the child ─→ it listens ─→ Welcome ─→ OpenEngine ─→ EngineOpened ─→ ready ─→ close: CloseEngine, SIGTERM, SIGKILL
     └─ it exits before that: the last lines of its output tell why
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast
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
    MovedKv,
    OnProgress,
    Prompt,
    Ranking,
)
from modelyard.core.errors import ENGINE_DIED, ModelyardError, Timeout, Unavailable
from modelyard.core.events import Event
from modelyard.core.request import EmbeddingRequest, Request, RerankRequest
from modelyard.processes.child_process import ChildProcess, describe_exit, last_words
from modelyard.workers.client import WorkerSession, remote_engine, result_unless_exited
from modelyard.workers.definitions import define, message_spec, write_definition
from modelyard.workers.interpreter import check_interpreter, worker_command, worker_environment
from modelyard.workers.messages import OpenEngine
from modelyard.workers.transport import HeartbeatConfig

_START_S = 120.0  # starting Python on a machine that is busy with loading a model
_CLOSE_S = 60.0  # an engine may have a lot to save
_STOP_S = 5.0  # for a worker without engines to exit
_SETTLE_S = 0.1  # between a broken connection and the exit of the process, or output and the message about it
_ERROR_LINES = 5  # of its output that explain an exit


class ProcessEngine:
    """What both kinds of engines share. `pid` is the child's."""

    def __init__(self, spec: EngineSpec, heartbeat: HeartbeatConfig = HeartbeatConfig()) -> None:
        self._spec, self._heartbeat = spec, heartbeat
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self.info = EngineInfo(spec.backend, dict(spec.caches))
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._child: ChildProcess | None = None
        self._session: WorkerSession | None = None
        self._engine: Any = None
        self._watching: asyncio.Task[None] | None = None
        self._closed_error: ModelyardError = Unavailable("the engine is not open")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._spec.model} in process {self.pid}>"

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child is not None else None

    def log_tail(self) -> list[str]:
        return self._child.log.lines() if self._child is not None else []

    async def open(self, progress: OnProgress) -> None:
        progress(0.0, "starting a process")
        self._folder = tempfile.TemporaryDirectory(prefix="modelyard-", ignore_cleanup_errors=True)
        folder, python = Path(self._folder.name), self._spec.python
        endpoint, definition = f"ipc://{folder / 'worker'}", folder / "engine"
        write_definition(definition, define(self._spec))
        if python is not None:
            await check_interpreter(python)
        env = worker_environment(python, folder, os.environ)
        self._child = child = await ChildProcess.start(worker_command(endpoint, definition, python), env)
        name = f"gateway-{os.getpid()}"
        session = WorkerSession(
            endpoint,
            name,
            heartbeat=self._heartbeat,
            on_broken=self._on_broken,
            wants_log=True,
            core_seconds=child.core_seconds,
        )
        self._session = session
        try:
            async with asyncio.timeout(_START_S):
                await result_unless_exited(session.connect(), child.ended, lambda: self._exit_error(child))
        except TimeoutError:
            raise Timeout(f"the engine's process did not answer within {_START_S:g} s", code="load_timeout") from None
        message = OpenEngine(uuid4().hex[:16], message_spec(self._spec))
        try:
            opened = await result_unless_exited(
                session.open(message, progress), child.ended, lambda: self._exit_error(child)
            )
        except ModelyardError as error:
            raise await self._explain(error) from error
        self.info = opened.info
        self._engine = remote_engine(session, opened, self.lost)
        self._watching = asyncio.get_running_loop().create_task(self._watch(child, session))

    async def _explain(self, error: ModelyardError) -> ModelyardError:
        """Some engines have helper processes whose errors appear only in the child's output."""
        explain = plugins.engine(self._spec.backend).explain
        if explain is None:
            return error
        await asyncio.sleep(_SETTLE_S)
        return explain(error, self.log_tail())

    def _exit_error(self, child: ChildProcess) -> Unavailable:
        message = f"the process of the engine of {self._spec.model!r} {describe_exit(child.ended.result())}"
        lines = last_words(child.log.lines(), _ERROR_LINES)
        return Unavailable(f"{message}: {lines}" if lines else message, code=ENGINE_DIED)

    async def _watch(self, child: ChildProcess, session: WorkerSession) -> None:
        await asyncio.shield(child.ended)
        session.end(self._exit_error(child))

    def _on_broken(self, error: ModelyardError) -> None:
        """The exit of the process explains more than the broken connection: let it be reported first."""
        if self._session is not None:
            asyncio.get_running_loop().call_later(_SETTLE_S, self._session.end, error)

    async def close(self) -> None:
        """Idempotent. A child that does not respond any more is killed at once."""
        self._closed_error = self.lost.result() if self.lost.done() else Unavailable("the engine was closed")
        if self._watching is not None:
            self._watching.cancel()
        child, session = self._child, self._session
        try:
            if child is not None and session is not None:
                await self._stop(child, session)
            elif child is not None:
                await child.stop(0.0)
        finally:
            if session is not None:
                await session.close()
            if self._folder is not None:
                self._folder.cleanup()

    async def _stop(self, child: ChildProcess, session: WorkerSession) -> None:
        if self._engine is not None and not session.is_lost and not self.lost.done():
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await session.close_engine(self._engine.id)
            except TimeoutError:
                child.signal(signal.SIGKILL)
        session.end(self._closed_error)
        if self.lost.done() or self._engine is None:
            child.signal(signal.SIGKILL)  # it may be stopped (SIGSTOP) and would not receive SIGTERM
        await child.stop(_STOP_S)

    def stats(self) -> EngineStats:
        return EngineStats() if self._engine is None else self._engine.stats()

    def _open_engine(self) -> Any:
        if self._engine is None:
            raise self._closed_error
        return self._engine


class ProcessTextEngine(ProcessEngine):
    def generate(self, prompt: Prompt) -> Generation[Chunk]:
        return cast("Generation[Chunk]", self._open_engine().generate(prompt))

    async def control(self, op: Control) -> MovedKv | None:
        return cast("MovedKv | None", await self._open_engine().control(op))

    async def embed(self, batch: Sequence[Sequence[int]]) -> Embeddings:
        return cast("Embeddings", await self._open_engine().embed(batch))


class ProcessChatEngine(ProcessEngine):
    def chat(self, request: Request) -> Generation[Event]:
        return cast("Generation[Event]", self._open_engine().chat(request))

    async def count(self, request: Request) -> int | None:
        return cast("int | None", await self._open_engine().count(request))

    async def embed_inputs(self, request: EmbeddingRequest) -> Embeddings:
        return cast("Embeddings", await self._open_engine().embed_inputs(request))

    async def rerank(self, request: RerankRequest) -> Ranking:
        return cast("Ranking", await self._open_engine().rerank(request))


def create_process_engine(
    spec: EngineSpec, heartbeat: HeartbeatConfig = HeartbeatConfig()
) -> ProcessTextEngine | ProcessChatEngine:
    """The engine, not yet opened."""
    kind = plugins.engine(spec.backend).kind_of(spec.options)
    return (ProcessChatEngine if kind == "chat" else ProcessTextEngine)(spec, heartbeat)
