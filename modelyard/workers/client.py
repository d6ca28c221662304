"""Engines that live in a worker, as any other engine looks: their requests travel, their tokens come back."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

from msgspec.structs import replace

from modelyard.core.engine import (
    Chunk,
    Control,
    Embeddings,
    End,
    EngineInfo,
    EngineStats,
    Generation,
    OnProgress,
    Prompt,
)
from modelyard.core.errors import ModelyardError, Unavailable, Unsupported
from modelyard.core.events import Event, Failed
from modelyard.core.request import Request
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.workers.messages import (
    TOKENIZER_FEATURE,
    VERSION,
    AbortRequest,
    AddChat,
    AddRequest,
    ChatEvents,
    CloseEngine,
    ConnectionRefused,
    ControlEngine,
    CountTokens,
    EmbedTokens,
    EngineClosed,
    EngineLost,
    EngineOpened,
    EngineOpenFailed,
    FetchTokenizer,
    Goodbye,
    Heartbeat,
    Hello,
    LinkMessage,
    LoadProgress,
    OpenEngine,
    PauseRequest,
    RequestFailed,
    RequestFinished,
    RequestUpdate,
    ResumeRequest,
    UpdateBatch,
    Welcome,
    WorkerReply,
    encode,
    read_for_client,
    to_chunk,
    to_infer_request,
    version_mismatch,
)
from modelyard.workers.packing import MalformedMessage, pack_ids, unpack_ids, unpack_vector
from modelyard.workers.transport import ClusterKeys, DealerSocket, HeartbeatConfig, HeartbeatMonitor

# A client's conversation with one worker: greeting, heartbeats, its requests and their answers.
#
# connect ─ Hello ─→ Welcome ─→ (open engines, requests …) ─→ over: the link broke, the worker fell silent, or was left
#
# A session that is over never begins again: what was on its way is lost with it, and every request in it ends with that
# error. Whoever wants the worker back makes a new one.

log = logging.getLogger(__name__)

_ROOM = 1024  # items that may wait for a reader before the worker is asked to hold


class SessionRequest:
    """One request on its way. `last` makes its end of an error."""

    __slots__ = ("box", "held", "last")

    def __init__(self, box: GenerationQueue[Any], last: Callable[[ModelyardError], Any]) -> None:
        self.box, self.last, self.held = box, last, False


class WorkerSession:
    """`lost` resolves when it is over, whatever the reason. `broke` is called in place of `end` where the connection
    breaks: whoever knows more of the reason may wait for it a moment, and must then call `end`. With `meet_s` it is
    over where the worker does not answer in that time; without, whoever waits in `meet` says how long."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        *,
        keys: ClusterKeys | None = None,
        pace: HeartbeatConfig = HeartbeatConfig(),
        broke: Callable[[ModelyardError], None] | None = None,
        meet_s: float | None = None,
    ) -> None:
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self.endpoint, self._pace = endpoint, pace
        self._broke = broke or self.end
        self.lost: asyncio.Future[ModelyardError] = self._loop.create_future()
        self.welcome: Welcome | None = None
        self.complaint = ""  # why it has not answered yet, as far as is known
        self.answered = 0  # the number of the last beat that came back
        self.leaving = False  # the worker has said goodbye: what runs there ends, nothing new begins
        self._met: asyncio.Future[Welcome] = self._loop.create_future()
        self._ids = count(1)
        self._requests: dict[int, SessionRequest] = {}
        self._asked: dict[int, asyncio.Future[WorkerReply]] = {}
        self._opening: dict[str, tuple[asyncio.Future[EngineOpened], OnProgress]] = {}
        self._closing: dict[str, asyncio.Future[None]] = {}
        self._watchers: dict[str, Callable[[ModelyardError], None]] = {}
        self.stats: dict[str, EngineStats] = {}
        self._pulse = HeartbeatMonitor(pace.patience)
        self._dialer = DealerSocket(endpoint, self._heard, self._dropped, keys)
        self._timer: asyncio.TimerHandle | None = None
        self._hear: Mapping[type, Callable[[Any], None]] = {
            UpdateBatch: self._frame,
            Heartbeat: self._beat,
            Welcome: self._welcomed,
            ConnectionRefused: lambda message: self.end(Unavailable(f"the worker refused us: {message.reason}")),
            LoadProgress: self._loading,
            EngineOpened: self._opened,
            EngineOpenFailed: self._open_failed,
            EngineClosed: self._closed,
            EngineLost: self._engine_lost,
            WorkerReply: self._done,
            Goodbye: self._goodbye,
        }
        self._send(Hello(VERSION, name))
        if meet_s is not None:
            self._timer = self._loop.call_later(meet_s, self._unmet)

    def __repr__(self) -> str:
        return f"<Session {self.endpoint}: {len(self._requests)} requests{', over' if self.over else ''}>"

    @property
    def over(self) -> bool:
        return self.lost.done()

    def _unmet(self) -> None:
        if not self._met.done():
            self.end(Unavailable(f"the worker at {self.endpoint} does not answer. {self.complaint}".rstrip()))

    async def meet(self) -> Welcome:
        """Waits until the worker has answered; how long is the caller's to say."""
        return await asyncio.shield(self._met)

    # --- engines ----------------------------------------------------------------------------------------------------

    async def open(self, order: OpenEngine, progress: OnProgress) -> EngineOpened:
        """While an engine loads its worker may be silent: no heartbeat is missed then."""
        self._check()
        opening: asyncio.Future[EngineOpened] = self._loop.create_future()
        self._opening[order.engine] = (opening, progress)
        try:
            self._must_send(order)
            return await opening
        finally:
            self._opening.pop(order.engine, None)
            self._pulse.heard()

    async def close_engine(self, engine: str) -> None:
        """Done when the engine is gone, or its worker."""
        if self.over:
            return
        self._watchers.pop(engine, None)
        closing = self._closing[engine] = self._loop.create_future()
        self._send(CloseEngine(engine))
        await closing

    def tell(self, message: LinkMessage) -> None:
        """A word that needs no answer."""
        self._send(message)

    def watch(self, engine: str, lost: Callable[[ModelyardError], None]) -> None:
        """Whom to tell when this engine dies, or the session ends."""
        if self.over:
            lost(self.lost.result())
        else:
            self._watchers[engine] = lost

    def unwatch(self, engine: str) -> None:
        self._watchers.pop(engine, None)

    # --- requests ---------------------------------------------------------------------------------------------------

    def text(self, message: Callable[[int], LinkMessage]) -> GenerationQueue[Chunk]:
        return self._begin(message, lambda error: End("error", error=error))

    def chat(self, message: Callable[[int], LinkMessage]) -> GenerationQueue[Event]:
        return self._begin(message, Failed)

    def _begin(
        self, message: Callable[[int], LinkMessage], last: Callable[[ModelyardError], Any]
    ) -> GenerationQueue[Any]:
        id = next(self._ids)
        box: GenerationQueue[Any] = GenerationQueue(
            on_cancel=lambda: self._soon(partial(self._abort, id)),
            on_drained=partial(self._go_on, id),
            limit=_ROOM,
            loop=self._loop,
        )
        try:
            self._check()
            self._must_send(message(id))
        except ModelyardError as error:
            box.put_many([last(error)], last=True)
        else:
            self._requests[id] = SessionRequest(box, last)
        return box

    def _soon(self, deed: Callable[[], None]) -> None:
        """At once on the loop's own thread: whoever cancels there and leaves wants it sent before he is gone."""
        if threading.get_ident() == self._thread:
            deed()
        else:
            self._loop.call_soon_threadsafe(deed)

    def _abort(self, id: int) -> None:
        if id in self._requests:
            self._send(AbortRequest(id))

    def _go_on(self, id: int) -> None:
        request = self._requests.get(id)
        if request is not None and request.held:
            request.held = False
            self._send(ResumeRequest(id))

    async def ask(self, message: Callable[[int], LinkMessage]) -> WorkerReply:
        """An order or a question; raises what the worker says is wrong with it."""
        self._check()
        id = next(self._ids)
        asked: asyncio.Future[WorkerReply] = self._loop.create_future()
        self._asked[id] = asked
        try:
            self._must_send(message(id))
            answer = await asked
        finally:
            self._asked.pop(id, None)
        if answer.error is not None:
            raise answer.error
        return answer

    # --- what the worker says ---------------------------------------------------------------------------------------

    def _heard(self, data: bytes) -> None:
        if self.over:
            return
        self._pulse.heard()
        try:
            message = read_for_client(data)
            self._hear[type(message)](message)
        except MalformedMessage as error:
            log.warning("%s sent what is no message: %s", self.endpoint, error)
            self.end(Unavailable(f"the worker at {self.endpoint} does not speak our protocol: {error}"))

    def _frame(self, frame: UpdateBatch) -> None:
        if frame.stats:
            self.stats.update(frame.stats)
        for item in frame.items:
            self._item(item)

    def _item(self, item: RequestUpdate) -> None:
        request = self._requests.get(item.request_id)
        if request is None:
            return  # it has ended here already
        if type(item) is ChatEvents:
            last = bool(item.events) and type(item.events[-1]).__name__ in ("Finished", "Failed")
            self._put(item.request_id, request, item.events, last)
        else:
            ends = type(item) is RequestFinished or type(item) is RequestFailed
            self._put(item.request_id, request, [to_chunk(item, unpack_ids)], ends)

    def _put(self, id: int, request: SessionRequest, items: list[Any], last: bool) -> None:
        if last:
            del self._requests[id]
        if not request.box.put_many(items, last=last) and not (last or request.held):
            request.held = True
            self._send(PauseRequest(id))

    def _beat(self, beat: Heartbeat) -> None:
        """Zero is the worker's own: it says nothing of when it heard us last."""
        self.answered = beat.number or self.answered
        self.stats.update(beat.stats)

    def _welcomed(self, welcome: Welcome) -> None:
        if (fault := version_mismatch(welcome.version)) is not None:
            self.end(Unavailable(f"the worker at {self.endpoint} cannot be used: {fault}"))
            return
        self.welcome = welcome
        if not self._met.done():
            self._met.set_result(welcome)
            if self._timer is not None:
                self._timer.cancel()
            self._tick()

    def _loading(self, loading: LoadProgress) -> None:
        if loading.engine in self._opening:
            self._opening[loading.engine][1](loading.done, loading.doing)

    def _opened(self, opened: EngineOpened) -> None:
        if opened.engine in self._opening and not (waiting := self._opening[opened.engine][0]).done():
            waiting.set_result(opened)

    def _open_failed(self, failed: EngineOpenFailed) -> None:
        if failed.engine in self._opening and not (waiting := self._opening[failed.engine][0]).done():
            waiting.set_exception(failed.error)

    def _closed(self, closed: EngineClosed) -> None:
        if (waiting := self._closing.pop(closed.engine, None)) is not None and not waiting.done():
            waiting.set_result(None)

    def _engine_lost(self, lost: EngineLost) -> None:
        if (tell := self._watchers.pop(lost.engine, None)) is not None:
            tell(lost.error)

    def _done(self, done: WorkerReply) -> None:
        self.stats.update(done.stats)
        if (waiting := self._asked.pop(done.request_id, None)) is not None and not waiting.done():
            waiting.set_result(done)

    def _goodbye(self, goodbye: Goodbye) -> None:
        self.leaving = True
        error = Unavailable(f"the worker at {self.endpoint} is leaving: {goodbye.reason}", code="worker_leaving")
        for tell in self._take_watchers():
            tell(error)

    # --- its end ----------------------------------------------------------------------------------------------------

    def _dropped(self, why: str) -> None:
        if self._met.done():
            self._broke(Unavailable(f"the worker was lost: {why}"))
        else:
            self.complaint = why  # not up yet, or not ours: whoever waits decides when to give up

    def _tick(self) -> None:
        if self.over:
            return
        self._timer = self._loop.call_later(self._pace.beat_s, self._tick)
        if self._opening:
            self._pulse.heard()
        if self._pulse.tick():
            silent = self._pace.beat_s * self._pace.patience
            self.end(Unavailable(f"the worker at {self.endpoint} has been silent for {silent:.1f} s"))
        else:
            self._send(Heartbeat(self._pulse.number))

    def end(self, error: ModelyardError) -> None:
        """Everything in it ends with this error. Idempotent."""
        if self.over:
            return
        self.lost.set_result(error)
        if self._timer is not None:
            self._timer.cancel()
        for tell in self._take_watchers():  # first: whoever tries again elsewhere must not be sent here
            tell(error)
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.box.put_many([request.last(error)], last=True)
        waiting: list[asyncio.Future[Any]] = [self._met, *(opening for opening, _ in self._opening.values())]
        for future in (*waiting, *self._asked.values()):
            if not future.done():
                future.set_exception(error)
                future.exception()  # marks it seen: nobody may be waiting
        for closing in self._closing.values():
            if not closing.done():
                closing.set_result(None)
        self._closing.clear()

    def _take_watchers(self) -> list[Callable[[ModelyardError], None]]:
        watchers, self._watchers = self._watchers, {}
        return list(watchers.values())

    @property
    def idle(self) -> bool:
        return not self._requests

    @property
    def beats(self) -> int:
        """How many were sent."""
        return self._pulse.number

    async def close(self) -> None:
        """Idempotent. What still runs ends as unavailable."""
        if not self.over:
            self._send(Goodbye())
            self.end(Unavailable("the engine was closed"))
        await self._dialer.close()

    def _check(self) -> None:
        if self.over:
            raise self.lost.result()

    def _must_send(self, message: LinkMessage) -> None:
        if not self._dialer.send(encode(message)):
            raise Unavailable(f"the worker at {self.endpoint} takes nothing more: too much waits for it already")

    def _send(self, message: LinkMessage) -> None:
        """A small word to the worker. Where not even that can be queued, it has not read for very long: its silence
        is about to be noticed."""
        self._dialer.send(encode(message))


