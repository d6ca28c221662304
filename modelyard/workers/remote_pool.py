"""The scheduler as a gateway sees it: the interfaces of a local scheduler, over a link that may break and recover.

The scheduler's state is mirrored here as it changes, so that queries are answered at once. While the link is broken,
running requests continue, because they talk to their workers directly. Waiting requests and calls are sent again when
the link is back. When that takes longer than the restart of a scheduler, they are refused, and new ones at once.

    connect ─ JoinGateway ─→ JoinAccepted: connected ─→ silent, broken or refused: disconnected ─→ connect …

No refusal is final: the scheduler may be replaced, or may have taken an old message of ours for a new one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from functools import partial
from itertools import count
from typing import Any, Literal, NamedTuple

import msgspec

from modelyard.core.engine import Engine, EngineSpec
from modelyard.core.errors import Cancelled, ModelyardError, NotFound, Unavailable
from modelyard.core.pool import (
    KeyLimits,
    Lease,
    LeaseRequest,
    ModelStateChange,
    ModelStatus,
    Override,
    Overrides,
    PoolSnapshot,
    RequestSnapshot,
    RevocableLease,
    Ticket,
)
from modelyard.telemetry.broadcast import ModelChangeBroadcast
from modelyard.workers import messages as msg
from modelyard.workers.client import RemoteChatEngine, RemoteTextEngine, WorkerSession, remote_engine
from modelyard.workers.transport import ClusterKeys, DealerSocket, HeartbeatConfig, HeartbeatMonitor

log = logging.getLogger(__name__)

_AVOID_S = 3.0  # a lost engine is reported with every lease request for this long
_RECONNECT_S = 5.0  # the least time that requests wait for a lost scheduler; a supervised one is back in two or three
_AFFINITY_TOKENS = 4096  # tokens of a prompt that the scheduler uses to choose a replica
_RETRY_AFTER_S = 2.0  # for clients that are refused because the scheduler is lost


class RemoteLease(RevocableLease, eq=False):
    """A ticket while it waits at the scheduler, a lease while it runs."""

    _pool: RemotePool
    id: int
    request: LeaseRequest
    _future: asyncio.Future[None]
    weight: int
    waited: float = 0.0
    position: int = 0
    spent: int = 0
    is_finished: bool = False
    granted_engine: Engine | None = None

    # --- Ticket -----------------------------------------------------------------------------------------------------

    @property
    def granted(self) -> bool:
        return self.granted_engine is not None

    @property
    def is_waiting(self) -> bool:
        return self.granted_engine is None and not self.is_finished

    def grant(self, engine: Engine, weight: int, waited: float) -> None:
        self.granted_engine, self.weight, self.waited, self.position = engine, weight, waited, 0
        if not self._future.done():
            self._future.set_result(None)

    def refuse(self, error: ModelyardError) -> None:
        self.is_finished, self.position = True, 0
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # mark it retrieved: the client may have disconnected

    async def lease(self) -> Lease:
        if self.granted_engine is None or self.is_finished:
            await asyncio.shield(self._future)
        return self

    def cancel(self) -> None:
        if not self.is_finished:
            self.is_finished = True
            self._revokers = ()
            self._pool.release(self)
            if self.granted_engine is None:
                self.refuse(_cancelled())

    # --- Lease ------------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        if self.granted_engine is None:
            raise _cancelled()
        return self.granted_engine

    @property
    def cache(self) -> str:
        return self.request.cache

    def spend(self, tokens: int) -> None:
        """Reported to the scheduler with the release."""
        self.spent += tokens

    release = cancel


class PendingCall(NamedTuple):
    """A message whose reply is awaited."""

    message: msg.LinkMessage
    reply: asyncio.Future[bytes | None]


def _cancelled() -> Cancelled:
    return Cancelled("the request was cancelled while it waited")


class RemotePool:
    """`LeaseProvider` and `Pool` of `core`. `is_connected` tells whether the scheduler is reachable now."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        *,
        keys: ClusterKeys | None = None,
        heartbeat: HeartbeatConfig = HeartbeatConfig(),
        timeout_s: float = 30.0,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.endpoint, self.name = endpoint, name
        self._keys, self._heartbeat, self._timeout_s = keys, heartbeat, timeout_s
        self.is_connected = False
        self.state = msg.PoolState({})
        self.on_config_change: Callable[[int], None] | None = None  # another gateway has reloaded the configuration
        self.on_new_engine: Callable[[str], None] | None = None  # called with the model's name
        self._ids = count(1)
        self._leases: dict[int, RemoteLease] = {}
        self._calls: dict[int, PendingCall] = {}
        self._sessions: dict[str, WorkerSession] = {}  # by endpoint
        self._engines: dict[str, RemoteTextEngine | RemoteChatEngine] = {}
        self._engines_by_model: dict[str, list[str]] = {}
        self._lost_engines: dict[str, float] = {}
        self._snapshot = PoolSnapshot(models={})
        self._requests: tuple[RequestSnapshot, ...] = ()
        self._limits: Mapping[str, KeyLimits] | None = None  # of keys, for the scheduler
        self._changes = ModelChangeBroadcast()
        self._answered = asyncio.Event()  # the first state or a refusal has arrived
        self._closing: asyncio.Task[None] | None = None
        self._refusal: ModelyardError | None = None  # the last one since we were connected
        self._is_refused = False  # this connection was
        self._connection = 0  # the number of the current connection
        self._disconnected_since: float | None = self._loop.time()
        self._tasks: set[asyncio.Task[None]] = set()
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            msg.LeaseGranted: self._on_granted,
            msg.LeaseDenied: self._on_denied,
            msg.LeaseQueued: self._on_queued,
            msg.LeaseRevoked: self._on_revoked,
            msg.PoolState: self._on_state,
            msg.ModelChanged: lambda message: self._changes.publish(message.change),
            msg.SchedulerReply: self._on_reply,
            msg.JoinAccepted: self._on_joined,
            msg.ConnectionRefused: self._on_refused,
            msg.Heartbeat: lambda _: None,
            msg.Goodbye: lambda _: None,
        }
        # One less than for workers: `is_connected` is true or false within the detection time; to reconnect is cheap.
        self._monitor = HeartbeatMonitor(max(1, heartbeat.worker_misses - 1))
        self._connect()
        self._timer = self._loop.call_later(heartbeat.interval_s, self._tick)

    def __repr__(self) -> str:
        disconnected = "" if self.is_connected else ", disconnected"
        return f"<RemotePool {self.endpoint}{disconnected}: {len(self._leases)} leases>"

    async def wait_ready(self, seconds: float) -> None:
        """Wait for the scheduler's first state. Without it the gateway starts too, and reports that it is unhealthy."""
        waiting = asyncio.ensure_future(self._answered.wait())
        try:
            await asyncio.wait({waiting}, timeout=seconds)
        finally:
            waiting.cancel()
            self._answered.set()  # a first state that comes later is a change
        if self._refusal is not None:
            raise self._refusal

    # --- the link ---------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Start a new conversation; messages in flight in the last one are lost."""
        self._connection = number = self._connection + 1
        self._is_refused = False
        self._socket = DealerSocket(
            self.endpoint, partial(self._on_data, number), partial(self._on_disconnect, number), self._keys
        )
        held = [(lease.id, lease.request) for lease in self._leases.values() if lease.granted]
        self._send(msg.JoinGateway(msg.VERSION, self.name, tuple(held), number))
        self._monitor.reset()

    def _on_disconnect(self, connection: int, reason: str) -> None:
        if self.is_connected and connection == self._connection:
            log.warning("the scheduler is disconnected: %s", reason)
            self._reconnect()

    def _reconnect(self) -> None:
        self._mark_disconnected()
        self._spawn(self._socket.close())
        self._connect()

    def _mark_disconnected(self) -> None:
        self.is_connected = False
        if self._disconnected_since is None:
            self._disconnected_since = self._loop.time()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._heartbeat.interval_s, self._tick)
        is_silent = self._monitor.tick()
        if is_silent or self._is_refused:  # also if our first message was lost with its connection
            if self.is_connected:
                log.warning("the scheduler is silent: reconnecting")
            self._reconnect()
        elif self.is_connected:
            self._send(msg.Heartbeat(self._monitor.number))
        if self._is_unreachable():
            for lease in [lease for lease in self._leases.values() if lease.is_waiting]:
                del self._leases[lease.id]
                lease.refuse(self._unreachable())
            self._fail_calls(self._unreachable())

    def _is_unreachable(self) -> bool:
        """Whether requests no longer wait for the scheduler. Where a worker may be silent for longer, because the
        machine is slow, a scheduler may take longer to start."""
        since = self._disconnected_since
        patience_s = max(_RECONNECT_S, self._heartbeat.detection_s)
        return since is not None and self._loop.time() - since >= min(self._timeout_s, patience_s)

    def _unreachable(self) -> Unavailable:
        reason = "the scheduler is unreachable; try again" if self._refusal is None else self._refusal.message
        return Unavailable(reason, code="scheduler_lost", retry_after=_RETRY_AFTER_S)

    def _on_data(self, connection: int, data: bytes) -> None:
        if connection != self._connection:
            return  # a socket that is closing
        self._monitor.reset()
        try:
            message = msg.decode_for_gateway(data)
            self._handlers[type(message)](message)
        except msg.MalformedMessage as error:
            log.warning("the scheduler sent a malformed message: %s", error)
            self._reconnect()

    def _on_joined(self, joined: msg.JoinAccepted) -> None:
        if (mismatch := msg.version_mismatch(joined.version)) is not None:
            self._on_refused(msg.ConnectionRefused(mismatch))
            return
        self.is_connected, self._disconnected_since, self._refusal = True, None, None
        for lease in self._leases.values():
            if lease.is_waiting:
                self._send_lease_request(lease)
        for call in self._calls.values():
            self._send(call.message)
        self._send_limits()

    def _on_refused(self, refused: msg.ConnectionRefused) -> None:
        """The next heartbeat connects again."""
        refusal = Unavailable(f"the scheduler refused us: {refused.reason}")
        if refusal != self._refusal:
            log.error("%s", refusal.message)
        self._refusal, self._is_refused = refusal, True
        self._mark_disconnected()
        self._answered.set()

    def _send(self, message: msg.LinkMessage) -> None:
        self._socket.send(msg.encode(message))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- leases -----------------------------------------------------------------------------------------------------

    def request(self, request: LeaseRequest) -> Ticket:
        if self._closing is not None:
            raise _shutting_down()
        if self._is_unreachable():
            raise self._unreachable()
        id = next(self._ids)
        prompt = request.prompt[:_AFFINITY_TOKENS] if self.state.replicas.get(request.model, 1) > 1 else ()
        request = msgspec.structs.replace(request, prompt=prompt)
        lease = self._leases[id] = RemoteLease(self, id, request, self._loop.create_future(), request.weight)
        if self.is_connected:
            self._send_lease_request(lease)
        return lease

    def _send_lease_request(self, lease: RemoteLease) -> None:
        now = self._loop.time()
        self._lost_engines = {engine: since for engine, since in self._lost_engines.items() if now - since < _AVOID_S}
        self._send(msg.RequestLease(lease.id, msg.with_time_left(lease.request), tuple(self._lost_engines)))

    def release(self, lease: RemoteLease) -> None:
        if self._leases.pop(lease.id, None) is not None:
            self._send(msg.ReleaseLease(lease.id, lease.spent))

    def _on_granted(self, granted: msg.LeaseGranted) -> None:
        lease = self._leases.get(granted.ticket)
        if lease is None:  # cancelled while the grant was in flight
            self._send(msg.ReleaseLease(granted.ticket))
            return
        engine = self._usable_engine(granted.engine)
        if engine is None:
            del self._leases[lease.id]
            self._send(msg.ReleaseLease(granted.ticket))
            lease.refuse(Unavailable("the scheduler granted an unknown engine", code="engine_gone"))
            return
        lease.grant(engine, granted.weight, granted.waited)

    def _usable_engine(self, id: str) -> RemoteTextEngine | RemoteChatEngine | None:
        """The scheduler says that it is alive: if only our session with it was lost, make a new one."""
        location = next((each for each in self.state.engines if each.engine == id), None)
        session = None if location is None else self._sessions.get(location.endpoint)
        if location is not None and session is not None and session.is_lost:
            self._engines[id] = self._connect_engine(location)
            self._lost_engines.pop(id, None)
        return self._engines.get(id)

    def _on_denied(self, denied: msg.LeaseDenied) -> None:
        if (lease := self._leases.pop(denied.ticket, None)) is not None:
            lease.refuse(denied.error)

    def _on_queued(self, queued: msg.LeaseQueued) -> None:
        if (lease := self._leases.get(queued.ticket)) is not None and lease.is_waiting:
            lease.position = queued.position

    def _on_revoked(self, revoked: msg.LeaseRevoked) -> None:
        if (lease := self._leases.get(revoked.ticket)) is not None:
            lease.revoke(revoked.error)

    # --- state ------------------------------------------------------------------------------------------------------

    def _on_state(self, state: msg.PoolState) -> None:
        old, self.state = self.state, state
        locations = {location.engine: location for location in state.engines}
        self._engines_by_model = {
            model: [location.engine for location in state.engines if location.model == model] for model in state.models
        }
        for engine in [id for id in self._engines if id not in locations]:
            self._spawn(self._engines.pop(engine).close())
        for id, location in locations.items():
            if id not in self._engines or self._engines[id].lost.done():
                self._engines[id] = self._connect_engine(location)
                if self.on_new_engine is not None:
                    self.on_new_engine(location.model)
        used = {location.endpoint for location in state.engines}
        for endpoint, session in list(self._sessions.items()):
            if endpoint not in used and (session.is_lost or session.is_idle):  # requests may still run there
                del self._sessions[endpoint]
                self._spawn(session.close())
        changed = old.config_version != state.config_version or old.models.keys() != state.models.keys()
        if self._answered.is_set() and changed and self.on_config_change is not None:
            self.on_config_change(state.config_version)
        self._answered.set()

    def _connect_engine(self, location: msg.EngineLocation) -> RemoteTextEngine | RemoteChatEngine:
        session = self._sessions.get(location.endpoint)
        if session is None or session.is_lost:
            if session is not None:
                self._spawn(session.close())
            session = self._sessions[location.endpoint] = WorkerSession(
                location.endpoint,
                self.name,
                keys=self._keys,
                heartbeat=self._heartbeat,
                connect_timeout_s=self._heartbeat.detection_s,  # the worker is ready: if it does not answer, it is lost
            )
        opened = msg.EngineOpened(location.engine, location.kind, location.info, location.embeds)
        return remote_engine(session, opened, on_lost=partial(self._on_engine_lost, location.engine))

    def _on_engine_lost(self, engine: str) -> None:
        """A retry must avoid it: the scheduler may not have noticed yet."""
        self._lost_engines[engine] = self._loop.time()

    def status(self) -> Mapping[str, ModelStatus]:
        return self.state.models

    def metrics(self) -> Mapping[str, Mapping[str, int]]:
        return self.state.metrics

    def engine(self, model: str) -> Engine | None:
        for id in self._engines_by_model.get(model, ()):  # called several times per request
            if (found := self._engines.get(id)) is not None and not found.lost.done():
                return found
        return None

    def engines(self, name: str) -> tuple[Engine, ...]:
        found = (self._engines.get(id) for id in self._engines_by_model.get(name, ()))
        return tuple(engine for engine in found if engine is not None and not engine.lost.done())

    async def fetch_tokenizer(self, model: str, have: tuple[str, ...]) -> msg.WorkerReply | None:
        """The tokenizer of a model whose files only its workers have; None while no engine of it is open."""
        found = next((self._engines[each.engine] for each in self.state.engines if each.model == model), None)
        return None if found is None else await found.fetch_tokenizer(have)

    def snapshot(self) -> PoolSnapshot:
        """As of the last `refresh`."""
        return self._snapshot

    def requests(self) -> tuple[RequestSnapshot, ...]:
        """As of the last `refresh`."""
        return self._requests

    async def refresh(self) -> None:
        found = await self.call(lambda id: msg.PoolCommand(id, "snapshot"))
        kind = tuple[PoolSnapshot, tuple[RequestSnapshot, ...]]
        self._snapshot, self._requests = msgspec.msgpack.decode(found or b"", type=kind)

    async def log_lines(self, since: float, level: int, request: str, limit: int) -> list[dict[str, Any]]:
        """Of the scheduler's process."""
        query = msgspec.json.encode((since, level, request, limit))
        lines = await self.call(lambda id: msg.PoolCommand(id, "log", argument=query))
        return msgspec.msgpack.decode(lines or b"", type=list[dict[str, Any]])

    async def definitions(self) -> bytes:
        """The scheduler's models as its configuration defines them, for `scheduler_models`."""
        return await self.call(lambda id: msg.PoolCommand(id, "models")) or b""

    def subscribe(self) -> AsyncIterator[ModelStateChange]:
        return self._changes.subscribe()

    # --- calls ------------------------------------------------------------------------------------------------------

    async def call(self, message: Callable[[int], msg.LinkMessage]) -> bytes | None:
        """Send a message and wait for the value of its reply. To receive it twice changes nothing: it is sent again
        to a scheduler that was lost."""
        if self._closing is not None:
            raise _shutting_down()
        if self._is_unreachable():
            raise self._unreachable()
        id = next(self._ids)
        call = self._calls[id] = PendingCall(message(id), self._loop.create_future())
        if self.is_connected:
            self._send(call.message)
        try:
            return await call.reply
        finally:
            self._calls.pop(id, None)

    def _on_reply(self, reply: msg.SchedulerReply) -> None:
        if (call := self._calls.pop(reply.id, None)) is not None and not call.reply.done():
            if reply.error is not None:
                call.reply.set_exception(reply.error)
            else:
                call.reply.set_result(reply.value)

    def _fail_calls(self, error: ModelyardError) -> None:
        for call in self._calls.values():
            if not call.reply.done():
                call.reply.set_exception(error)
                call.reply.exception()  # mark it retrieved: it may have no waiter
        self._calls.clear()

    # --- admin operations -------------------------------------------------------------------------------------------

    def _command(
        self, verb: Literal["load", "unload", "drain", "scale"], name: str, argument: Any = None
    ) -> asyncio.Future[None]:
        if name not in self.state.models:
            raise NotFound(f"unknown model {name!r}", code="model_not_found")

        async def run() -> None:
            await self.call(lambda id: msg.PoolCommand(id, verb, name, msgspec.json.encode(argument)))
            await self.refresh()

        return asyncio.ensure_future(run())

    def load(self, name: str, overrides: Overrides | None = None) -> asyncio.Future[None]:
        return self._command("load", name, overrides)

    def unload(self, name: str, force: bool = False) -> asyncio.Future[None]:
        return self._command("unload", name, force)

    def drain(self, name: str) -> asyncio.Future[None]:
        return self._command("drain", name)

    def scale(self, name: str, replicas: int) -> asyncio.Future[None]:
        return self._command("scale", name, replicas)

    def cancel(self, trace: str) -> int:
        """Counts the requests that the last `refresh` has seen."""
        found = sum(1 for request in self._requests if trace and request.trace == trace)
        if found:

            async def run() -> None:
                await self.call(lambda id: msg.PoolCommand(id, "cancel", argument=msgspec.json.encode(trace)))

            self._spawn(run())
        return found

    def reconfigure(self, specs: Mapping[str, EngineSpec], override: Override | None = None) -> None:
        """The scheduler reads its own configuration (`reload`)."""
        del specs, override

    def set_limits(self, limits: Mapping[str, KeyLimits]) -> None:
        """The scheduler applies them, for all gateways. A new scheduler gets them, too."""
        self._limits = limits
        if self.is_connected:
            self._send_limits()

    def _send_limits(self) -> None:
        if self._limits is not None:
            self._send(msg.PoolCommand(next(self._ids), "limits", argument=msgspec.json.encode(self._limits)))

    async def reload(self) -> None:
        """The scheduler reloads its configuration and notifies all other gateways."""
        value = await self.call(lambda id: msg.PoolCommand(id, "reload"))
        self.state = msgspec.structs.replace(
            self.state, config_version=msgspec.msgpack.decode(value or b"\0", type=int)
        )

    def preload(self, name: str) -> None:
        """The scheduler does that."""
        del name

    # --- the end -----------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Idempotent. A second caller waits for the same end; cancelling a caller does not interrupt it."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._timer.cancel()
        error = _shutting_down()
        for lease in list(self._leases.values()):
            lease.refuse(error) if lease.is_waiting else lease.revoke(error)
        self._changes.close()
        self._send(msg.Goodbye())
        await self._socket.close()  # first: a new state would open sessions with new workers
        await asyncio.gather(*(session.close() for session in self._sessions.values()))
        self._fail_calls(error)
        await asyncio.gather(*self._tasks, return_exceptions=True)  # sockets that are closing


