"""A worker: engines behind a socket. It hears clients, gives their requests to its engines, and sends what they say.

The loop is its io thread: messages in, frames out. An engine that computes does so in threads of its own, behind its
own inbox, and hands its tokens to the loop step by step. A worker knows nobody: whoever may reach its socket may open
engines and use them; a client that falls silent, or sends what is no message, is forgotten with all that ran for it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal, cast
from uuid import uuid4

from pydantic import ValidationError

from modelyard import plugins
from modelyard.core.engine import ChatEngine, EmbeddingEngine, Engine, EngineSpec, OnProgress, TextEngine
from modelyard.core.errors import Conflict, Internal, InvalidRequest, ModelyardError, Unavailable, Unsupported
from modelyard.workers.dedup import RunDeduplicator
from modelyard.workers.messages import (
    TOKENIZER_FEATURE,
    VERSION,
    AbortRequest,
    AddChat,
    AddRequest,
    CloseEngine,
    ConnectionRefused,
    ControlEngine,
    CountTokens,
    DropClient,
    EmbedTokens,
    EngineClosed,
    EngineLost,
    EngineOpened,
    EngineOpenFailed,
    FetchTokenizer,
    Goodbye,
    Heartbeat,
    Hello,
    HostedEngineInfo,
    LinkMessage,
    LoadProgress,
    OpenEngine,
    PauseRequest,
    ResumeRequest,
    ShutdownWorker,
    Welcome,
    WorkerReply,
    read_for_worker,
    to_prompt,
    version_mismatch,
)
from modelyard.workers.packing import MalformedMessage, pack_vector, unpack_ids
from modelyard.workers.peers import Peer, PeerSender, RunningRequest, failure_update
from modelyard.workers.tokenizer_files import read_tokenizer_files, tokenizer_hash
from modelyard.workers.transport import ClusterKeys, HeartbeatConfig, RouterSocket

# An engine in the worker that hosts it: made from what travelled, opened, watched, and closed.

log = logging.getLogger(__name__)


def open_engine_message(engine: str, backend: str, spec: EngineSpec, identity: str = "") -> OpenEngine:
    """What a worker needs to make this engine. Only what was set travels: the rest is the engine's own default."""
    options: bytes = spec.options.model_dump_json(exclude_unset=True).encode()
    return OpenEngine(engine, backend, spec.model, options, dict(spec.caches), spec.modalities, identity)


def engine_spec(order: OpenEngine) -> EngineSpec:
    kind = plugins.load("engines", order.backend).Options
    try:
        options = kind.model_validate_json(order.options)
    except ValidationError as error:
        told = error.errors()[0]
        where = ".".join(map(str, told["loc"]))
        raise InvalidRequest(
            f"the options of {order.model!r} do not fit this worker's engine: {where}: {told['msg']}"
        ) from None
    return EngineSpec(order.model, options, order.caches, order.modalities)