EngineLoss = asyncio.Future[ModelyardError]


class RemoteEngine:
    """An engine that is open in a worker. Closing it lets go of it: it stays open there."""

    def __init__(self, session: WorkerSession, engine: str, info: EngineInfo, lost: EngineLoss | None = None) -> None:
        self._session, self.id, self.info = session, engine, info
        self.lost: EngineLoss = lost or asyncio.get_running_loop().create_future()
        session.watch(engine, self._died)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} at {self._session.endpoint}>"

    def _died(self, error: ModelyardError) -> None:
        if not self.lost.done():
            self.lost.set_result(error)

    async def open(self, progress: OnProgress) -> None:
        progress(1.0, "ready")

    async def study(self, have: tuple[str, ...]) -> WorkerReply:
        """Its tokenizer, from the worker; raises where that one cannot tell."""
        welcome = await self._session.meet()
        if TOKENIZER_FEATURE not in welcome.able:
            raise Unsupported(f"the worker {welcome.worker} is too old to send its tokenizers: update it")
        return await self._session.ask(lambda id: FetchTokenizer(id, self.id, have))

    def stats(self) -> EngineStats:
        return self._session.stats.get(self.id, EngineStats())

    async def close(self) -> None:
        self._session.unwatch(self.id)


class RemoteTextEngine(RemoteEngine):
    def generate(self, prompt: Prompt) -> Generation[Chunk]:
        return self._session.text(lambda id: AddRequest(self.id, to_infer_request(id, prompt)))

    async def control(self, op: Control) -> None:
        await self._session.ask(lambda id: ControlEngine(id, self.id, op))


