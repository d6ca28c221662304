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
from typing import Any, cast
from uuid import uuid4

from modelyard.core.engine import ChatEngine, Engine, TextEngine
from modelyard.core.errors import Conflict, ModelyardError, Unavailable
from modelyard.workers.hosted import Hosted, fault
from modelyard.workers.link import Keys, Listener
from modelyard.workers.messages import (
    STUDY,
    VERSION,
    AbortRequest,
    AddChat,
    AddRequest,
    Beat,
    Closed,
    CloseEngine,
    Count,
    Dismiss,
    Done,
    Embed,
    Forget,
    Goodbye,
    GoOn,
    Hello,
    Hold,
    Loading,
    Lost,
    Message,
    OpenEngine,
    OpenFailed,
    Order,
    Refused,
    Study,
    Welcome,
    read_for_worker,
    version_fault,
)
from modelyard.workers.packing import Malformed
from modelyard.workers.peers import Peer, Post, Running, last_word
from modelyard.workers.prompts import prompt_of
from modelyard.workers.pulse import Pace
from modelyard.workers.questions import Question, answered, read_question
from modelyard.workers.twins import Twins

log = logging.getLogger(__name__)

_REMEMBERED = 1024  # identities of peers that have gone or were sent away
_MOST_PEERS = 4096