class HostedEngine:
    """`lost` is called when the engine dies by itself."""

    def __init__(self, order: OpenEngine, lost: Callable[[HostedEngine, ModelyardError], None]) -> None:
        self.id, self.model, self.identity = order.engine, order.model, order.identity
        self._order, self._lost = order, lost
        self.engine: Engine | None = None  # once it is open
        self.kind: Literal["text", "chat"] = "text"
        self.running = 0
        self.opening: asyncio.Task[None] | None = None  # whoever opens it
        self._made: Engine | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self, progress: OnProgress) -> Engine:
        try:
            spec = engine_spec(self._order)
            module: Any = plugins.load("engines", self._order.backend)
            self.kind = module.kind(spec.options)
            self._made = made = module.create(spec)
            await made.open(progress)
        except asyncio.CancelledError:
            await self.close()
            raise
        except Exception as error:
            await self.close()
            raise to_modelyard_error(error) from error
        self.engine = made
        self._watching = asyncio.get_running_loop().create_task(self._watch(made))
        return self.engine

    async def _watch(self, engine: Engine) -> None:
        error = await asyncio.shield(engine.lost)
        self._lost(self, error)

    async def end(self) -> None:
        """Whatever it does now: one that still opens is not waited for."""
        if self.opening is not None and not self.opening.done():
            self.opening.cancel()
            await asyncio.wait({self.opening})
        await self.close()

    async def close(self) -> None:
        """Idempotent."""
        self.engine = None
        if self._watching is not None:
            self._watching.cancel()
        made, self._made = self._made, None
        if made is not None:
            await made.close()

    async def tokenizer(self) -> dict[str, bytes]:
        """What a gateway needs that does not have this model's files."""
        module: Any = plugins.load("engines", self._order.backend)
        if not hasattr(module, "tokenizer_path"):
            raise Unsupported(f"the engine of {self.model!r} has no tokenizer of its own", code="tokenizer_missing")
        return await asyncio.to_thread(
            lambda: read_tokenizer_files(module.tokenizer_path(engine_spec(self._order).options))
        )

    def told(self) -> EngineOpened:
        assert self.engine is not None  # noqa: S101  the caller has looked
        return EngineOpened(self.id, self.kind, self.engine.info, isinstance(self.engine, EmbeddingEngine))

    def held(self) -> HostedEngineInfo:
        assert self.engine is not None  # noqa: S101  the caller has looked
        return HostedEngineInfo(self.id, self.model, self.identity, self.kind, self.engine.info)


def to_modelyard_error(error: BaseException) -> ModelyardError:
    """What a client may hear of it; all else is in the log, under an id."""
    if isinstance(error, ModelyardError):
        return error
    internal = Internal(f"the worker failed: {type(error).__name__}: {error}")
    log.error("worker failure (id %s)", internal.id, exc_info=error)
    return internal


# Orders to engines and questions that need no place: what a worker does with them.

Question = ControlEngine | EmbedTokens | CountTokens | FetchTokenizer
Read = tuple[Question, list[list[int]]]


def read_question(question: Question) -> Read:
    """Raises Malformed, in the same breath as it was heard."""
    return question, [unpack_ids(ids) for ids in question.batch] if isinstance(question, EmbedTokens) else []


async def answered(read: Read, find: Callable[[str], tuple[HostedEngine, Engine]]) -> WorkerReply:
    question, batch = read
    (hosted, engine), id = find(question.engine), question.request_id
    if isinstance(question, FetchTokenizer):
        files = await hosted.tokenizer()
        name = tokenizer_hash(files)
        return WorkerReply(id, tokenizer=name, files={} if name in question.have else files)
    if isinstance(question, ControlEngine):
        if not isinstance(engine, TextEngine):
            raise Unsupported(f"the engine {question.engine!r} takes no orders")
        await engine.control(question.control)
        return WorkerReply(id, stats={question.engine: engine.stats()})
    if isinstance(question, EmbedTokens):
        if not isinstance(engine, EmbeddingEngine):
            raise Unsupported(f"the engine {question.engine!r} makes no embeddings", code="embeddings_unsupported")
        made = await engine.embed(batch)
        return WorkerReply(id, None, [pack_vector(vector) for vector in made.vectors], made.prompt_tokens)
    if isinstance(engine, TextEngine):
        raise Unsupported(f"the engine {question.engine!r} takes tokens: there is nothing to count")
    return WorkerReply(id, tokens=await engine.count(question.request))


_REMEMBERED = 1024  # identities of peers that have gone or were sent away
_MOST_PEERS = 4096