class RemoteEmbeddingEngine(RemoteTextEngine):
    async def embed(self, batch: Sequence[Sequence[int]]) -> Embeddings:
        packed = [pack_ids(ids) for ids in batch]
        done = await self._session.ask(lambda id: EmbedTokens(id, self.id, packed))
        return Embeddings([unpack_vector(vector) for vector in done.vectors], done.tokens or 0)


class RemoteChatEngine(RemoteEngine):
    def chat(self, request: Request) -> Generation[Event]:
        bare = replace(request, warnings=())
        return self._session.chat(lambda id: AddChat(self.id, id, bare))

    async def count(self, request: Request) -> int | None:
        return (await self._session.ask(lambda id: CountTokens(id, self.id, request))).tokens


class ReportedLoss(EngineLoss):
    """An engine's `lost` that tells somebody in the same breath: who tries again must not be sent there."""

    def __init__(self, tell: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._tell = tell

    def set_result(self, result: ModelyardError, /) -> None:
        super().set_result(result)
        self._tell()


def remote_engine(
    session: WorkerSession, opened: EngineOpened, lost: EngineLoss | None = None
) -> RemoteTextEngine | RemoteChatEngine:
    """The engine of this kind. One that makes no embeddings has no `embed`: that is how the gateway tells.

    `lost` is whom to tell of its death, where somebody has promised that already.
    """
    kind = RemoteChatEngine if opened.kind == "chat" else RemoteEmbeddingEngine if opened.embeds else RemoteTextEngine
    return kind(session, opened.engine, opened.info, lost)
