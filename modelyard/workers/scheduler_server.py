"""The scheduler's server: gateways request leases, send admin commands and share a store; workers register themselves.

It forwards to the scheduler and decides nothing itself. A gateway is identified by its name: one that reconnects
keeps the leases of its running requests. A broken connection is not yet the end of a gateway: it may be about to
reconnect, and talks to its workers meanwhile. When they have lost it too, or it does not come back in time, its leases
are released as soon as the workers have ended its requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, Literal, Protocol, cast

import msgspec

from modelyard.core.engine import AvailableMemory, Node
from modelyard.core.errors import InvalidRequest, ModelyardError, Unavailable
from modelyard.core.pool import KeyLimits, Lease, LeaseProvider, LeaseRequest, Pool, Ticket
from modelyard.core.store import ObjectStore, Store
from modelyard.telemetry.log import recent_records
from modelyard.workers import messages as msg
from modelyard.workers.peer_server import Peer, PeerServer
from modelyard.workers.transport import ClusterKeys, HeartbeatConfig
from modelyard.workers.worker_pool import UNKNOWN_NODE, WorkerEngine, WorkerPool

log = logging.getLogger(__name__)

_PUBLISH_DELAY_S = 0.02  # changes within it are published together
_MAX_PAGE = 10_001  # objects
_REJOIN_S = 5.0  # for a gateway that its workers still know to reconnect; it tries every 1.6 s


class SchedulerBackend(LeaseProvider, Pool, Protocol):
    """The scheduler behind the server."""

    def metrics(self) -> Mapping[str, Mapping[str, int]]: ...


LogQuery = tuple[float, int, str, int]  # since, level, request, limit


class SchedulerPeer(Peer):
    """`connection` is the gateway's number of this connection."""

    def __init__(
        self, identity: bytes, name: str, max_missed: int, role: Literal["gateway", "worker"], connection: int = 0
    ) -> None:
        super().__init__(identity, name, max_missed)
        self.role, self.connection = role, connection


def _lease_of(ticket: Ticket) -> Lease:
    """In our scheduler a granted ticket and its lease are the same object."""
    return cast(Lease, ticket)