class Worker:
    def __init__(
        self,
        endpoint: str,
        *,
        keys: ClusterKeys | None = None,
        name: str = "",
        pace: HeartbeatConfig = HeartbeatConfig(),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.name = name or f"worker-{uuid4().hex[:12]}"
        self._pace = pace
        self.dismissed = asyncio.Event()
        self.faults = 0  # messages that were none, and peers that were sent away for them
        self._peers: dict[bytes, Peer] = {}
        self._away: OrderedDict[bytes, None] = OrderedDict()
        self._engines: dict[str, HostedEngine] = {}
        self._openings: dict[str, set[Peer]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaited: dict[RunningRequest, asyncio.Future[None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._running = 0
        self._draining = False
        self._twins = RunDeduplicator()
        self._post = PeerSender(
            lambda: self._listener, self._report_losses, self._loop.call_soon, self._loop.call_later, self._forgotten
        )
        self._do: Mapping[type, Callable[[Peer, Any], None]] = {
            AddRequest: self._add_request,
            AddChat: self._add_chat,
            AbortRequest: self._abort,
            PauseRequest: self._hold,
            ResumeRequest: self._go_on,
            Heartbeat: self._beat,
            OpenEngine: self._open,
            CloseEngine: self._close,
            ControlEngine: self._question,
            EmbedTokens: self._question,
            CountTokens: self._question,
            DropClient: self._forget,
            FetchTokenizer: self._question,
            ShutdownWorker: lambda *_: self.dismissed.set(),
            Goodbye: self._goodbye,
            Hello: self._hello_again,
        }
        self._listener = RouterSocket(endpoint, self._heard, keys)
        self._timer = self._loop.call_later(pace.beat_s, self._tick)

    def __repr__(self) -> str:
        return (
            f"<Worker {self.name}: {len(self._engines)} engines, {self._running} running, {len(self._peers)} clients>"
        )

    @property
    def endpoint(self) -> str:
        return self._listener.endpoint

    @property
    def clients(self) -> set[str]:
        return {peer.name for peer in self._peers.values()}

    @property
    def engines(self) -> tuple[HostedEngine, ...]:
        """Those that are open."""
        return tuple(hosted for hosted in self._engines.values() if hosted.engine is not None)

    # --- who speaks -------------------------------------------------------------------------------------------------

    def _heard(self, identity: bytes, data: bytes) -> None:
        if identity in self._away:
            return
        peer = self._peers.get(identity)
        try:
            message = read_for_worker(data)
            if peer is not None:
                peer.pulse.heard()
                self._do[type(message)](peer, message)
            elif isinstance(message, Hello):
                self._greet(identity, message)
            else:
                raise MalformedMessage("a conversation begins with Hello")
        except MalformedMessage as error:
            self._send_away(identity, peer, str(error))

    def _greet(self, identity: bytes, hello: Hello) -> None:
        reason = version_mismatch(hello.version)
        if reason is None and len(self._peers) >= _MOST_PEERS:
            reason = f"{_MOST_PEERS} clients are here already"
        if reason is not None:
            self._send_away(identity, None, reason)
            return
        self._peers[identity] = peer = Peer(identity, hello.name, self._pace.indulgence)
        held = [hosted.held() for hosted in self.engines]
        self._post.send(peer, Welcome(VERSION, self.name, os.getpid(), held, (TOKENIZER_FEATURE,)))

    def _send_away(self, identity: bytes, peer: Peer | None, reason: str) -> None:
        self.faults += 1
        log.warning("a client was sent away: %s", reason)
        stranger = peer or Peer(identity, "", 1)
        self._post.send(stranger, ConnectionRefused(reason))
        self._forgotten(stranger)

    def _forgotten(self, peer: Peer) -> None:
        """The peer is gone: nobody reads what runs for it, and what it may still have said is not heard."""
        peer.gone = True
        self._away[peer.identity] = None
        while len(self._away) > _REMEMBERED:
            self._away.popitem(last=False)
        self._peers.pop(peer.identity, None)
        peer.backlog.clear()
        for running in list(peer.requests.values()):
            running.abort()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._pace.beat_s, self._tick)
        for peer in list(self._peers.values()):
            if peer.pulse.tick():
                log.warning("the client %s fell silent", peer.name)
                self._forgotten(peer)
            else:
                self._post.send(peer, Heartbeat(0))  # that fails at once where its process has gone

    def _hello_again(self, *_: object) -> None:
        raise MalformedMessage("Hello is said once")

    def _goodbye(self, peer: Peer, _: Goodbye) -> None:
        self._forgotten(peer)

    def _beat(self, peer: Peer, beat: Heartbeat) -> None:
        stats = {h.id: h.engine.stats() for h in self._engines.values() if h.engine is not None}
        self._post.send(peer, Heartbeat(beat.number, stats))

    # --- requests ---------------------------------------------------------------------------------------------------

    def _add_request(self, peer: Peer, add: AddRequest) -> None:
        id, prompt = add.request.request_id, to_prompt(add.request)
        self._begin(peer, add.engine, id, "text", lambda e: self._twins.generate(cast(TextEngine, e), prompt))

    def _add_chat(self, peer: Peer, add: AddChat) -> None:
        self._begin(peer, add.engine, add.request_id, "chat", lambda e: cast(ChatEngine, e).chat(add.request))

    def _begin(self, peer: Peer, engine: str, id: int, kind: str, start: Callable[[Engine], Any]) -> None:
        if id in peer.requests:
            raise MalformedMessage(f"the request {id} runs already")
        try:
            hosted, open_ = self._find(engine, kind)
        except ModelyardError as error:
            self._post.add(peer, [failure_update(id, kind, error)])
            return
        running = RunningRequest(id, peer, hosted, self._post.add, self._ended)
        peer.requests[id] = running
        hosted.running += 1
        self._running += 1
        self._idle.clear()
        try:
            running.begin(start(open_))
        except Exception as error:  # an engine that cannot even begin fails this request, not the worker
            running.fail(to_modelyard_error(error))
        if peer.backlog:
            running.hold()

    def _find(self, engine: str, kind: str | None = None) -> tuple[HostedEngine, Engine]:
        hosted = self._engines.get(engine)
        if hosted is None or hosted.engine is None:
            raise Unavailable(f"the worker has no engine {engine!r}", code="engine_gone")
        if kind is not None and self._draining:
            raise _leaving()
        if kind is not None and hosted.kind != kind:
            raise Conflict(f"the engine {engine!r} takes {hosted.kind} requests, not {kind}")
        return hosted, hosted.engine

    def _ended(self, running: RunningRequest) -> None:
        peer, hosted = running.peer, running.hosted
        peer.requests.pop(running.id, None)
        peer.held.discard(running.id)
        hosted.running -= 1
        self._running -= 1
        if (awaited := self._awaited.pop(running, None)) is not None:
            awaited.set_result(None)
        if not self._running:
            self._idle.set()
        if not hosted.running and hosted.engine is not None:
            peer.stats[hosted.id] = hosted.engine.stats()

    def _end_of(self, running: RunningRequest) -> asyncio.Future[None]:
        awaited = self._awaited.get(running) or self._loop.create_future()
        if running.over:
            awaited.set_result(None)
        else:
            self._awaited[running] = awaited
        return awaited

    def _abort(self, peer: Peer, abort: AbortRequest) -> None:
        """One that has ended meanwhile has crossed it on the way."""
        peer.held.discard(abort.request_id)
        if (running := peer.requests.get(abort.request_id)) is not None:
            running.abort()

    def _hold(self, peer: Peer, hold: PauseRequest) -> None:
        if (running := peer.requests.get(hold.request_id)) is not None:
            peer.held.add(hold.request_id)
            running.hold()

    def _go_on(self, peer: Peer, go_on: ResumeRequest) -> None:
        peer.held.discard(go_on.request_id)
        if (running := peer.requests.get(go_on.request_id)) is not None and not peer.backlog:
            running.go_on()

    # --- engines ----------------------------------------------------------------------------------------------------

    def _open(self, peer: Peer, order: OpenEngine) -> None:
        hosted = self._engines.get(order.engine)
        if hosted is None and self._draining:
            self._post.send(peer, EngineOpenFailed(order.engine, _leaving()))
            return
        if hosted is not None and hosted.engine is not None:
            self._post.send(peer, hosted.told())
            return
        self._openings.setdefault(order.engine, set()).add(peer)
        if hosted is None:
            self._engines[order.engine] = hosted = HostedEngine(order, self._lost)
            hosted.opening = self._spawn(self._opening(hosted))

    async def _opening(self, hosted: HostedEngine) -> None:
        def progress(done: float, doing: str) -> None:
            self._tell(self._openings.get(hosted.id, ()), LoadProgress(hosted.id, done, doing))

        try:
            await hosted.open(progress)
            told: LinkMessage = hosted.told()
        except ModelyardError as error:
            self._engines.pop(hosted.id, None)
            told = EngineOpenFailed(hosted.id, error)
        except asyncio.CancelledError:
            given_up = Unavailable("the engine was closed while it opened")
            self._tell(self._openings.pop(hosted.id, ()), EngineOpenFailed(hosted.id, given_up))
            raise
        await asyncio.sleep(0)  # what an engine's thread told of its progress reaches the loop in its next round
        self._tell(self._openings.pop(hosted.id, ()), told)

    def _tell(self, peers: Any, message: LinkMessage) -> None:
        for peer in list(peers):
            self._post.send(peer, message)

    def _report_losses(self) -> None:
        """An engine's death is told before the ends of its requests: else they are tried again with the same engine."""
        for hosted in self.engines:
            if hosted.engine is not None and hosted.engine.lost.done():
                self._lost(hosted, hosted.engine.lost.result())

    def _lost(self, hosted: HostedEngine, error: ModelyardError) -> None:
        if self._engines.pop(hosted.id, None) is None:
            return
        self._tell(self._peers.values(), EngineLost(hosted.id, error))
        self._spawn(hosted.close())

    def _close(self, peer: Peer, close: CloseEngine) -> None:
        self._spawn(self._closing(peer, close.engine))

    async def _closing(self, peer: Peer, engine: str) -> None:
        hosted = self._engines.pop(engine, None)
        if hosted is not None:
            try:
                await hosted.end()
            except Exception:
                log.exception("an engine could not be closed")
        others = [other for other in self._peers.values() if other is not peer]
        if hosted is not None:
            self._tell(others, EngineLost(engine, Unavailable("the engine was closed")))
        self._post.send(peer, EngineClosed(engine))

    # --- orders and questions ---------------------------------------------------------------------------------------

    def _question(self, peer: Peer, question: Question) -> None:
        work = answered(read_question(question), self._find)
        self._answer(peer, question.request_id, work)

    def _forget(self, peer: Peer, forget: DropClient) -> None:
        async def work() -> WorkerReply:
            gone = [other for other in self._peers.values() if other.name == forget.name]
            left = [running for other in gone for running in other.requests.values()]
            for other in gone:
                self._forgotten(other)
            await asyncio.gather(*(self._end_of(running) for running in left))
            return WorkerReply(forget.request_id)

        self._answer(peer, forget.request_id, work())

    def _answer(self, peer: Peer, id: int, work: Coroutine[Any, Any, WorkerReply]) -> None:
        async def answer() -> None:
            try:
                done = await work
            except Exception as error:
                done = WorkerReply(id, to_modelyard_error(error))
            self._post.send(peer, done)

        self._spawn(answer())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- the end ----------------------------------------------------------------------------------------------------

    async def drain(self, grace_s: float) -> bool:
        """Takes nothing new and waits for what runs; True when all of it has ended."""
        self._draining = True
        self._tell(self._peers.values(), Goodbye("it was told to stop"))
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        self._timer.cancel()
        self._draining = True  # whoever still speaks opens nothing any more
        while self._engines:
            await self._engines.popitem()[1].end()
        await asyncio.sleep(0)  # the last words of what ran
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._listener.close()


def _leaving() -> Unavailable:
    return Unavailable("the worker is leaving", code="worker_leaving")