class Worker:
    def __init__(self, endpoint: str, *, keys: Keys | None = None, name: str = "", pace: Pace = Pace()) -> None:
        self._loop = asyncio.get_running_loop()
        self.name = name or f"worker-{uuid4().hex[:12]}"
        self._pace = pace
        self.dismissed = asyncio.Event()
        self.faults = 0  # messages that were none, and peers that were sent away for them
        self._peers: dict[bytes, Peer] = {}
        self._away: OrderedDict[bytes, None] = OrderedDict()
        self._engines: dict[str, Hosted] = {}
        self._openings: dict[str, set[Peer]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._awaited: dict[Running, asyncio.Future[None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._running = 0
        self._draining = False
        self._twins = Twins()
        self._post = Post(
            lambda: self._listener, self._report_losses, self._loop.call_soon, self._loop.call_later, self._forgotten
        )
        self._do: Mapping[type, Callable[[Peer, Any], None]] = {
            AddRequest: self._add_request,
            AddChat: self._add_chat,
            AbortRequest: self._abort,
            Hold: self._hold,
            GoOn: self._go_on,
            Beat: self._beat,
            OpenEngine: self._open,
            CloseEngine: self._close,
            Order: self._question,
            Embed: self._question,
            Count: self._question,
            Forget: self._forget,
            Study: self._question,
            Dismiss: lambda *_: self.dismissed.set(),
            Goodbye: self._goodbye,
            Hello: self._hello_again,
        }
        self._listener = Listener(endpoint, self._heard, keys)
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
    def engines(self) -> tuple[Hosted, ...]:
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
                raise Malformed("a conversation begins with Hello")
        except Malformed as error:
            self._send_away(identity, peer, str(error))

    def _greet(self, identity: bytes, hello: Hello) -> None:
        reason = version_fault(hello.version)
        if reason is None and len(self._peers) >= _MOST_PEERS:
            reason = f"{_MOST_PEERS} clients are here already"
        if reason is not None:
            self._send_away(identity, None, reason)
            return
        self._peers[identity] = peer = Peer(identity, hello.name, self._pace.indulgence)
        held = [hosted.held() for hosted in self.engines]
        self._post.send(peer, Welcome(VERSION, self.name, os.getpid(), held, (STUDY,)))

    def _send_away(self, identity: bytes, peer: Peer | None, reason: str) -> None:
        self.faults += 1
        log.warning("a client was sent away: %s", reason)
        stranger = peer or Peer(identity, "", 1)
        self._post.send(stranger, Refused(reason))
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
                self._post.send(peer, Beat(0))  # that fails at once where its process has gone

    def _hello_again(self, *_: object) -> None:
        raise Malformed("Hello is said once")

    def _goodbye(self, peer: Peer, _: Goodbye) -> None:
        self._forgotten(peer)

    def _beat(self, peer: Peer, beat: Beat) -> None:
        stats = {h.id: h.engine.stats() for h in self._engines.values() if h.engine is not None}
        self._post.send(peer, Beat(beat.number, stats))

    # --- requests ---------------------------------------------------------------------------------------------------

    def _add_request(self, peer: Peer, add: AddRequest) -> None:
        id, prompt = add.request.request_id, prompt_of(add.request)
        self._begin(peer, add.engine, id, "text", lambda e: self._twins.generate(cast(TextEngine, e), prompt))

    def _add_chat(self, peer: Peer, add: AddChat) -> None:
        self._begin(peer, add.engine, add.request_id, "chat", lambda e: cast(ChatEngine, e).chat(add.request))

    def _begin(self, peer: Peer, engine: str, id: int, kind: str, start: Callable[[Engine], Any]) -> None:
        if id in peer.requests:
            raise Malformed(f"the request {id} runs already")
        try:
            hosted, open_ = self._find(engine, kind)
        except ModelyardError as error:
            self._post.add(peer, [last_word(id, kind, error)])
            return
        running = Running(id, peer, hosted, self._post.add, self._ended)
        peer.requests[id] = running
        hosted.running += 1
        self._running += 1
        self._idle.clear()
        try:
            running.begin(start(open_))
        except Exception as error:  # an engine that cannot even begin fails this request, not the worker
            running.fail(fault(error))
        if peer.backlog:
            running.hold()

    def _find(self, engine: str, kind: str | None = None) -> tuple[Hosted, Engine]:
        hosted = self._engines.get(engine)
        if hosted is None or hosted.engine is None:
            raise Unavailable(f"the worker has no engine {engine!r}", code="engine_gone")
        if kind is not None and self._draining:
            raise _leaving()
        if kind is not None and hosted.kind != kind:
            raise Conflict(f"the engine {engine!r} takes {hosted.kind} requests, not {kind}")
        return hosted, hosted.engine

    def _ended(self, running: Running) -> None:
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

    def _end_of(self, running: Running) -> asyncio.Future[None]:
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

    def _hold(self, peer: Peer, hold: Hold) -> None:
        if (running := peer.requests.get(hold.request_id)) is not None:
            peer.held.add(hold.request_id)
            running.hold()

    def _go_on(self, peer: Peer, go_on: GoOn) -> None:
        peer.held.discard(go_on.request_id)
        if (running := peer.requests.get(go_on.request_id)) is not None and not peer.backlog:
            running.go_on()

    # --- engines ----------------------------------------------------------------------------------------------------

    def _open(self, peer: Peer, order: OpenEngine) -> None:
        hosted = self._engines.get(order.engine)
        if hosted is None and self._draining:
            self._post.send(peer, OpenFailed(order.engine, _leaving()))
            return
        if hosted is not None and hosted.engine is not None:
            self._post.send(peer, hosted.told())
            return
        self._openings.setdefault(order.engine, set()).add(peer)
        if hosted is None:
            self._engines[order.engine] = hosted = Hosted(order, self._lost)
            hosted.opening = self._spawn(self._opening(hosted))

    async def _opening(self, hosted: Hosted) -> None:
        def progress(done: float, doing: str) -> None:
            self._tell(self._openings.get(hosted.id, ()), Loading(hosted.id, done, doing))

        try:
            await hosted.open(progress)
            told: Message = hosted.told()
        except ModelyardError as error:
            self._engines.pop(hosted.id, None)
            told = OpenFailed(hosted.id, error)
        except asyncio.CancelledError:
            given_up = Unavailable("the engine was closed while it opened")
            self._tell(self._openings.pop(hosted.id, ()), OpenFailed(hosted.id, given_up))
            raise
        await asyncio.sleep(0)  # what an engine's thread told of its progress reaches the loop in its next round
        self._tell(self._openings.pop(hosted.id, ()), told)

    def _tell(self, peers: Any, message: Message) -> None:
        for peer in list(peers):
            self._post.send(peer, message)

    def _report_losses(self) -> None:
        """An engine's death is told before the ends of its requests: else they are tried again with the same engine."""
        for hosted in self.engines:
            if hosted.engine is not None and hosted.engine.lost.done():
                self._lost(hosted, hosted.engine.lost.result())

    def _lost(self, hosted: Hosted, error: ModelyardError) -> None:
        if self._engines.pop(hosted.id, None) is None:
            return
        self._tell(self._peers.values(), Lost(hosted.id, error))
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
            self._tell(others, Lost(engine, Unavailable("the engine was closed")))
        self._post.send(peer, Closed(engine))

    # --- orders and questions ---------------------------------------------------------------------------------------

    def _question(self, peer: Peer, question: Question) -> None:
        work = answered(read_question(question), self._find)
        self._answer(peer, question.request_id, work)

    def _forget(self, peer: Peer, forget: Forget) -> None:
        async def work() -> Done:
            gone = [other for other in self._peers.values() if other.name == forget.name]
            left = [running for other in gone for running in other.requests.values()]
            for other in gone:
                self._forgotten(other)
            await asyncio.gather(*(self._end_of(running) for running in left))
            return Done(forget.request_id)

        self._answer(peer, forget.request_id, work())

    def _answer(self, peer: Peer, id: int, work: Coroutine[Any, Any, Done]) -> None:
        async def answer() -> None:
            try:
                done = await work
            except Exception as error:
                done = Done(id, fault(error))
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