class SchedulerServer(PeerServer[SchedulerPeer]):
    def __init__(
        self,
        endpoint: str,
        backend: SchedulerBackend,
        workers: WorkerPool,
        store: Store,
        reload: Callable[[], Awaitable[Any]],
        *,
        objects: ObjectStore | None = None,
        limits: Mapping[str, KeyLimits] | None = None,
        describe_models: Callable[[], bytes] = bytes,
        keys: ClusterKeys | None = None,
        heartbeat: HeartbeatConfig = HeartbeatConfig(),
    ) -> None:
        self._backend, self._workers, self._store, self._reload = backend, workers, store, reload
        self._objects, self._describe_models = objects, describe_models
        self.config_version = 0
        self._leases: dict[str, dict[int, Ticket]] = {}  # by the gateway's name and its ticket number
        # Leases of a previous scheduler that cannot be counted yet, because their engine is not ready here.
        self._inherited: dict[tuple[str, int], LeaseRequest] = {}
        self._limits = {"": dict(limits or {})}  # of keys, by gateway; the newest last
        self._published = b""
        self._published_engines: set[str] = set()
        self._publish_timer: asyncio.TimerHandle | None = None
        handlers: dict[type, Callable[[SchedulerPeer, Any], None]] = {
            msg.RequestLease: self._on_request_lease,
            msg.ReleaseLease: self._on_release_lease,
            msg.PoolCommand: self._on_command,
            msg.StoreOperation: self._on_store_operation,
            msg.RegisterWorker: self._on_register_worker,
            msg.Heartbeat: lambda peer, heartbeat: self._send(peer, msg.Heartbeat(heartbeat.number)),
        }
        super().__init__(endpoint, msg.decode_for_scheduler, handlers, keys=keys, heartbeat=heartbeat)
        self._spawn(self._forward_changes())

    def __repr__(self) -> str:
        gateways = len(self._gateways())
        return f"<SchedulerServer {gateways} gateways, {len(self._peers) - gateways} workers>"

    def _gateways(self) -> list[SchedulerPeer]:
        return [peer for peer in self._peers.values() if peer.role == "gateway"]

    # --- peers ------------------------------------------------------------------------------------------------------

    def _on_first_message(self, identity: bytes, message: msg.LinkMessage) -> None:
        if not isinstance(message, (msg.JoinGateway, msg.RegisterWorker)):
            raise msg.MalformedMessage("the first message must be JoinGateway or RegisterWorker")
        misses = self._heartbeat.client_misses
        if (reason := msg.version_mismatch(message.version)) is not None:
            self._refuse(Peer(identity, message.name, misses), reason)
        elif isinstance(message, msg.RegisterWorker):
            self._peers[identity] = peer = SchedulerPeer(identity, message.name, misses, "worker")
            self._on_register_worker(peer, message)
        else:
            self._on_join(SchedulerPeer(identity, message.name, misses, "gateway", message.connection), message)

    def _on_join(self, peer: SchedulerPeer, message: msg.JoinGateway) -> None:
        """The newest connection of a gateway replaces the others. If we were paused, it has tried several times, and
        the messages of connections that it has given up may arrive in any order."""
        for other in [each for each in self._gateways() if each.name == peer.name]:
            if other.connection > peer.connection:
                self._ignore(peer.identity)
                return
            other.is_gone = True
            del self._peers[other.identity]
            self._ignore(other.identity)
        self._peers[peer.identity] = peer
        self._take_over_leases(message)
        self._send(peer, msg.JoinAccepted(msg.VERSION))
        self._send(peer, self._state())

    def _take_over_leases(self, join: msg.JoinGateway) -> None:
        """Keep the leases of its running requests and drop the others: it requests them again."""
        known, held = self._leases.get(join.name, {}), dict(join.leases)
        for number, lease in list(known.items()):
            if number not in held:
                lease.cancel()
                del known[number]
        for number, request in held.items():
            if number not in known and not self._adopt_lease(join.name, number, request):
                self._inherited[join.name, number] = request

    def _adopt_lease(self, gateway: str, number: int, request: LeaseRequest) -> bool:
        """Count a lease that a previous scheduler granted. Fails while its engine is not ready here."""
        try:
            ticket = self._backend.request(msgspec.structs.replace(request, is_retry=True, deadline=None))
        except ModelyardError:
            return False
        if ticket.granted:
            self._leases.setdefault(gateway, {})[number] = ticket
        else:
            ticket.cancel()
        return ticket.granted

    def _on_register_worker(self, peer: SchedulerPeer, message: msg.RegisterWorker) -> None:
        memory = AvailableMemory(message.ram_free, message.gpus) if message.node else None
        node = Node(message.node or UNKNOWN_NODE, memory)
        if self._workers.register(message.name, message.endpoint, list(message.engines), node, message.models):
            log.info("the worker %s at %s has registered", message.name, message.endpoint)
            self._send(peer, msg.JoinAccepted(msg.VERSION))

    def _on_tick(self) -> None:
        for (gateway, number), request in list(self._inherited.items()):
            if self._adopt_lease(gateway, number, request):
                del self._inherited[gateway, number]
        self._publish()

    def _on_dropped(self, peer: SchedulerPeer) -> None:
        if peer.role == "worker":
            self._workers.unregister(peer.name)
            return
        self._spawn(self._release_unless_rejoined(peer.name))

    async def _release_unless_rejoined(self, gateway: str) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REJOIN_S):
                while not self._has_joined(gateway) and await self._is_at_workers(gateway):  # noqa: ASYNC110
                    await asyncio.sleep(self._heartbeat.interval_s)
        if self._has_joined(gateway):
            return
        self._limits.pop(gateway, None)
        leases = list(self._leases.pop(gateway, {}).values())
        self._inherited = {key: request for key, request in self._inherited.items() if key[0] != gateway}
        # A slot is free when nothing runs in it: the workers must end the gateway's requests first.
        drops = (engine.drop_client(gateway) for engine in _engines_of(leases))
        await asyncio.gather(*drops, return_exceptions=True)
        for held in leases:
            held.cancel()

    def _has_joined(self, gateway: str) -> bool:
        return any(peer.name == gateway for peer in self._gateways())

    async def _is_at_workers(self, gateway: str) -> bool:
        engines = _engines_of(self._leases.get(gateway, {}).values())
        return any(await asyncio.gather(*(engine.has_client(gateway) for engine in engines)))

    # --- leases -----------------------------------------------------------------------------------------------------

    def _on_request_lease(self, peer: SchedulerPeer, message: msg.RequestLease) -> None:
        if message.ticket in self._leases.setdefault(peer.name, {}):
            raise msg.MalformedMessage(f"the ticket {message.ticket} is in use")
        if any(engine in self._published_engines for engine in message.avoid):
            self._spawn(self._verify_engines(peer, message))
        else:
            self._request_lease(peer, message)

    async def _verify_engines(self, peer: SchedulerPeer, message: msg.RequestLease) -> None:
        """The gateway has lost an engine that seems alive from here. Wait until it is lost here too, or its worker has
        given a sign of life; then the gateway has only lost its link."""
        deadline = self._loop.time() + self._heartbeat.detection_s
        doubted = [(engine, engine.liveness_check()) for engine in self._engines() if engine.id in message.avoid]
        while self._loop.time() < deadline and not all(  # noqa: ASYNC110
            engine.lost.done() or is_alive() for engine, is_alive in doubted
        ):
            await asyncio.sleep(_PUBLISH_DELAY_S)
        if not peer.is_gone:
            self._request_lease(peer, message)

    def _request_lease(self, peer: SchedulerPeer, message: msg.RequestLease) -> None:
        try:
            ticket = self._backend.request(msg.with_deadline(message.request))
        except ModelyardError as error:
            self._send(peer, msg.LeaseDenied(message.ticket, error))
            return
        self._leases[peer.name][message.ticket] = ticket
        if ticket.granted:
            self._grant(peer, message.ticket, ticket)
        else:
            self._send(peer, msg.LeaseQueued(message.ticket, ticket.position))
            self._spawn(self._wait_for_grant(peer, message.ticket, ticket))

    async def _wait_for_grant(self, peer: SchedulerPeer, number: int, ticket: Ticket) -> None:
        try:
            await ticket.lease()
        except ModelyardError as error:
            if self._leases.get(peer.name, {}).pop(number, None) is not None:
                self._send(self._current(peer), msg.LeaseDenied(number, error))
        else:
            if number in self._leases.get(peer.name, {}):
                self._grant(self._current(peer), number, ticket)

    def _current(self, peer: SchedulerPeer) -> SchedulerPeer:
        """The gateway's current connection: it may have reconnected since."""
        return next((each for each in self._gateways() if each.name == peer.name), peer)

    def _grant(self, peer: SchedulerPeer, number: int, ticket: Ticket) -> None:
        lease = _lease_of(ticket)
        engine: Any = lease.engine
        assert isinstance(engine, WorkerEngine)  # noqa: S101  all model specs here make these
        if engine.id not in self._published_engines:
            self._publish()  # the gateway must know the engine before the grant
        lease.on_revoke(lambda error: self._send(self._current(peer), msg.LeaseRevoked(number, error)))
        self._send(peer, msg.LeaseGranted(number, engine.endpoint, engine.id, lease.weight, lease.waited))

    def _on_release_lease(self, peer: SchedulerPeer, message: msg.ReleaseLease) -> None:
        self._inherited.pop((peer.name, message.ticket), None)
        held = self._leases.get(peer.name, {}).pop(message.ticket, None)
        if held is None:
            return
        if message.spent and held.granted:
            _lease_of(held).spend(message.spent)
        held.cancel()

    # --- state ------------------------------------------------------------------------------------------------------

    def _engines(self) -> list[WorkerEngine]:
        found: list[Any] = [engine for name in self._backend.status() for engine in self._backend.engines(name)]
        return [engine for engine in found if isinstance(engine, WorkerEngine) and not engine.lost.done()]

    def _state(self) -> msg.PoolState:
        locations = tuple(engine.location() for engine in self._engines())
        self._published_engines = {location.engine for location in locations}
        models = dict(self._backend.status())
        replicas = {name: len(self._backend.engines(name)) for name in models}
        metrics = {name: dict(values) for name, values in self._backend.metrics().items()}
        return msg.PoolState(models, locations, replicas, metrics, self.config_version)

    def _publish(self) -> None:
        if self._publish_timer is not None:
            self._publish_timer.cancel()
            self._publish_timer = None
        state = self._state()
        if (data := msg.encode(state)) != self._published:
            self._published = data
            self._send_all(self._gateways(), state)

    async def _forward_changes(self) -> None:
        async for change in self._backend.subscribe():
            self._send_all(self._gateways(), msg.ModelChanged(change))
            if self._publish_timer is None:
                self._publish_timer = self._loop.call_later(_PUBLISH_DELAY_S, self._publish)

    # --- calls ------------------------------------------------------------------------------------------------------

    def _reply_value(self, peer: SchedulerPeer, id: int, work: Coroutine[Any, Any, bytes | None]) -> None:
        async def reply() -> msg.SchedulerReply:
            return msg.SchedulerReply(id, value=await work)

        self._reply(peer, reply(), lambda error: msg.SchedulerReply(id, error))

    def _on_command(self, peer: SchedulerPeer, command: msg.PoolCommand) -> None:
        try:
            argument = msgspec.json.decode(command.argument)
        except msgspec.DecodeError as error:
            raise msg.MalformedMessage(str(error)) from None
        if command.verb == "limits":
            self._set_limits(peer, _converted(argument, dict[str, KeyLimits]))
        elif command.verb == "log":
            argument = _converted(argument, LogQuery)
        self._reply_value(peer, command.id, self._run_command(command, argument))

    def _set_limits(self, peer: SchedulerPeer, limits: dict[str, KeyLimits]) -> None:
        """Each gateway sends the limits of the keys that it knows. The newest ones of a key count."""
        self._limits.pop(peer.name, None)
        self._limits[peer.name] = limits
        self._backend.set_limits({name: one for each in self._limits.values() for name, one in each.items()})

    async def reload(self) -> None:
        """Read the configuration again, and let all gateways do it."""
        await self._reload()
        self.config_version += 1
        self._loop.call_later(_PUBLISH_DELAY_S, self._publish)  # a caller gets its reply first

    async def _run_command(self, command: msg.PoolCommand, argument: Any) -> bytes | None:
        pool, name, value = self._backend, command.model, None
        match command.verb:
            case "snapshot":
                return msgspec.msgpack.encode((pool.snapshot(), pool.requests()))
            case "models":
                return self._describe_models()
            case "log":
                return msgspec.msgpack.encode(recent_records.read(*argument))
            case "reload":
                await self.reload()
                return msgspec.msgpack.encode(self.config_version)
            # Shielded: a command continues when the gateway that sent it disconnects.
            case "load":
                await asyncio.shield(pool.load(name, argument))
            case "unload":
                await asyncio.shield(pool.unload(name, bool(argument)))
            case "drain":
                await asyncio.shield(pool.drain(name))
            case "scale":
                if not isinstance(argument, int):
                    raise InvalidRequest("the number of replicas must be an integer", param="replicas")
                await asyncio.shield(pool.scale(name, argument))
            case "cancel":
                value = msgspec.msgpack.encode(pool.cancel(str(argument)))
        self._publish()
        return value

    def _on_store_operation(self, peer: SchedulerPeer, operation: msg.StoreOperation) -> None:
        store = self._store if operation.store == "responses" else self._objects
        self._reply_value(peer, operation.id, run_store_operation(store, operation))

    async def close(self) -> None:
        self._timer.cancel()
        if self._publish_timer is not None:
            self._publish_timer.cancel()
        self._send_all(self._gateways(), msg.Goodbye("the scheduler is shutting down"))
        await self._socket.close()  # first: a message would start new work
        await self._cancel_tasks()


