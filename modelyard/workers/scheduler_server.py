"""What the scheduler's desk does for its callers: demands and orders in the pool's own words, and the shared store."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

import msgspec

from modelyard.core.engine import AvailableMemory, Node
from modelyard.core.errors import InvalidRequest, ModelyardError
from modelyard.core.lease import Lease, LeaseProvider, LeaseRequest, Ticket
from modelyard.core.pool import Pool
from modelyard.core.store import Store
from modelyard.workers.messages import (
    VERSION,
    ConnectionRefused,
    EngineLocation,
    GetSnapshot,
    Goodbye,
    Heartbeat,
    JoinAccepted,
    JoinGateway,
    LeaseDenied,
    LeaseGranted,
    LeaseQueued,
    LeaseRevoked,
    ModelChanged,
    PoolCommand,
    PoolState,
    RegisterWorker,
    ReleaseLease,
    RequestLease,
    SchedulerReply,
    StoreOperation,
    WireLeaseRequest,
    encode,
    read_for_scheduler,
    version_mismatch,
)
from modelyard.workers.packing import MalformedMessage, unpack_ids
from modelyard.workers.peers import Peer, PeerSender
from modelyard.workers.transport import ClusterKeys, HeartbeatConfig, RouterSocket
from modelyard.workers.worker import to_modelyard_error
from modelyard.workers.worker_pool import UNKNOWN_NODE, WorkerEngine, WorkerPool


def from_wire_lease_request(asked: WireLeaseRequest, *, is_retry: bool = False) -> LeaseRequest:
    return LeaseRequest(
        model=asked.model,
        cache=asked.cache,
        tokens=asked.tokens,
        weight=asked.weight,
        key=asked.key,
        session=asked.session,
        priority=asked.priority,
        deadline=asked.deadline,
        trace=asked.trace,
        prompt=unpack_ids(asked.prompt),
        is_retry=asked.is_retry or is_retry,
    )


def lease_of(ticket: Ticket) -> Lease:
    """A ticket that is granted and its lease are one object in our scheduler."""
    lease: Any = ticket
    granted: Lease = lease
    return granted


def engine_of(ticket: Ticket) -> Any:
    try:
        return lease_of(ticket).engine
    except ModelyardError:
        return None


async def run_pool_command(pool: Pool, command: PoolCommand, argument: Any) -> bytes | None:
    """Shielded: the work goes on when the one who asked for it leaves."""
    name = command.model
    if command.verb == "cancel":
        return msgspec.msgpack.encode(pool.cancel(str(argument)))
    orders: dict[str, Callable[[], asyncio.Future[None]]] = {
        "load": lambda: pool.load(name, argument),
        "unload": lambda: pool.unload(name, bool(argument)),
        "drain": lambda: pool.drain(name),
        "scale": lambda: pool.scale(name, _count(argument)),
    }
    await asyncio.shield(orders[command.verb]())
    return None


def _count(argument: Any) -> int:
    if not isinstance(argument, int):
        raise InvalidRequest("the number of replicas is a whole number", param="replicas")
    return argument


async def run_store_operation(store: Store, keep: StoreOperation) -> bytes | None:
    """What the store has; for a deletion, something where there was something."""
    scope, key = (part.decode("utf-8", "surrogatepass") for part in (keep.scope, keep.key))
    if keep.delete:
        return b"\1" if await store.delete(scope, key) else None
    if keep.value is None:
        return await store.get(scope, key)
    await store.put(scope, key, keep.value)
    return None


# The scheduler's desk: gateways ask it for places, administrators' orders reach it, workers offer themselves.
#
# It stands in front of the scheduler and of the shared store, and decides nothing itself. A gateway is known by its name:
# one that comes back keeps the places in which its answers still run and is given no other; one that is gone gives back
# all, as soon as the workers have ended what ran for it.

log = logging.getLogger(__name__)

_REMEMBERED = 1024  # identities of peers that have gone or were sent away
_SOON_S = 0.02  # changes within it are told together


class SchedulerBackend(LeaseProvider, Pool, Protocol):
    """What the desk stands in front of."""

    def metrics(self) -> Mapping[str, Mapping[str, int]]: ...


class GatewayLease(msgspec.Struct):
    """A gateway's place: what it asked for and the ticket that it has here."""

    asked: WireLeaseRequest
    ticket: Ticket
    lease: Lease | None = None


