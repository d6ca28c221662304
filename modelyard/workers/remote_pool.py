"""Questions that a gateway has put to the scheduler, until they are answered or the link to it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from itertools import count
from typing import Any, Protocol

import msgspec

from modelyard.core.engine import Engine
from modelyard.core.errors import Cancelled, ModelyardError, NotFound, Unavailable
from modelyard.core.lease import Lease, LeaseRequest, ModelStatus, RevocableLease
from modelyard.core.pool import ModelSpec, ModelStateChange, Overrides, PoolSnapshot, RequestSnapshot
from modelyard.telemetry.broadcast import ModelChangeBroadcast
from modelyard.workers.client import RemoteChatEngine, RemoteTextEngine, ReportedLoss, WorkerSession, remote_engine
from modelyard.workers.messages import (
    VERSION,
    ConnectionRefused,
    EngineLocation,
    EngineOpened,
    GetSnapshot,
    Goodbye,
    Heartbeat,
    JoinAccepted,
    JoinGateway,
    LeaseDenied,
    LeaseGranted,
    LeaseQueued,
    LeaseRevoked,
    LinkMessage,
    ModelChanged,
    PoolCommand,
    PoolState,
    ReleaseLease,
    RequestLease,
    SchedulerReply,
    StoreOperation,
    WireLeaseRequest,
    WorkerReply,
    encode,
    read_for_gateway,
    version_mismatch,
)
from modelyard.workers.packing import MalformedMessage, pack_ids
from modelyard.workers.transport import ClusterKeys, DealerSocket, HeartbeatConfig, HeartbeatMonitor


class PendingReplies:
    """`send` gets each question under the next number of `number`."""

    def __init__(self, send: Callable[[LinkMessage], None], number: Callable[[], int]) -> None:
        self._send, self._number = send, number
        self._asked: dict[int, asyncio.Future[bytes | None]] = {}

    async def put(self, message: Callable[[int], LinkMessage]) -> bytes | None:
        id = self._number()
        waiting: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._asked[id] = waiting
        self._send(message(id))
        try:
            return await waiting
        finally:
            self._asked.pop(id, None)

    def answered(self, answer: SchedulerReply) -> None:
        if (waiting := self._asked.pop(answer.id, None)) is not None and not waiting.done():
            if answer.error is not None:
                waiting.set_exception(answer.error)
            else:
                waiting.set_result(answer.value)

    def fail(self, error: ModelyardError) -> None:
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # marks it seen: nobody may be waiting
        self._asked.clear()


# A place that a gateway has asked the scheduler for: a ticket while it waits, a lease while it runs.

_BEGINNING = 4096  # tokens of a prompt by which replicas are told apart


class RemoteLeaseOwner(Protocol):
    def left(self, place: RemoteLease) -> None:
        """It is given back, or given up."""
        ...


class RemoteLease(RevocableLease, eq=False):
    _owner: RemoteLeaseOwner
    id: int
    asked: WireLeaseRequest
    _future: asyncio.Future[None]
    weight: int
    waited: float = 0.0
    position: int = 0
    spent: int = 0
    over: bool = False
    found: Engine | None = None
    engine_id: str = ""

    # --- a ticket ---------------------------------------------------------------------------------------------------

    @property
    def granted(self) -> bool:
        return self.found is not None

    @property
    def waits(self) -> bool:
        return self.found is None and not self.over

    def grant(self, engine: Engine, engine_id: str, weight: int, waited: float) -> None:
        self.found, self.engine_id, self.weight, self.waited, self.position = engine, engine_id, weight, waited, 0
        if not self._future.done():
            self._future.set_result(None)

    def refuse(self, error: ModelyardError) -> None:
        self.over, self.position = True, 0
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # marks it seen: the client may have left before reading it

    async def lease(self) -> Lease:
        if self.found is None or self.over:
            await asyncio.shield(self._future)
        return self

    def cancel(self) -> None:
        if not self.over:
            self.over = True
            self._revokers = ()
            self._owner.left(self)
            if self.found is None:
                self.refuse(_given_up())

    # --- a lease ----------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        if self.found is None:
            raise _given_up()
        return self.found

    @property
    def cache(self) -> str:
        return self.asked.cache

    def spend(self, tokens: int) -> None:
        """Told when the place goes back."""
        self.spent += tokens

    release = cancel


def to_wire_lease_request(demand: LeaseRequest, several: bool) -> WireLeaseRequest:
    """A demand as it travels. The prompt's beginning goes along where `several` replicas may know it."""
    return WireLeaseRequest(
        model=demand.model,
        cache=demand.cache,
        tokens=demand.tokens,
        weight=demand.weight,
        key=demand.key,
        session=demand.session,
        priority=demand.priority,
        deadline=demand.deadline,
        trace=demand.trace,
        prompt=pack_ids(demand.prompt[:_BEGINNING]) if several else b"",
        is_retry=demand.is_retry,
    )