def _engines_of(leases: Iterable[Ticket]) -> set[WorkerEngine]:
    engines: set[Any] = {_lease_of(held).engine for held in leases if held.granted}
    return {engine for engine in engines if isinstance(engine, WorkerEngine)}


async def run_store_operation(store: Any, operation: msg.StoreOperation) -> bytes | None:
    """The value or the page found; for a deletion or an exchange a non-empty value if it took place."""
    if store is None:
        raise Unavailable("this scheduler keeps no conversations, files and batches", code="store_unusable")
    try:
        scope, key = (name.decode("utf-8", "surrogatepass") for name in (operation.scope, operation.key))
    except UnicodeDecodeError:
        raise InvalidRequest("a scope or key of the store is not UTF-8") from None
    lifetime = {} if operation.store == "responses" else {"ttl_s": operation.ttl_s}
    if operation.verb == "page" and operation.store == "responses":
        raise InvalidRequest("stored responses have no pages")
    match operation.verb:
        case "get":
            found: bytes | None = await store.get(scope, key)
            return found
        case "put":
            await store.put(scope, key, operation.value, **lifetime)
            return None
        case "swap":
            return b"\1" if await store.swap(scope, key, operation.old, operation.value, **lifetime) else None
        case "delete":
            return b"\1" if await store.delete(scope, key) else None
        case "page":
            limit, newest_first = min(operation.limit, _MAX_PAGE), operation.newest_first
            rows = await store.page(scope, after=key, limit=limit, newest_first=newest_first, values=operation.values)
            return msgspec.msgpack.encode([(name.encode("utf-8", "surrogatepass"), value) for name, value in rows])


def _converted(value: Any, type: Any) -> Any:
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        raise msg.MalformedMessage(str(error)) from None
