"""The client side of a worker: the session with it, and engines that run in it.

connect ─ Hello ─→ Welcome ─→ (open engines, requests …) ─→ lost: the link broke, the worker was silent, or we closed it

A session that is lost never recovers: messages in flight are lost, and every request in it ends with that error. To use
the worker again, create a new session. Errors reach clients of the gateway: addresses are only in the log.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeVar

from msgspec.structs import replace

from modelyard.core.engine import (
    Chunk,
    Control,
    Embeddings,
    End,
    EngineStats,
    Generation,
    MovedKv,
    OnProgress,
    Prompt,
    Ranking,
)
from modelyard.core.errors import ENGINE_DIED, ModelyardError, Unavailable
from modelyard.core.events import Event, Failed, Finished
from modelyard.core.request import EmbeddingRequest, Request, RerankRequest
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.telemetry.request_capture import RequestCapture, current_capture
from modelyard.workers import messages as msg
from modelyard.workers.transport import ClusterKeys, DealerSocket, HeartbeatConfig, HeartbeatMonitor

T = TypeVar("T")

log = logging.getLogger(__name__)

_QUEUE_LIMIT = 1024  # items that may wait for a reader before the worker is asked to pause
_MOST_MISSED = 50  # heartbeats of a worker that computes or waits for a core: 20 s
_MAX_LINE_AGE_S = 86_400.0  # of a worker's log line: beyond, its clock is not ours


class SessionRequest:
    """A request in flight; `WorkerSession.start` explains `make_end` and `capture`."""

    __slots__ = ("capture", "is_paused", "is_received", "make_end", "queue")

    def __init__(
        self, queue: GenerationQueue[Any], make_end: Callable[[ModelyardError], Any], capture: RequestCapture | None
    ) -> None:
        self.queue, self.make_end, self.capture = queue, make_end, capture
        self.is_paused = self.is_received = False

    def end(self, error: ModelyardError) -> None:
        """The worker is lost. A request that it has not read did not kill it, and may be sent to another one."""
        if error.code == ENGINE_DIED and not self.is_received:
            error = Unavailable(f"{error.message} (before it read this request)", code="engine_gone")
        self.queue.put_many([self.make_end(error)], last=True)

    def on_traffic(self, traffic: msg.ChatTraffic) -> None:
        if self.capture is None:
            return
        if traffic.sent:
            self.capture.prompt(traffic.sent)
        self.capture.output(traffic.received)


class WorkerSession:
    """`lost` resolves when the session ends, whatever the reason. `on_broken` is called instead of `end` when the
    connection breaks: a caller that expects a better error may wait for it, and must then call `end`. With
    `connect_timeout_s` the session ends if the worker does not answer in that time. `wants_log`: what the worker's
    process logs is logged here, too. `core_seconds`: how long the worker's process has run or waited for a core, if it
    is on this machine: a silent worker that wants a core is not lost yet."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        *,
        keys: ClusterKeys | None = None,
        heartbeat: HeartbeatConfig = HeartbeatConfig(),
        on_broken: Callable[[ModelyardError], None] | None = None,
        connect_timeout_s: float | None = None,
        wants_log: bool = False,
        core_seconds: Callable[[], float] | None = None,
    ) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self.endpoint, self._heartbeat = endpoint, heartbeat
        self._on_broken = on_broken or self.end
        self.lost: asyncio.Future[ModelyardError] = self._loop.create_future()
        self.welcome: msg.Welcome | None = None
        self.is_draining = False  # the worker has said goodbye: it finishes its requests and takes no new ones
        self.stats: dict[str, EngineStats] = {}
        self.last_reply = 0  # number of the last heartbeat that the worker answered
        self._connect_error = ""
        self._connected: asyncio.Future[msg.Welcome] = self._loop.create_future()
        self._ids = count(1)
        self._requests: dict[int, SessionRequest] = {}
        self._calls: dict[int, asyncio.Future[msg.WorkerReply]] = {}
        self._opening: dict[str, tuple[asyncio.Future[msg.EngineOpened], OnProgress]] = {}
        self._closing: dict[str, asyncio.Future[None]] = {}
        self._loss_callbacks: dict[str, Callable[[ModelyardError], None]] = {}
        self._monitor = HeartbeatMonitor(heartbeat.worker_misses)
        self._core_seconds, self._wanted_s = core_seconds, 0.0
        self._socket = DealerSocket(endpoint, self._on_data, self._on_disconnect, keys)
        self._timer: asyncio.TimerHandle | None = None
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            msg.UpdateBatch: self._on_updates,
            msg.RequestReceived: self._on_received,
            msg.Heartbeat: self._on_heartbeat,
            msg.Welcome: self._on_welcome,
            msg.ConnectionRefused: lambda message: self.end(Unavailable(f"the worker refused us: {message.reason}")),
            msg.LoadProgress: self._on_load_progress,
            msg.EngineOpened: self._on_opened,
            msg.EngineOpenFailed: self._on_open_failed,
            msg.EngineClosed: self._on_closed,
            msg.EngineLost: self._on_engine_lost,
            msg.WorkerReply: self._on_reply,
            msg.WorkerLog: self._on_log,
            msg.Goodbye: self._on_goodbye,
        }
        self.send(msg.Hello(msg.VERSION, name, wants_log))
        if connect_timeout_s is not None:
            self._timer = self._loop.call_later(connect_timeout_s, self._on_connect_timeout)

    def __repr__(self) -> str:
        return f"<WorkerSession {self.endpoint}: {len(self._requests)} requests{', lost' if self.is_lost else ''}>"

    @property
    def is_lost(self) -> bool:
        return self.lost.done()

    @property
    def is_idle(self) -> bool:
        return not self._requests

    @property
    def heartbeats_sent(self) -> int:
        return self._monitor.number

    def _on_connect_timeout(self) -> None:
        if not self._connected.done():
            log.warning("the worker at %s does not answer. %s", self.endpoint, self._connect_error)
            self.end(Unavailable("the worker does not answer"))

    async def connect(self) -> msg.Welcome:
        """Wait for the worker's answer; the caller sets the timeout."""
        return await asyncio.shield(self._connected)

    # --- engines ----------------------------------------------------------------------------------------------------

    async def open(self, message: msg.OpenEngine, progress: OnProgress) -> msg.EngineOpened:
        """A worker may be silent while an engine loads: heartbeats are not missed then."""
        self._check_alive()
        opening: asyncio.Future[msg.EngineOpened] = self._loop.create_future()
        self._opening[message.engine] = (opening, progress)
        try:
            self._send_or_raise(message)
            return await opening
        finally:
            self._opening.pop(message.engine, None)
            self._monitor.reset()

    async def close_engine(self, engine: str) -> None:
        """Done when the engine or its worker is gone."""
        if self.is_lost:
            return
        self._loss_callbacks.pop(engine, None)
        closing = self._closing[engine] = self._loop.create_future()
        self.send(msg.CloseEngine(engine))
        await closing

    def on_engine_lost(self, engine: str, callback: Callable[[ModelyardError], None]) -> None:
        """Call `callback` when this engine dies or the session ends."""
        if self.is_lost:
            callback(self.lost.result())
        else:
            self._loss_callbacks[engine] = callback

    def remove_loss_callback(self, engine: str) -> None:
        self._loss_callbacks.pop(engine, None)

    # --- requests ---------------------------------------------------------------------------------------------------

    def start(
        self,
        message: Callable[[int], msg.LinkMessage],
        make_end: Callable[[ModelyardError], Any],
        capture: RequestCapture | None = None,
    ) -> GenerationQueue[Any]:
        """Start a request with the message for its id. `make_end` turns an error into the last item of its queue;
        `capture` gets what a chat engine sends and receives."""
        id = next(self._ids)
        queue: GenerationQueue[Any] = GenerationQueue(
            on_cancel=lambda: self._run_on_loop(partial(self._abort, id)),
            on_drained=partial(self._resume, id),
            limit=_QUEUE_LIMIT,
            loop=self._loop,
        )
        try:
            self._check_alive()
            self._send_or_raise(message(id))
        except ModelyardError as error:
            queue.put_many([make_end(error)], last=True)
        else:
            self._requests[id] = SessionRequest(queue, make_end, capture)
        return queue

    def _run_on_loop(self, callback: Callable[[], None]) -> None:
        """At once on the loop's own thread: a caller that cancels and then closes wants the message sent before."""
        if threading.get_ident() == self._thread:
            callback()
        else:
            self._loop.call_soon_threadsafe(callback)

    def _abort(self, id: int) -> None:
        if id in self._requests:
            self.send(msg.AbortRequest(id))

    def _resume(self, id: int) -> None:
        request = self._requests.get(id)
        if request is not None and request.is_paused:
            request.is_paused = False
            self.send(msg.ResumeRequest(id))

    async def call(self, message: Callable[[int], msg.LinkMessage]) -> msg.WorkerReply:
        """Send a message and wait for its reply; raises the error in it."""
        self._check_alive()
        id = next(self._ids)
        pending: asyncio.Future[msg.WorkerReply] = self._loop.create_future()
        self._calls[id] = pending
        try:
            self._send_or_raise(message(id))
            reply = await pending
        finally:
            self._calls.pop(id, None)
        if reply.error is not None:
            raise reply.error
        return reply

    # --- messages from the worker -----------------------------------------------------------------------------------

    def _on_data(self, data: bytes) -> None:
        if self.is_lost:
            return
        self._monitor.reset()
        try:
            message = msg.decode_for_client(data)
            self._handlers[type(message)](message)
        except msg.MalformedMessage as error:
            log.warning("%s sent a malformed message: %s", self.endpoint, error)
            self.end(Unavailable(f"the worker does not speak our protocol: {error}"))

    def _on_updates(self, batch: msg.UpdateBatch) -> None:
        if batch.stats:
            self.stats.update(batch.stats)
        for update in batch.updates:
            self._on_update(update)

    def _on_received(self, received: msg.RequestReceived) -> None:
        if (request := self._requests.get(received.request_id)) is not None:
            request.is_received = True

    def _on_update(self, update: msg.RequestUpdate) -> None:
        id = update.request_id
        request = self._requests.get(id)
        if request is None:
            return  # it has ended here already
        if isinstance(update, msg.ChatTraffic):
            request.on_traffic(update)
            return
        items: list[Any] = update.chunks if isinstance(update, msg.TextChunks) else update.events
        last = bool(items) and isinstance(items[-1], (End, Finished, Failed))
        if last:
            del self._requests[id]
        if not request.queue.put_many(items, last=last) and not (last or request.is_paused):
            request.is_paused = True
            self.send(msg.PauseRequest(id))

    def _on_heartbeat(self, heartbeat: msg.Heartbeat) -> None:
        """0 is the worker's own heartbeat: it is not a reply."""
        self.last_reply = heartbeat.number or self.last_reply
        self.stats.update(heartbeat.stats)

    def _on_welcome(self, welcome: msg.Welcome) -> None:
        if (mismatch := msg.version_mismatch(welcome.version)) is not None:
            self.end(Unavailable(f"the worker cannot be used: {mismatch}"))
            return
        self.welcome = welcome
        if not self._connected.done():
            self._connected.set_result(welcome)
            if self._timer is not None:
                self._timer.cancel()
            self._tick()

    def _on_load_progress(self, progress: msg.LoadProgress) -> None:
        if progress.engine in self._opening:
            self._opening[progress.engine][1](progress.done, progress.phase)

    def _on_opened(self, opened: msg.EngineOpened) -> None:
        if opened.engine in self._opening and not (future := self._opening[opened.engine][0]).done():
            future.set_result(opened)

    def _on_open_failed(self, failed: msg.EngineOpenFailed) -> None:
        if failed.engine in self._opening and not (future := self._opening[failed.engine][0]).done():
            future.set_exception(failed.error)

    def _on_closed(self, closed: msg.EngineClosed) -> None:
        if (future := self._closing.pop(closed.engine, None)) is not None and not future.done():
            future.set_result(None)

    def _on_engine_lost(self, lost: msg.EngineLost) -> None:
        if (callback := self._loss_callbacks.pop(lost.engine, None)) is not None:
            callback(lost.error)

    def _on_reply(self, reply: msg.WorkerReply) -> None:
        self.stats.update(reply.stats)
        if (future := self._calls.pop(reply.request_id, None)) is not None and not future.done():
            future.set_result(reply)

    def _on_log(self, received: msg.WorkerLog) -> None:
        fields = {} if self.welcome is None else {"worker": self.welcome.worker, "pid": self.welcome.pid}
        now = time.time()
        for line in received.lines:
            if log.isEnabledFor(line.level):
                created = line.created if abs(line.created - now) < _MAX_LINE_AGE_S else now
                record = {
                    "name": line.logger,
                    "levelno": line.level,
                    "levelname": logging.getLevelName(line.level),
                    "msg": line.message,
                    "created": created,
                    "msecs": created % 1 * 1000,
                    "exc_text": line.error or None,
                    "request_id": line.request_id,
                    "fields": fields,
                }
                log.handle(logging.makeLogRecord(record))

    def _on_goodbye(self, goodbye: msg.Goodbye) -> None:
        self.is_draining = True
        self._report_loss(Unavailable(f"the worker is shutting down: {goodbye.reason}", code="worker_leaving"))

    # --- its end ----------------------------------------------------------------------------------------------------

    def _on_disconnect(self, reason: str) -> None:
        if self._connected.done():
            log.warning("%s", reason)
            self._on_broken(Unavailable("the worker was lost: the connection to it broke", code=ENGINE_DIED))
        else:
            self._connect_error = reason  # not started yet, or not ours: the caller decides when to give up

    def _tick(self) -> None:
        if self.is_lost:
            return
        self._timer = self._loop.call_later(self._heartbeat.interval_s, self._tick)
        if self._opening:
            self._monitor.reset()
        is_silent, wants_a_core = self._monitor.tick(), self._wants_a_core()
        if is_silent and not wants_a_core:
            silent = self._heartbeat.interval_s * (self._monitor.missed - 1)
            log.warning("the worker at %s is silent", self.endpoint)
            self.end(Unavailable(f"the worker has been silent for {silent:.1f} s", code=ENGINE_DIED))
        else:
            self.send(msg.Heartbeat(self._monitor.number))

    def _wants_a_core(self) -> bool:
        """Whether it did so for most of the time since the last tick: then other programs have the cores, or it
        computes without a pause. Not for ever: what computes without an end is lost, too."""
        if self._core_seconds is None or not 1 < self._monitor.missed <= _MOST_MISSED:
            return False
        before, self._wanted_s = self._wanted_s, self._core_seconds()
        return self._wanted_s - before > self._heartbeat.interval_s / 2

    def end(self, error: ModelyardError) -> None:
        """End everything in the session with this error. Idempotent."""
        if self.is_lost:
            return
        self.lost.set_result(error)
        if self._timer is not None:
            self._timer.cancel()
        self._report_loss(error)  # first: requests that are retried must not be sent here
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.end(error)
        futures: list[asyncio.Future[Any]] = [self._connected, *(future for future, _ in self._opening.values())]
        for future in (*futures, *self._calls.values()):
            if not future.done():
                future.set_exception(error)
                future.exception()  # mark it retrieved: it may have no waiter
        for closing in self._closing.values():
            if not closing.done():
                closing.set_result(None)
        self._closing.clear()

    def _report_loss(self, error: ModelyardError) -> None:
        callbacks, self._loss_callbacks = self._loss_callbacks, {}
        for callback in callbacks.values():
            callback(error)

    async def close(self) -> None:
        """Requests that still run end as unavailable. Idempotent."""
        if not self.is_lost:
            self.send(msg.Goodbye())
            self.end(Unavailable("the engine was closed"))
        await self._socket.close()

    def _check_alive(self) -> None:
        if self.is_lost:
            raise self.lost.result()

    def _send_or_raise(self, message: msg.LinkMessage) -> None:
        if not self._socket.send(msg.encode(message)):
            raise Unavailable("the worker does not read: too many messages wait for it")

    def send(self, message: msg.LinkMessage) -> None:
        """Send without an error: a worker whose queue is full has not read for long, and its silence is about to be
        noticed."""
        self._socket.send(msg.encode(message))


