"""The serving side of a link, shared by workers and the scheduler: peers, dispatch, heartbeats, and ordered sending."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

from modelyard.core.errors import Internal, ModelyardError
from modelyard.workers.messages import ConnectionRefused, Goodbye, Heartbeat, LinkMessage, MalformedMessage, encode
from modelyard.workers.transport import ClusterKeys, HeartbeatConfig, HeartbeatMonitor, PeerDisconnected, RouterSocket

log = logging.getLogger(__name__)

_MAX_DROPPED = 1024  # remembered identities of dropped peers
_RETRY_S = 0.02  # before another attempt to send to a peer that does not read


class Peer:
    """One connection. `backlog` holds messages that its socket did not take."""

    def __init__(self, identity: bytes, name: str, max_missed: int) -> None:
        self.identity, self.name, self.heartbeat = identity, name, HeartbeatMonitor(max_missed)
        self.backlog: deque[bytes] = deque()
        self.is_gone = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


P = TypeVar("P", bound=Peer)
Handlers = Mapping[type, Callable[[Any, Any], None]]


class PeerServer(Generic[P]):
    """`decode` reads messages; `handlers` take the peer and a message of their type. A peer is dropped if it sends a
    malformed or unexpected message, is silent for too long, disconnects, or says goodbye. Subclasses override the
    `_on_…` methods."""

    def __init__(
        self,
        endpoint: str,
        decode: Callable[[bytes], LinkMessage],
        handlers: Handlers,
        *,
        keys: ClusterKeys | None,
        heartbeat: HeartbeatConfig,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._decode = decode
        self._handlers: Handlers = {Goodbye: lambda peer, _: self._drop(peer)} | dict(handlers)
        self._heartbeat = heartbeat
        self.faults = 0  # peers that were refused or dropped for a malformed message
        self._peers: dict[bytes, P] = {}
        # What dropped peers still send is ignored. True: the peer does not know yet, so its next message is answered.
        self._dropped: OrderedDict[bytes, bool] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket = RouterSocket(endpoint, self._on_data, keys)
        self._timer = self._loop.call_later(heartbeat.interval_s, self._tick)

    @property
    def endpoint(self) -> str:
        return self._socket.endpoint

    # --- overridden by servers --------------------------------------------------------------------------------------

    def _on_first_message(self, identity: bytes, message: LinkMessage) -> None:
        """The first message of a connection: add a peer, or raise MalformedMessage."""
        raise NotImplementedError

    def _on_dropped(self, peer: P) -> None:
        """The peer was removed."""

    def _on_congested(self, peer: P) -> None:
        """The peer's socket takes nothing more for now."""

    def _on_writable(self, peer: P) -> None:
        """The backlog was sent."""

    def _holds_resources(self, peer: P) -> bool:
        """Whether a silent peer must be dropped. One that holds nothing may stay as long as it is connected: its
        process is stopped, and continues the conversation later."""
        del peer
        return True

    def _on_tick(self) -> None:
        """Called with every heartbeat interval."""

    # --- receiving --------------------------------------------------------------------------------------------------

    def _on_data(self, identity: bytes, data: bytes) -> None:
        if identity in self._dropped:
            if self._dropped[identity]:
                self._dropped[identity] = False
                reason = "this connection was silent for too long and has been dropped: connect again"
                self._send(Peer(identity, "", 1), ConnectionRefused(reason))
            return
        peer = self._peers.get(identity)
        try:
            message = self._decode(data)
            if peer is None:
                self._on_first_message(identity, message)
                return
            peer.heartbeat.reset()
            handler = self._handlers.get(type(message))
            if handler is None:
                raise MalformedMessage(f"{type(message).__name__} is not expected here")
            handler(peer, message)
        except MalformedMessage as error:
            self._refuse(peer or Peer(identity, "", 1), str(error))

    def _refuse(self, peer: Peer, reason: str) -> None:
        self.faults += 1
        log.warning("refusing a peer: %s", reason)
        self._send(peer, ConnectionRefused(reason))
        self._drop(peer)

    def _ignore(self, identity: bytes, *, tell: bool = False) -> None:
        """Ignore what this identity still sends."""
        self._dropped[identity] = tell
        while len(self._dropped) > _MAX_DROPPED:
            self._dropped.popitem(last=False)

    def _drop(self, peer: Peer, *, tell: bool = False) -> None:
        peer.is_gone = True
        peer.backlog.clear()
        self._ignore(peer.identity, tell=tell)
        if (removed := self._peers.pop(peer.identity, None)) is not None:
            self._on_dropped(removed)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._heartbeat.interval_s, self._tick)
        for peer in list(self._peers.values()):
            if peer.heartbeat.tick() and self._holds_resources(peer):
                log.warning("%s is silent: dropping it", peer.name)
                self._drop(peer, tell=True)
            else:
                self._send(peer, Heartbeat(0))  # fails at once if the peer's process is gone
        self._on_tick()

    # --- sending ----------------------------------------------------------------------------------------------------

    def _send(self, peer: Peer, message: LinkMessage) -> None:
        """Messages of a peer stay in order: behind a backlog they wait. Heartbeats are dropped then, because the
        backlog shows as much."""
        if peer.is_gone or (peer.backlog and isinstance(message, Heartbeat)):
            return
        data = encode(message)
        if peer.backlog:
            peer.backlog.append(data)
        elif not self._try_send(peer, data):
            peer.backlog.append(data)
            if (known := self._peers.get(peer.identity)) is not None:
                self._on_congested(known)
            self._loop.call_later(_RETRY_S, partial(self._send_backlog, peer))

    def _send_all(self, peers: Iterable[Peer], message: LinkMessage) -> None:
        for peer in list(peers):
            self._send(peer, message)

    def _try_send(self, peer: Peer, data: bytes) -> bool:
        try:
            return self._socket.send(peer.identity, data)
        except PeerDisconnected:
            self._drop(peer)
            return True

    def _send_backlog(self, peer: Peer) -> None:
        while peer.backlog and not peer.is_gone:
            if not self._try_send(peer, peer.backlog[0]):
                self._loop.call_later(_RETRY_S, partial(self._send_backlog, peer))
                return
            if peer.backlog:  # a dropped peer has none
                peer.backlog.popleft()
        if (known := self._peers.get(peer.identity)) is not None:
            self._on_writable(known)

    # --- calls ------------------------------------------------------------------------------------------------------

    def _reply(
        self, peer: Peer, work: Coroutine[Any, Any, LinkMessage], error_reply: Callable[[ModelyardError], LinkMessage]
    ) -> None:
        """Send the result of `work` when it is done, or its error."""

        async def run() -> None:
            try:
                reply = await work
            except Exception as error:
                reply = error_reply(to_modelyard_error(error))
            self._send(peer, reply)

        self._spawn(run())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _cancel_tasks(self) -> None:
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


def to_modelyard_error(error: BaseException) -> ModelyardError:
    """What a client may see; the details of an unknown error go to the log under an id."""
    if isinstance(error, ModelyardError):
        return error
    internal = Internal(f"the worker failed: {type(error).__name__}: {error}")
    log.error("worker failure (id %s)", internal.id, exc_info=error)
    return internal