def _shutting_down() -> Unavailable:
    return Unavailable("the server is shutting down", code="shutting_down")


class RemoteStore:
    """A store of `core`, kept by the scheduler for all its gateways: a `Store` of responses, or the `ObjectStore`.
    Limits and scopes are enforced there."""

    def __init__(self, pool: RemotePool, store: Literal["responses", "objects"]) -> None:
        self._pool, self._store = pool, store

    async def get(self, scope: str, key: str) -> bytes | None:
        return await self._call("get", scope, key)

    async def put(self, scope: str, key: str, value: bytes, ttl_s: float | None = None) -> None:
        await self._call("put", scope, key, value=value, ttl_s=ttl_s)

    async def swap(self, scope: str, key: str, old: bytes | None, new: bytes, ttl_s: float | None = None) -> bool:
        return await self._call("swap", scope, key, value=new, old=old, ttl_s=ttl_s) is not None

    async def delete(self, scope: str, key: str) -> bool:
        return await self._call("delete", scope, key) is not None

    async def page(
        self, scope: str, *, after: str = "", limit: int = 100, newest_first: bool = False, values: bool = True
    ) -> list[tuple[str, bytes]]:
        found = await self._call("page", scope, after, limit=limit, newest_first=newest_first, values=values)
        rows = msgspec.msgpack.decode(found or b"\x90", type=list[tuple[bytes, bytes]])
        return [(key.decode("utf-8", "surrogatepass"), value) for key, value in rows]

    async def close(self) -> None:
        """The pool closes the link."""

    async def _call(
        self, verb: Literal["get", "put", "swap", "delete", "page"], scope: str, key: str, **fields: Any
    ) -> bytes | None:
        return await self._pool.call(
            lambda id: msg.StoreOperation(id, self._store, verb, _encode(scope), _encode(key), **fields)
        )


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