async def result_unless_exited(
    work: Coroutine[Any, Any, T], ended: asyncio.Task[int] | None, exit_error: Callable[[], ModelyardError]
) -> T:
    """The result of `work`. If the worker's process `ended` before, raise `exit_error()`."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        tasks: set[asyncio.Task[Any]] = {task} if ended is None else {task, ended}
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if ended is not None and ended.done() and (not task.done() or task.exception() is not None):
            raise exit_error()
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- engines --------------------------------------------------------------------------------------------------------


class RemoteEngine:
    """An engine that is open in a worker. Closing it only detaches from it. `on_lost` is called when it is lost, before
    any waiter of `lost`."""

    def __init__(
        self,
        session: WorkerSession,
        opened: msg.EngineOpened,
        lost: asyncio.Future[ModelyardError] | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._session, self.id, self.info = session, opened.engine, opened.info
        self.lost: asyncio.Future[ModelyardError] = lost or asyncio.get_running_loop().create_future()
        self._callback = on_lost
        session.on_engine_lost(self.id, self._on_lost)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} at {self._session.endpoint}>"

    def _on_lost(self, error: ModelyardError) -> None:
        if not self.lost.done():
            self.lost.set_result(error)
            if self._callback is not None:
                self._callback()

    async def open(self, progress: OnProgress) -> None:
        progress(1.0, "ready")

    async def fetch_tokenizer(self, have: tuple[str, ...]) -> msg.WorkerReply:
        """The tokenizer files, from the worker."""
        return await self._session.call(lambda id: msg.FetchTokenizer(id, self.id, have))

    def stats(self) -> EngineStats:
        return self._session.stats.get(self.id, EngineStats())

    async def close(self) -> None:
        self._session.remove_loss_callback(self.id)


class RemoteTextEngine(RemoteEngine):
    def generate(self, prompt: Prompt) -> Generation[Chunk]:
        return self._session.start(
            lambda id: msg.AddRequest(self.id, id, msg.with_time_left(prompt)),
            lambda error: End("error", error=error),
        )

    async def control(self, op: Control) -> MovedKv | None:
        return (await self._session.call(lambda id: msg.ControlEngine(id, self.id, op))).moved


class RemoteEmbeddingEngine(RemoteTextEngine):
    async def embed(self, batch: Sequence[Sequence[int]]) -> Embeddings:
        reply = await self._session.call(lambda id: msg.EmbedTokens(id, self.id, [list(ids) for ids in batch]))
        return Embeddings(reply.vectors, reply.tokens or 0)


class RemoteChatEngine(RemoteEngine):
    def chat(self, request: Request) -> Generation[Event]:
        without_warnings, capture = replace(request, warnings=()), current_capture.get()
        return self._session.start(
            lambda id: msg.AddChat(self.id, id, without_warnings, capture is not None), Failed, capture
        )

    async def count(self, request: Request) -> int | None:
        return (await self._session.call(lambda id: msg.CountChatTokens(id, self.id, request))).tokens

    async def embed_inputs(self, request: EmbeddingRequest) -> Embeddings:
        reply = await self._session.call(lambda id: msg.EmbedInputs(id, self.id, request))
        return Embeddings(reply.vectors, reply.tokens or 0)

    async def rerank(self, request: RerankRequest) -> Ranking:
        reply = await self._session.call(lambda id: msg.RerankDocuments(id, self.id, request))
        return Ranking(reply.scores, reply.tokens or 0)


def remote_engine(
    session: WorkerSession,
    opened: msg.EngineOpened,
    lost: asyncio.Future[ModelyardError] | None = None,
    on_lost: Callable[[], None] | None = None,
) -> RemoteTextEngine | RemoteChatEngine:
    """`lost` is the future to use as the engine's. Only an embedding engine has `embed`; the gateway checks for it."""
    kind = RemoteChatEngine if opened.kind == "chat" else RemoteEmbeddingEngine if opened.embeds else RemoteTextEngine
    return kind(session, opened, lost, on_lost)
