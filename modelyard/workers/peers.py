"""A worker's clients: who they are, what runs for each, and what waits to be sent to them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from modelyard.core.engine import EngineStats, Generation
from modelyard.core.errors import ModelyardError
from modelyard.core.events import Failed
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.workers.messages import (
    ChatEvents,
    Heartbeat,
    LinkMessage,
    RequestFailed,
    RequestUpdate,
    UpdateBatch,
    encode,
    to_update,
)
from modelyard.workers.packing import pack_ids
from modelyard.workers.transport import HeartbeatMonitor, PeerDisconnected, RouterSocket

if TYPE_CHECKING:
    from modelyard.workers.worker import HostedEngine

log = logging.getLogger(__name__)


class RunningRequest:
    """One request in an engine. `ended` is called once, when its slot is free."""

    __slots__ = ("_generation", "_post", "ended", "hosted", "id", "over", "peer")

    def __init__(
        self,
        id: int,
        peer: Peer,
        hosted: HostedEngine,
        post: Callable[[Peer, Sequence[RequestUpdate]], None],
        ended: Callable[[RunningRequest], None],
    ) -> None:
        self.id, self.peer, self.hosted, self.ended = id, peer, hosted, ended
        self._post, self.over = post, False
        self._generation: GenerationQueue[Any] | None = None

    def begin(self, generation: Generation[Any]) -> None:
        if not isinstance(generation, GenerationQueue):
            raise TypeError(f"an engine hands out its jobs as mailboxes, and this is a {type(generation).__name__}")
        self._generation = generation
        self.go_on()

    def _said(self, items: list[Any], last: bool) -> None:
        if last:
            self.over = True
            self.ended(self)
        if self.hosted.kind == "chat":
            self._post(self.peer, [ChatEvents(self.id, items)])
        else:
            self._post(self.peer, [to_update(self.id, chunk, pack_ids) for chunk in items])

    def fail(self, error: ModelyardError) -> None:
        if not self.over:
            self.over = True
            self.ended(self)
            self._post(self.peer, [failure_update(self.id, self.hosted.kind, error)])

    def hold(self) -> None:
        """What comes waits in the engine's own mailbox, which tells the engine when it is full."""
        if self._generation is not None:
            self._generation.forward_to(None)

    def go_on(self) -> None:
        if self._generation is not None and not self.over:
            self._generation.forward_to(self._said)

    def abort(self) -> None:
        """What waited for its reader is let out: nobody will ask for it any more."""
        if self._generation is not None:
            self._generation.cancel()
            self.go_on()


def failure_update(id: int, kind: str, error: ModelyardError) -> RequestUpdate:
    return ChatEvents(id, [Failed(error)]) if kind == "chat" else RequestFailed(id, error)


class Peer:
    """`backlog` is what its socket did not take: while there is any, all that runs for it is held back."""

    def __init__(self, identity: bytes, name: str, allowed: int) -> None:
        self.identity, self.name, self.pulse = identity, name, HeartbeatMonitor(allowed)
        self.requests: dict[int, RunningRequest] = {}
        self.held: set[int] = set()
        self.backlog: deque[bytes] = deque()
        self.items: list[RequestUpdate] = []
        self.stats: dict[str, EngineStats] = {}
        self.gone = False

    def __repr__(self) -> str:
        return f"<Peer {self.name}: {len(self.requests)} running>"


class PeerSender:
    """Everything that leaves a worker. What is made in one turn of the loop leaves as one frame a peer, and what
    `before` sends leaves before it."""

    def __init__(
        self,
        listener: Callable[[], RouterSocket],
        before: Callable[[], None],
        soon: Callable[[Callable[[], None]], object],
        later: Callable[[float, Callable[[], None]], object],
        gone: Callable[[Peer], None],
    ) -> None:
        self._listener, self._before, self._soon, self._later, self._gone = listener, before, soon, later, gone
        self._due: list[Peer] = []

    def add(self, peer: Peer, items: Sequence[RequestUpdate]) -> None:
        if peer.gone:
            return
        if not peer.items:
            if not self._due:
                self._soon(self._flush)
            self._due.append(peer)
        peer.items.extend(items)

    def _flush(self) -> None:
        self._before()
        due, self._due = self._due, []
        for peer in due:
            items, peer.items = peer.items, []
            stats, peer.stats = peer.stats, {}
            if items:
                self.send(peer, UpdateBatch(items, stats))

    def send(self, peer: Peer, message: LinkMessage) -> None:
        """In order, always: where something waits, this waits behind it. A beat does not: what waits tells as much."""
        if peer.gone or (peer.backlog and isinstance(message, Heartbeat)):
            return
        data = encode(message)
        if peer.backlog or not self._sent(peer, data):
            self._wait(peer, data)

    def _sent(self, peer: Peer, data: bytes) -> bool:
        try:
            return self._listener().send(peer.identity, data)
        except PeerDisconnected:
            self._gone(peer)
            return True

    def _wait(self, peer: Peer, data: bytes) -> None:
        if not peer.backlog:
            for running in peer.requests.values():
                running.hold()
            self._later(_AGAIN_S, partial(self._again, peer))
        peer.backlog.append(data)

    def _again(self, peer: Peer) -> None:
        while peer.backlog and not peer.gone:
            if not self._sent(peer, peer.backlog[0]):
                self._later(_AGAIN_S, partial(self._again, peer))
                return
            if peer.backlog:
                peer.backlog.popleft()
        for id, running in list(peer.requests.items()):
            if id not in peer.held:
                running.go_on()


_AGAIN_S = 0.02  # before another look whether a peer reads again