def _given_up() -> Cancelled:
    return Cancelled("the request was given up while it waited")


# The scheduler as a gateway sees it: the same seams as one in its own process, over a link that may break and heal.
#
# What the scheduler knows is mirrored here as it changes, so that questions are answered at once. While the link is
# broken answers that run go on, since they speak to their workers directly; who waits is asked for again when it is back,
# and is turned away when that takes too long.

log = logging.getLogger(__name__)

_AVOID_S = 3.0  # the scheduler hears of a lost engine from us for so long


class RemotePool:
    """`Leases` and `Pool` of `core`. `connected` tells whether the scheduler is there now."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        *,
        keys: ClusterKeys | None = None,
        pace: HeartbeatConfig = HeartbeatConfig(),
        timeout_s: float = 30.0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.endpoint, self.name = endpoint, name
        self._keys, self._pace, self._timeout_s = keys, pace, timeout_s
        self.connected = False
        self.state = PoolState({})
        self.on_edition: Callable[[int], None] | None = None  # called when the configuration was read anew elsewhere
        self.on_engine: Callable[[str], None] | None = None  # called with a model's name when an engine of it is new
        self._ids = count(1)
        self._places: dict[int, RemoteLease] = {}
        self._inquiries = PendingReplies(self._send, lambda: next(self._ids))
        self._sessions: dict[str, WorkerSession] = {}
        self._engines: dict[str, RemoteTextEngine | RemoteChatEngine] = {}
        self._ids_of: dict[str, list[str]] = {}  # engines by model
        self._lost: dict[str, float] = {}
        self._snapshot = PoolSnapshot(models={})
        self._requests: tuple[RequestSnapshot, ...] = ()
        self._changes = ModelChangeBroadcast()
        self._first = asyncio.Event()
        self._closed: asyncio.Task[None] | None = None
        self._refusal: ModelyardError | None = None
        self._away_since: float | None = self._loop.time()
        self._tasks: set[asyncio.Task[None]] = set()
        self._hear: Mapping[type, Callable[[Any], None]] = {
            LeaseGranted: self._granted,
            LeaseDenied: self._denied,
            LeaseQueued: self._queued,
            PoolState: self._stated,
            Heartbeat: lambda _: None,
            SchedulerReply: self._inquiries.answered,
            LeaseRevoked: self._revoked,
            ModelChanged: self._changed,
            JoinAccepted: self._joined,
            ConnectionRefused: self._refused,
            Goodbye: lambda _: None,
        }
        self._pulse = HeartbeatMonitor(pace.patience)
        self._dial()
        self._timer = self._loop.call_later(pace.beat_s, self._tick)

    def __repr__(self) -> str:
        return f"<RemotePool {self.endpoint}{'' if self.connected else ', away'}: {len(self._places)} places>"

    async def ready(self, seconds: float) -> None:
        """Waits for the scheduler's first word. Without it the gateway starts, and says that it is not well."""
        waiting = asyncio.ensure_future(self._first.wait())
        try:
            await asyncio.wait({waiting}, timeout=seconds)
        finally:
            waiting.cancel()
        if self._refusal is not None:
            raise self._refusal

    # --- the link ---------------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        """A new conversation: whatever was on its way in the last one is lost."""
        self._dialer = DealerSocket(self.endpoint, self._heard, self._dropped, self._keys)
        held = [(place.id, place.asked) for place in self._places.values() if place.granted]
        self._send(JoinGateway(VERSION, self.name, tuple(held)))
        self._pulse.heard()

    def _dropped(self, why: str) -> None:
        if self.connected:
            log.warning("the scheduler is away: %s", why)
            self._redial()

    def _redial(self) -> None:
        self.connected = False
        self._away_since = self._away_since if self._away_since is not None else self._loop.time()
        self._spawn(self._dialer.close())
        self._inquiries.fail(Unavailable("the scheduler was lost; try again", code="scheduler_lost"))
        self._dial()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._pace.beat_s, self._tick)
        if self._pulse.tick() and self._refusal is None:  # also where our first word was lost with its connection
            if self.connected:
                log.warning("the scheduler is silent")
            self._redial()
        elif self.connected:
            self._send(Heartbeat(self._pulse.number))
        self._turn_away()

    def _turn_away(self) -> None:
        """Who waits for a scheduler that does not come back has waited long enough."""
        if self._away_since is None or self._loop.time() - self._away_since < self._timeout_s:
            return
        for place in [one for one in self._places.values() if one.waits]:
            del self._places[place.id]
            place.refuse(self._absence())

    def _absence(self) -> Unavailable:
        return Unavailable(f"the scheduler at {self.endpoint} is away", code="scheduler_lost")

    def _heard(self, data: bytes) -> None:
        self._pulse.heard()
        try:
            message = read_for_gateway(data)
            self._hear[type(message)](message)
        except MalformedMessage as error:
            log.warning("the scheduler sent what is no message: %s", error)
            self._redial()

    def _joined(self, joined: JoinAccepted) -> None:
        if (fault := version_mismatch(joined.version)) is not None:
            self._refusal = Unavailable(f"the scheduler at {self.endpoint} cannot be used: {fault}")
            self._first.set()
            return
        self.connected, self._away_since = True, None
        for place in self._places.values():
            if place.waits:
                self._ask(place)

    def _refused(self, refused: ConnectionRefused) -> None:
        self._refusal = Unavailable(f"the scheduler refused us: {refused.reason}")
        log.error("%s", self._refusal.message)
        self._first.set()

    def _send(self, message: LinkMessage) -> None:
        self._dialer.send(encode(message))

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- places -----------------------------------------------------------------------------------------------------

    def request(self, demand: LeaseRequest) -> RemoteLease:
        if self._closed is not None:
            raise Unavailable("the server is shutting down", code="shutting_down")
        if self._away_since is not None and self._loop.time() - self._away_since > self._timeout_s:
            raise self._absence()
        number = next(self._ids)
        asked = to_wire_lease_request(demand, self.state.replicas.get(demand.model, 1) > 1)
        place = self._places[number] = RemoteLease(self, number, asked, self._loop.create_future(), asked.weight)
        if self.connected:
            self._ask(place)
        return place

    def _ask(self, place: RemoteLease) -> None:
        now = self._loop.time()
        self._lost = {engine: at for engine, at in self._lost.items() if now - at < _AVOID_S}
        self._send(RequestLease(place.id, place.asked, tuple(self._lost)))

    def left(self, place: RemoteLease) -> None:
        if self._places.pop(place.id, None) is not None:
            self._send(ReleaseLease(place.id, place.spent))

    def _granted(self, granted: LeaseGranted) -> None:
        place = self._places.get(granted.ticket)
        if place is None:
            self._send(ReleaseLease(granted.ticket))  # given up meanwhile: the two have crossed
            return
        engine = self._sound(granted.engine)
        if engine is None:
            del self._places[place.id]
            self._send(ReleaseLease(granted.ticket))
            place.refuse(Unavailable("the scheduler granted an engine that nobody knows", code="engine_gone"))
            return
        place.grant(engine, granted.engine, granted.weight, granted.waited)

    def _sound(self, id: str) -> RemoteTextEngine | RemoteChatEngine | None:
        """It is well, says the scheduler: where our link to it was not, another one is made."""
        at = next((at for at in self.state.engines if at.engine == id), None)
        session = None if at is None else self._sessions.get(at.endpoint)
        if at is not None and session is not None and session.over:
            self._engines[id] = self._reach(at)
            self._lost.pop(id, None)
        return self._engines.get(id)

    def _denied(self, denied: LeaseDenied) -> None:
        if (place := self._places.pop(denied.ticket, None)) is not None:
            place.refuse(denied.error)

    def _queued(self, queued: LeaseQueued) -> None:
        if (place := self._places.get(queued.ticket)) is not None and place.waits:
            place.position = queued.position

    def _revoked(self, revoked: LeaseRevoked) -> None:
        if (place := self._places.get(revoked.ticket)) is not None:
            place.revoke(revoked.error)

    # --- what is known ----------------------------------------------------------------------------------------------

    def _stated(self, state: PoolState) -> None:
        edition, self.state = self.state.edition, state
        there = {at.engine: at for at in state.engines}
        self._ids_of = {model: [at.engine for at in state.engines if at.model == model] for model in state.models}
        for engine in [id for id in self._engines if id not in there]:
            self._spawn(self._engines.pop(engine).close())
        for at in there.values():
            if at.engine not in self._engines or self._engines[at.engine].lost.done():
                self._engines[at.engine] = self._reach(at)
                if self.on_engine is not None:
                    self.on_engine(at.model)
        used = {at.endpoint for at in state.engines}
        for endpoint in [each for each in self._sessions if each not in used]:
            self._retire(endpoint)
        if self._first.is_set() and edition != state.edition and self.on_edition is not None:
            self.on_edition(state.edition)
        self._first.set()

    def _retire(self, endpoint: str) -> None:
        """Of an engine that is not granted any more: answers may still run there."""
        session = self._sessions[endpoint]
        if session.over or session.idle:
            del self._sessions[endpoint]
            self._spawn(session.close())

    def _reach(self, at: EngineLocation) -> RemoteTextEngine | RemoteChatEngine:
        session = self._sessions.get(at.endpoint)
        if session is None or session.over:
            if session is not None:
                self._spawn(session.close())
            within = self._pace.notice_s  # it is ready, says the scheduler: one that does not answer is lost
            session = WorkerSession(at.endpoint, self.name, keys=self._keys, pace=self._pace, meet_s=within)
            self._sessions[at.endpoint] = session
        return remote_engine(
            session,
            EngineOpened(at.engine, at.kind, at.info, at.embeds),
            ReportedLoss(lambda: self.lost(at.engine), self._loop),
        )

    def lost(self, engine: str) -> None:
        """Heard here, at a worker's link; the scheduler may not have noticed yet."""
        self._lost[engine] = self._loop.time()

    def status(self) -> Mapping[str, ModelStatus]:
        return self.state.models

    def metrics(self) -> Mapping[str, Mapping[str, int]]:
        return self.state.figures

    def engine(self, model: str) -> Engine | None:
        for id in self._ids_of.get(model, ()):  # asked several times a request
            if (found := self._engines.get(id)) is not None and not found.lost.done():
                return found
        return None

    def engines(self, name: str) -> tuple[Engine, ...]:
        return tuple(
            e for id in self._ids_of.get(name, ()) if (e := self._engines.get(id)) is not None and not e.lost.done()
        )

    async def tokenizer(self, model: str, have: tuple[str, ...]) -> WorkerReply | None:
        """Of a model whose files only its workers have; None while no engine of it is up."""
        found = next((self._engines[at.engine] for at in self.state.engines if at.model == model), None)
        return None if found is None else await found.study(have)

    def snapshot(self) -> PoolSnapshot:
        return self._snapshot

    def requests(self) -> tuple[RequestSnapshot, ...]:
        return self._requests

    async def refresh(self) -> None:
        """What `snapshot` and `requests` tell is as old as the last call of this."""
        seen, live = await asyncio.gather(self._look("snapshot"), self._look("requests"))
        self._snapshot = msgspec.msgpack.decode(seen, type=PoolSnapshot)
        self._requests = msgspec.msgpack.decode(live, type=tuple[RequestSnapshot, ...])

    async def _look(self, what: Any) -> bytes:
        return await self.question(lambda id: GetSnapshot(id, what)) or b""

    def subscribe(self) -> AsyncIterator[ModelStateChange]:
        return self._changes.subscribe()

    def _changed(self, changed: ModelChanged) -> None:
        self._changes.publish(changed.change)

    # --- orders -----------------------------------------------------------------------------------------------------

    async def question(self, message: Callable[[int], LinkMessage]) -> bytes | None:
        if not self.connected:
            raise self._absence()
        return await self._inquiries.put(message)

    def _order(self, verb: Any, name: str, argument: Any = None) -> asyncio.Future[None]:
        if name not in self.state.models:
            raise NotFound(f"there is no model {name!r}", code="model_not_found")

        async def work() -> None:
            await self.question(lambda id: PoolCommand(id, verb, name, msgspec.json.encode(argument)))
            await self.refresh()

        return asyncio.ensure_future(work())

    def load(self, name: str, overrides: Overrides | None = None) -> asyncio.Future[None]:
        return self._order("load", name, overrides)

    def unload(self, name: str, force: bool = False) -> asyncio.Future[None]:
        return self._order("unload", name, force)

    def drain(self, name: str) -> asyncio.Future[None]:
        return self._order("drain", name)

    def scale(self, name: str, replicas: int) -> asyncio.Future[None]:
        return self._order("scale", name, replicas)

    def cancel(self, trace: str) -> int:
        """Of those whom the last `refresh` has seen."""
        found = sum(1 for one in self._requests if trace and one.trace == trace)
        if found:
            self._spawn(self._cancel(trace))
        return found

    async def _cancel(self, trace: str) -> None:
        await self.question(lambda id: PoolCommand(id, "cancel", argument=msgspec.json.encode(trace)))

    def reconfigure(self, blueprints: Mapping[str, ModelSpec]) -> None:
        """The models are the scheduler's: it reads its own configuration (`reload`)."""
        del blueprints

    async def reload(self) -> None:
        """The scheduler reads its configuration anew, and all other gateways hear of it."""
        edition = msgspec.msgpack.decode(await self.question(lambda id: PoolCommand(id, "reload")) or b"\0", type=int)
        self.state = msgspec.structs.replace(self.state, edition=edition)

    def preload(self, name: str) -> None:
        """The scheduler does that."""
        del name

    # --- the end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Idempotent; whoever asks again waits for the same end, and whoever is cancelled does not break it off."""
        if self._closed is None:
            self._closed = self._loop.create_task(self._end())
        await asyncio.shield(self._closed)

    async def _end(self) -> None:
        self._timer.cancel()
        error = Unavailable("the server is shutting down", code="shutting_down")
        for place in list(self._places.values()):
            place.refuse(error) if place.waits else place.revoke(error)
        self._changes.close()
        self._send(Goodbye())
        await self._dialer.close()  # first: whoever still heard the scheduler would go and meet new workers
        await asyncio.gather(*(session.close() for session in self._sessions.values()))
        self._inquiries.fail(error)
        await asyncio.gather(*self._tasks, return_exceptions=True)  # links that are on their way out: each in a moment


# The memory between requests that all gateways of a scheduler share: it lives with the scheduler.


class RemoteStore:
    """`Store` of `core`. Bounds and scopes are kept where the entries are."""

    def __init__(self, pool: RemotePool) -> None:
        self._pool = pool

    async def get(self, scope: str, key: str) -> bytes | None:
        return await self._pool.question(lambda id: StoreOperation(id, _bytes(scope), _bytes(key)))

    async def put(self, scope: str, key: str, value: bytes) -> None:
        await self._pool.question(lambda id: StoreOperation(id, _bytes(scope), _bytes(key), value))

    async def delete(self, scope: str, key: str) -> bool:
        return (
            await self._pool.question(lambda id: StoreOperation(id, _bytes(scope), _bytes(key), delete=True))
            is not None
        )

    async def close(self) -> None:
        """The link is the pool's to close."""


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