class SchedulerServer:
    def __init__(
        self,
        endpoint: str,
        pool: SchedulerBackend,
        crew: WorkerPool,
        store: Store,
        reload: Callable[[], Awaitable[Any]],
        *,
        keys: ClusterKeys | None = None,
        pace: HeartbeatConfig = HeartbeatConfig(),
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool, self._crew, self._store, self._reload, self._pace = pool, crew, store, reload, pace
        self.faults = self.edition = 0
        self._peers: dict[bytes, Peer] = {}
        self._workers: dict[bytes, Peer] = {}
        self._places: dict[str, dict[int, GatewayLease]] = {}
        self._standing: dict[tuple[str, int], WireLeaseRequest] = {}  # places of old that could not be counted yet
        self._away: OrderedDict[bytes, None] = OrderedDict()
        self._told: bytes = b""
        self._known: set[str] = set()
        self._due: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._post = PeerSender(
            lambda: self._listener, lambda: None, self._loop.call_soon, self._loop.call_later, self._gone
        )
        self._do: Mapping[type, Callable[[Peer, Any], None]] = {
            RequestLease: self._ask,
            ReleaseLease: self._leave,
            PoolCommand: self._command,
            GetSnapshot: self._look,
            StoreOperation: self._keep,
            Heartbeat: self._beat,
            Goodbye: lambda peer, _: self._gone(peer),
        }
        self._listener = RouterSocket(endpoint, self._heard, keys)
        self._timer = self._loop.call_later(pace.beat_s, self._tick)
        self._spawn(self._follow())

    def __repr__(self) -> str:
        return f"<Desk {len(self._peers)} gateways, {len(self._workers)} workers>"

    @property
    def endpoint(self) -> str:
        return self._listener.endpoint

    # --- who speaks -------------------------------------------------------------------------------------------------

    def _heard(self, identity: bytes, data: bytes) -> None:
        if identity in self._away:
            return
        peer = self._peers.get(identity) or self._workers.get(identity)
        try:
            message = read_for_scheduler(data)
            if isinstance(message, RegisterWorker):
                self._enlist(identity, peer, message)
            elif isinstance(message, JoinGateway) and peer is None:
                self._join(identity, message)
            elif peer is not None and type(message) in self._do:
                peer.pulse.heard()
                self._do[type(message)](peer, message)
            else:
                raise MalformedMessage("a conversation begins with Join")
        except MalformedMessage as error:
            self._send_away(peer or Peer(identity, "", 1), str(error))

    def _send_away(self, peer: Peer, reason: str) -> None:
        self.faults += 1
        log.warning("a peer was sent away: %s", reason)
        self._post.send(peer, ConnectionRefused(reason))
        self._gone(peer)

    def _join(self, identity: bytes, join: JoinGateway) -> None:
        peer = Peer(identity, join.name, self._pace.indulgence)
        if (reason := version_mismatch(join.version)) is not None:
            self._send_away(peer, reason)
            return
        for old in [one for one in self._peers.values() if one.name == join.name]:
            old.gone = True
            del self._peers[old.identity]
        self._peers[identity] = peer
        self._take_over(join)
        self._post.send(peer, JoinAccepted(VERSION))
        self._post.send(peer, self._state())

    def _take_over(self, join: JoinGateway) -> None:
        """The places it still uses are its own; what it had asked for otherwise it asks again."""
        had, kept = self._places.get(join.name, {}), dict(join.held)
        for number, counter in list(had.items()):
            if number not in kept:
                counter.ticket.cancel()
                del had[number]
        for number, asked in kept.items():
            if number not in had and not self._seat(join.name, number, asked):
                self._standing[join.name, number] = asked

    def _seat(self, name: str, number: int, asked: WireLeaseRequest) -> bool:
        """A place that another scheduler gave: it counts here from now on, once its engine is up here, too."""
        try:
            ticket = self._pool.request(from_wire_lease_request(asked, is_retry=True))
        except ModelyardError:
            return False
        if ticket.granted:
            self._places.setdefault(name, {})[number] = GatewayLease(asked, ticket)
        else:
            ticket.cancel()
        return ticket.granted

    def _enlist(self, identity: bytes, peer: Peer | None, enlist: RegisterWorker) -> None:
        if (reason := version_mismatch(enlist.version)) is not None:
            self._send_away(Peer(identity, "", 1), reason)
            return
        if peer is None:
            peer = self._workers[identity] = Peer(identity, enlist.name, self._pace.indulgence)
        peer.pulse.heard()
        site = Node(
            enlist.machine or UNKNOWN_NODE, AvailableMemory(enlist.ram_free, enlist.gpus) if enlist.machine else None
        )
        if self._crew.enlist(enlist.name, enlist.endpoint, list(enlist.engines), site):
            log.info("the worker %s at %s has come", enlist.name, enlist.endpoint)
            self._post.send(peer, JoinAccepted(VERSION))

    def _beat(self, peer: Peer, beat: Heartbeat) -> None:
        self._post.send(peer, Heartbeat(beat.number))

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._pace.beat_s, self._tick)
        for peer in [*self._peers.values(), *self._workers.values()]:
            if peer.pulse.tick():
                log.warning("%s fell silent", peer.name)
                self._gone(peer)
            else:
                self._post.send(peer, Heartbeat(0))  # that fails at once where its process has gone
        for (name, number), asked in list(self._standing.items()):
            if self._seat(name, number, asked):
                del self._standing[name, number]
        self._publish()

    def _remember(self, peer: Peer) -> None:
        self._away[peer.identity] = None
        while len(self._away) > _REMEMBERED:
            self._away.popitem(last=False)

    def _gone(self, peer: Peer) -> None:
        """What it may still have said is not heard."""
        peer.gone = True
        self._remember(peer)
        if self._workers.pop(peer.identity, None) is not None:
            self._crew.gone(peer.name)
        if self._peers.pop(peer.identity, None) is not None:
            places = self._places.pop(peer.name, {})
            self._standing = {place: asked for place, asked in self._standing.items() if place[0] != peer.name}
            self._spawn(self._clear(peer.name, list(places.values())))

    async def _clear(self, name: str, places: list[GatewayLease]) -> None:
        """A place is free when nothing runs in it: its worker is asked first."""
        held = {engine_of(counter.ticket) for counter in places if counter.ticket.granted}
        await asyncio.gather(
            *(one.forget(name) for one in held if isinstance(one, WorkerEngine)), return_exceptions=True
        )
        for counter in places:
            counter.ticket.cancel()

    # --- places -----------------------------------------------------------------------------------------------------

    def _ask(self, peer: Peer, ask: RequestLease) -> None:
        if ask.ticket in self._places.setdefault(peer.name, {}):
            raise MalformedMessage(f"the ticket {ask.ticket} is in use")
        if any(engine in self._known for engine in ask.avoid):
            self._spawn(self._doubt(peer, ask))
        else:
            self._request(peer, ask)

    async def _doubt(self, peer: Peer, ask: RequestLease) -> None:
        """The gateway has lost an engine that seems well from here: until it is lost here, too, or has given a sign of
        life after this, since then the gateway has lost no more than its link."""
        deadline = self._loop.time() + self._pace.notice_s
        doubted = [(engine, engine.sign()) for engine in self._placed() if engine.id in ask.avoid]
        while self._loop.time() < deadline and not all(one.lost.done() or lives() for one, lives in doubted):  # noqa: ASYNC110
            await asyncio.sleep(_SOON_S)
        if not peer.gone:
            self._request(peer, ask)

    def _request(self, peer: Peer, ask: RequestLease) -> None:
        try:
            ticket = self._pool.request(from_wire_lease_request(ask.demand))
        except ModelyardError as error:
            self._post.send(peer, LeaseDenied(ask.ticket, error))
            return
        counter = self._places[peer.name][ask.ticket] = GatewayLease(ask.demand, ticket)
        if ticket.granted:
            self._grant(peer, ask.ticket, counter)
        else:
            self._post.send(peer, LeaseQueued(ask.ticket, ticket.position))
            self._spawn(self._wait(peer, ask.ticket, counter))

    async def _wait(self, peer: Peer, number: int, counter: GatewayLease) -> None:
        try:
            await counter.ticket.lease()
        except ModelyardError as error:
            if self._places.get(peer.name, {}).pop(number, None) is not None:
                self._post.send(self._now(peer), LeaseDenied(number, error))
        else:
            if number in self._places.get(peer.name, {}):
                self._grant(self._now(peer), number, counter)

    def _now(self, peer: Peer) -> Peer:
        """The gateway may have come back by another link while it waited; it has asked again there."""
        return next((one for one in self._peers.values() if one.name == peer.name), peer)

    def _grant(self, peer: Peer, number: int, counter: GatewayLease) -> None:
        lease = counter.lease = lease_of(counter.ticket)
        engine = lease.engine
        assert isinstance(engine, WorkerEngine)  # noqa: S101  all blueprints here make these
        if engine.id not in self._known:
            self._publish()  # a gateway must know an engine before it is sent there
        lease.on_revoke(lambda why: self._post.send(self._now(peer), LeaseRevoked(number, why)))
        self._post.send(peer, LeaseGranted(number, engine.endpoint, engine.id, lease.weight, lease.waited))

    def _leave(self, peer: Peer, leave: ReleaseLease) -> None:
        self._standing.pop((peer.name, leave.ticket), None)
        counter = self._places.get(peer.name, {}).pop(leave.ticket, None)
        if counter is None:
            return
        if leave.spent and counter.lease is not None:
            counter.lease.spend(leave.spent)
        counter.ticket.cancel()

    # --- what is known ----------------------------------------------------------------------------------------------

    def _placed(self) -> list[WorkerEngine]:
        found = (engine for name in self._pool.status() for engine in self._pool.engines(name))
        return [e for e in found if isinstance(e, WorkerEngine) and not e.lost.done()]

    def _engines(self) -> list[EngineLocation]:
        return [engine.at() for engine in self._placed()]

    def _state(self) -> PoolState:
        engines = self._engines()
        self._known = {at.engine for at in engines}
        seen = self._pool.status()
        counts = {name: len(self._pool.engines(name)) for name in seen}
        figures = {name: dict(values) for name, values in self._pool.metrics().items()}
        return PoolState(dict(seen), tuple(engines), counts, figures, self.edition)

    def _publish(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        state = self._state()
        if (data := encode(state)) != self._told:
            self._told = data
            for peer in list(self._peers.values()):
                self._post.send(peer, state)

    async def _follow(self) -> None:
        async for change in self._pool.subscribe():
            for peer in list(self._peers.values()):
                self._post.send(peer, ModelChanged(change))
            if self._due is None:
                self._due = self._loop.call_later(_SOON_S, self._publish)

    # --- orders and questions ---------------------------------------------------------------------------------------

    def _command(self, peer: Peer, command: PoolCommand) -> None:
        try:
            argument = msgspec.json.decode(command.argument)
        except msgspec.DecodeError as error:
            raise MalformedMessage(str(error)) from None
        self._answer(peer, command.id, self._carry_out(command, argument))

    async def _carry_out(self, command: PoolCommand, argument: Any) -> bytes | None:
        if command.verb == "reload":
            await self._reload()
            self.edition += 1
            self._loop.call_later(_SOON_S, self._publish)  # whoever asked for it hears of it first
            return msgspec.msgpack.encode(self.edition)
        told = await run_pool_command(self._pool, command, argument)
        self._publish()
        return told

    def _look(self, peer: Peer, look: GetSnapshot) -> None:
        seen: Any = self._pool.snapshot() if look.what == "snapshot" else self._pool.requests()
        self._post.send(peer, SchedulerReply(look.id, value=msgspec.msgpack.encode(seen)))

    def _keep(self, peer: Peer, keep: StoreOperation) -> None:
        self._answer(peer, keep.id, run_store_operation(self._store, keep))

    def _answer(self, peer: Peer, id: int, work: Coroutine[Any, Any, bytes | None]) -> None:
        async def answer() -> None:
            try:
                told = SchedulerReply(id, value=await work)
            except Exception as error:
                told = SchedulerReply(id, to_modelyard_error(error))
            self._post.send(peer, told)

        self._spawn(answer())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        self._timer.cancel()
        if self._due is not None:
            self._due.cancel()
        for peer in list(self._peers.values()):
            self._post.send(peer, Goodbye("the scheduler ends"))
        await self._listener.close()  # first: whoever is still heard begins something new
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
