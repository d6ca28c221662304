"""Workers as actors of a Ray cluster: Ray places them, starts them again and loses them; tokens still travel our way.

An actor is a worker in a process that Ray has put on some node. The scheduler asks it for its address and speaks to it
as to any other. When it dies Ray starts it anew, on another node where it must; a new one is asked for as well, and the
next engine of its model is opened in whichever is there first. How soon a death is noticed is our own heartbeat's
doing, since Ray takes 16 seconds to miss a node. So long it would put the new one there, too, and wait: it is asked for
anywhere but on the node of the lost one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

from msgspec import Struct, field

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.workers.transport import ClusterKeys, HeartbeatConfig
from modelyard.workers.worker import Worker

log = logging.getLogger(__name__)

_RESTARTS = 100  # of one actor; after that the scheduler asks for another
_ANSWER_S = 60.0  # for a node to start a process, or for Ray to start one again
_SHUNNED_S = 30.0  # the node of a lost worker; if it is gone, Ray knows that long before
_NODE = "ray.io/node-id"  # the label under which Ray tells nodes apart


class ActorResources(Struct, frozen=True):
    """What an actor is promised on its node."""

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    memory: int | None = None
    custom: Mapping[str, float] = field(default_factory=dict)

    def options(self) -> dict[str, Any]:
        told = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "resources": dict(self.custom)}
        return told if self.memory is None else told | {"memory": self.memory}


class WorkerActor:
    """Runs on some node. The worker is made in the first call, on the loop that Ray gives to async methods."""

    def __init__(self, keys: tuple[str, str] | None, beat_s: float, patience: int) -> None:
        self._keys = None if keys is None else ClusterKeys(*keys)
        self._pace = HeartbeatConfig(beat_s, patience)
        self._worker: Worker | None = None

    async def address(self) -> tuple[str, str]:
        """Where it listens, and on which node."""
        if self._worker is None:
            host = _ray().util.get_node_ip_address()
            self._worker = Worker(f"tcp://{host}:*", keys=self._keys, pace=self._pace)
        return self._worker.endpoint, str(_ray().get_runtime_context().get_node_id())


class ActorHandle:
    """An actor that we have asked for, and the node that it was on when it last answered."""

    __slots__ = ("actor", "node")

    def __init__(self, actor: Any) -> None:
        self.actor, self.node = actor, ""

    def kill(self, *, for_good: bool) -> None:
        _ray().kill(self.actor, no_restart=for_good)


def avoid_nodes_selector(shunned: Iterable[str], alive: Iterable[str]) -> dict[str, str]:
    """Labels of the nodes that a new actor may go to: not those that were just lost, while there are others. Pure."""
    avoided = set(shunned)
    return {_NODE: f"!in({','.join(sorted(avoided))})"} if avoided and set(alive) - avoided else {}


class RayCluster:
    """The actors that this scheduler has asked for, by model."""

    def __init__(
        self, address: str, resources: Mapping[str, ActorResources], keys: ClusterKeys | None, pace: HeartbeatConfig
    ) -> None:
        self._address, self._resources, self._keys, self._pace = address, resources, keys, pace
        self._idle: dict[str, list[ActorHandle]] = {}
        self._shunned: dict[str, float] = {}  # node → until when

    async def open(self) -> None:
        ray = _ray()
        if not ray.is_initialized():
            where = None if self._address in ("local", "ray://local") else self._address
            try:
                await asyncio.to_thread(ray.init, where, log_to_driver=False, logging_level=logging.WARNING)
            except ConnectionError as error:
                raise Unavailable(f"no Ray cluster answers at {self._address}: {error}", code="no_cluster") from error

    async def start(self, model: str) -> tuple[ActorHandle, str]:
        """An actor for one engine of this model, and its address: one that Ray has started again, or a new one.

        Whichever is there first: where the node is lost, Ray knows that only after a while, and nobody waits for that.
        """
        idle = self._idle.get(model)
        asked = [await self._new(model), *([idle.pop()] if idle else [])]
        loop = asyncio.get_running_loop()
        asking = {loop.create_task(self._where(posting)): posting for posting in asked}
        chosen = None
        try:
            chosen, endpoint = await _first(asking)
            return chosen, endpoint
        finally:
            for task, posting in asking.items():
                task.cancel()
                if posting is not chosen:  # its place on a node is for others
                    posting.kill(for_good=True)
            await asyncio.gather(*asking, return_exceptions=True)

    async def _new(self, model: str) -> ActorHandle:
        keys = None if self._keys is None else (self._keys.public, self._keys.secret)
        options = self._resources.get(model, ActorResources()).options() | await self._labels()
        made = _ray().remote(WorkerActor).options(max_restarts=_RESTARTS, max_concurrency=1000, **options)
        return ActorHandle(made.remote(keys, self._pace.beat_s, self._pace.patience))

    async def _labels(self) -> dict[str, Any]:
        now = asyncio.get_running_loop().time()
        self._shunned = {node: until for node, until in self._shunned.items() if until > now}
        if not self._shunned:
            return {}
        alive = [str(node["NodeID"]) for node in await asyncio.to_thread(_ray().nodes) if node["Alive"]]
        labels = avoid_nodes_selector(self._shunned, alive)
        return {"label_selector": labels} if labels else {}

    async def _where(self, posting: ActorHandle) -> str:
        """Asked anew each time: an actor that was started again listens elsewhere."""
        errors = import_module("ray.exceptions")
        deadline = asyncio.get_running_loop().time() + _ANSWER_S
        while True:
            try:
                endpoint, posting.node = await asyncio.wait_for(_result(posting.actor.address.remote()), _ANSWER_S)
                return str(endpoint)
            except errors.ActorUnavailableError:
                if asyncio.get_running_loop().time() > deadline:
                    raise Unavailable("Ray has not started the worker again in time") from None
                await asyncio.sleep(0.2)
            except (errors.RayError, TimeoutError) as error:
                raise Unavailable(f"Ray has no place for the worker: {type(error).__name__}: {error}") from error

    def give_back(self, model: str, posting: ActorHandle, *, kill: bool) -> None:
        """A worker without an engine: the next engine of its model may have it, unless it is not wanted any more."""
        posting.kill(for_good=not kill)
        if kill:  # it hangs: Ray starts it anew
            self._idle.setdefault(model, []).append(posting)

    def lost(self, model: str, posting: ActorHandle) -> None:
        """It died: Ray starts it again, and the next engine of its model goes there, or to another node."""
        self._idle.setdefault(model, []).append(posting)
        self._shunned[posting.node] = asyncio.get_running_loop().time() + _SHUNNED_S

    async def close(self) -> None:
        for postings in self._idle.values():
            for posting in postings:
                posting.kill(for_good=True)


async def _first(asking: Mapping[asyncio.Task[str], ActorHandle]) -> tuple[ActorHandle, str]:
    """Who answers first, and with what; raises where nobody can."""
    left = set(asking)
    while True:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.exception() is None:
                return asking[task], task.result()
            log.warning("an actor is gone for good: %s", task.exception())
        if not left:
            raise Unavailable(f"Ray has started no worker: {done.pop().exception()}")


async def _result(reference: Any) -> Any:
    return await reference


def _ray() -> Any:
    try:
        return import_module("ray")
    except ModuleNotFoundError:
        raise InvalidRequest(
            "cluster = \"ray\" needs the Python package ray: install it with pip install 'modelyard[ray]'",
            code="missing_library",
        ) from None
