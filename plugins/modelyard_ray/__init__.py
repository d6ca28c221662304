"""Workers as actors of a Ray cluster. Ray places, restarts and loses them; requests and tokens use our own link.

An actor is a worker in a process that Ray has started on some node. The scheduler asks it for its address and talks to
it as to any other worker. When an actor dies, Ray restarts it, on another node if necessary. The scheduler also
requests a new actor, and the next engine of the model opens in whichever answers first. Our own heartbeat detects a
death: Ray takes 16 seconds to notice a lost node. For that long Ray would also place the new actor on the lost node and
wait, so the new one is requested on any other node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any

import msgspec

from modelyard.core.engine import EngineSpec
from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.workers.definitions import FixedDefinitions
from modelyard.workers.settings import RayResources
from modelyard.workers.transport import ClusterKeys, HeartbeatConfig
from modelyard.workers.worker import Worker

log = logging.getLogger(__name__)

_MAX_RESTARTS = 100  # of one actor; after that the scheduler requests another
_START_S = 60.0  # for Ray to start or restart a process
_AVOID_NODE_S = 30.0  # the node of a lost worker; if it is gone, Ray knows that much earlier
_NODE_LABEL = "ray.io/node-id"


class WorkerActor:
    """Runs on a Ray node. The worker is created in the first call, on the loop that Ray gives to async methods.
    `definition` is that of its only engine, as JSON."""

    def __init__(self, definition: bytes, keys: tuple[str, str] | None, interval_s: float, worker_misses: int) -> None:
        self._definitions = FixedDefinitions(msgspec.json.decode(definition, type=EngineSpec))
        self._keys = None if keys is None else ClusterKeys(*keys)
        self._heartbeat = HeartbeatConfig(interval_s, worker_misses)
        self._worker: Worker | None = None

    async def address(self) -> tuple[str, str]:
        """Its endpoint and its node."""
        if self._worker is None:
            host = _ray().util.get_node_ip_address()
            self._worker = Worker(f"tcp://{host}:*", self._definitions, keys=self._keys, heartbeat=self._heartbeat)
        return self._worker.endpoint, str(_ray().get_runtime_context().get_node_id())


class ActorHandle:
    """An actor that we have requested for one engine, and its node when it last answered."""

    __slots__ = ("actor", "definition", "node")

    def __init__(self, actor: Any, definition: bytes) -> None:
        self.actor, self.definition, self.node = actor, definition, ""

    def kill(self, *, restart: bool) -> None:
        _ray().kill(self.actor, no_restart=not restart)


def avoid_nodes_selector(avoid: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """The label selector of a new actor: not on the nodes to avoid, if there are others that could hold it. Pure."""
    avoided = set(avoid)
    return {_NODE_LABEL: f"!in({','.join(sorted(avoided))})"} if avoided and set(others) - avoided else {}


def can_hold(node: Mapping[str, Any], resources: RayResources) -> bool:
    """Whether an actor fits on this node of `ray.nodes()` at all: a head often has no CPUs for actors. Pure."""
    needed = {"CPU": resources.num_cpus, "GPU": resources.num_gpus, "memory": resources.memory or 0, **resources.custom}
    has = node["Resources"]
    return bool(node["Alive"]) and all(has.get(name, 0) >= amount for name, amount in needed.items())


class RayCluster:
    """The actors that this scheduler has requested, by the definition of their engine."""

    def __init__(
        self, address: str, resources: Mapping[str, RayResources], keys: ClusterKeys | None, heartbeat: HeartbeatConfig
    ) -> None:
        self._address, self._resources, self._keys, self._heartbeat = address, resources, keys, heartbeat
        self._idle: dict[bytes, list[ActorHandle]] = {}
        self._avoided: dict[str, float] = {}  # node → until when

    async def open(self) -> None:
        ray = _ray()
        if not ray.is_initialized():
            address = None if self._address in ("local", "ray://local") else self._address
            try:
                await asyncio.to_thread(ray.init, address, log_to_driver=False, logging_level=logging.WARNING)
            except ConnectionError as error:
                raise Unavailable(f"no Ray cluster answers at {self._address}: {error}", code="no_cluster") from error

    async def start(self, definition: EngineSpec) -> tuple[ActorHandle, str]:
        """An actor for this engine, and its endpoint: a restarted or a new one, whichever answers first.

        If a node is lost, Ray notices that only after a while, and we do not wait for it.
        """
        packed = msgspec.json.encode(definition)
        idle = self._idle.get(packed)
        handles = [await self._create(definition.model, packed), *([idle.pop()] if idle else [])]
        loop = asyncio.get_running_loop()
        tasks = {loop.create_task(self._address_of(handle)): handle for handle in handles}
        chosen = None
        try:
            chosen, endpoint = await _first_answer(tasks)
            return chosen, endpoint
        finally:
            for task, handle in tasks.items():
                task.cancel()
                if handle is not chosen:  # free its resources
                    handle.kill(restart=False)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _create(self, model: str, definition: bytes) -> ActorHandle:
        keys = None if self._keys is None else (self._keys.public, self._keys.secret)
        resources = self._resources.get(model, RayResources())
        options = resources.options() | await self._placement_options(resources)
        actor = _ray().remote(WorkerActor).options(max_restarts=_MAX_RESTARTS, max_concurrency=1000, **options)
        started = actor.remote(definition, keys, self._heartbeat.interval_s, self._heartbeat.worker_misses)
        return ActorHandle(started, definition)

    async def _placement_options(self, resources: RayResources) -> dict[str, Any]:
        now = asyncio.get_running_loop().time()
        self._avoided = {node: until for node, until in self._avoided.items() if until > now}
        if not self._avoided:
            return {}
        nodes = await asyncio.to_thread(_ray().nodes)
        able = [str(node["NodeID"]) for node in nodes if can_hold(node, resources)]
        selector = avoid_nodes_selector(self._avoided, able)
        return {"label_selector": selector} if selector else {}

    async def _address_of(self, handle: ActorHandle) -> str:
        """Ask each time: a restarted actor listens on another address."""
        errors = import_module("ray.exceptions")
        deadline = asyncio.get_running_loop().time() + _START_S
        while True:
            try:
                endpoint, handle.node = await asyncio.wait_for(_result(handle.actor.address.remote()), _START_S)
                return str(endpoint)
            except errors.ActorUnavailableError:
                if asyncio.get_running_loop().time() > deadline:
                    raise Unavailable("Ray has not restarted the worker in time") from None
                await asyncio.sleep(0.2)
            except (errors.RayError, TimeoutError) as error:
                raise Unavailable(f"Ray cannot place the worker: {type(error).__name__}: {error}") from error

    def give_back(self, handle: ActorHandle, *, restart: bool) -> None:
        """A worker without an engine. With `restart` it hangs: Ray restarts it for the next engine like this one."""
        handle.kill(restart=restart)
        if restart:
            self._idle.setdefault(handle.definition, []).append(handle)

    def on_lost(self, handle: ActorHandle) -> None:
        """It died and Ray restarts it. The next engine like its own opens there, or on another node."""
        self._idle.setdefault(handle.definition, []).append(handle)
        self._avoided[handle.node] = asyncio.get_running_loop().time() + _AVOID_NODE_S

    async def close(self) -> None:
        for handles in self._idle.values():
            for handle in handles:
                handle.kill(restart=False)


async def _first_answer(tasks: Mapping[asyncio.Task[str], ActorHandle]) -> tuple[ActorHandle, str]:
    """The first actor that answers, with its endpoint; raises if none does."""
    pending = set(tasks)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if task.exception() is None:
                return tasks[task], task.result()
            log.warning("an actor is gone for good: %s", task.exception())
        if not pending:
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
