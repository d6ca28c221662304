"""The nodes and workers that may get the next engine."""

from __future__ import annotations

import asyncio
import errno
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import modelyard_fake as fake
from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec, MemoryEstimate, Node
from modelyard.core.errors import Unavailable
from modelyard.scheduler.memory_planner import MemoryPlanner
from modelyard.scheduler.scheduler import Scheduler
from modelyard.store import MemoryStore
from modelyard.workers.scheduler_server import SchedulerServer
from modelyard.workers.worker_pool import UNKNOWN_NODE, WorkerPool, create_worker_engine, machine_name
from modelyard.workers.worker_process import _register
from modelyard_ray import RayCluster
from tests.workers.harness import DEADLINE_S, DEFINITIONS, LENIENT, ipc_endpoint, running_worker, short_folder, until

REMOTE, OTHER = Node("far", AvailableMemory(100)), Node("farther", AvailableMemory(50))


async def test_the_next_engine_may_go_where_volunteers_have_least_to_do_and_then_here(tmp_path: Path) -> None:
    workers = WorkerPool(tmp_path)
    assert workers.nodes() == (Node(),)
    workers.register("a", "ipc:///a", [], REMOTE)
    workers.register("b", "ipc:///b", [], OTHER)
    workers._registered["a"].used = 1
    assert workers.nodes() == (OTHER, REMOTE, Node())
    workers.unregister("b")
    assert workers.nodes() == (REMOTE, Node())


async def test_a_repeated_registration_updates_the_memory_of_the_node(tmp_path: Path) -> None:
    workers = WorkerPool(tmp_path, launch=False)
    assert workers.register("a", "ipc:///a", [], REMOTE)
    assert not workers.register("a", "ipc:///a", [], Node("far", AvailableMemory(7)))
    assert workers.nodes() == (Node("far", AvailableMemory(7)),)


async def test_a_registered_worker_on_this_machine_belongs_to_the_local_node(tmp_path: Path) -> None:
    workers = WorkerPool(tmp_path, launch=False)
    workers.register("a", "ipc:///a", [], Node(machine_name(), AvailableMemory(1)))
    assert workers.nodes() == (Node(),)


async def test_the_node_is_unknown_without_workers_or_with_a_cluster(tmp_path: Path) -> None:
    assert WorkerPool(tmp_path, launch=False).nodes() == (Node(UNKNOWN_NODE),)
    cluster = RayCluster("auto", {}, None, LENIENT)
    assert WorkerPool(tmp_path, cluster=cluster).nodes() == (Node(UNKNOWN_NODE),)


async def test_a_new_scheduler_does_not_wait_for_workers_that_are_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("modelyard.workers.worker_pool._CONNECT_S", DEADLINE_S)
    folder = short_folder()
    (folder / "dead.address").write_text(f"ipc://{folder}/dead.sock")
    (folder / "dead.engine").write_text("{}")
    async with running_worker() as alive:
        (folder / "idle.address").write_text(alive.endpoint)
        assert await asyncio.wait_for(WorkerPool(folder, launch=False).find_running(), DEADLINE_S / 2) == 0
    assert [file.name for file in folder.iterdir()] == ["idle.address"]


async def test_a_full_disk_is_the_reason_why_no_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = short_folder()

    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("modelyard.workers.worker_pool.write_definition", write)
    with pytest.raises(Unavailable, match="No space left"):
        await WorkerPool(folder).acquire(EngineSpec("m", fake.Options(), backend="fake"))
    assert list(folder.iterdir()) == []


def model_spec(name: str) -> EngineSpec:
    caches = {"main": CacheInfo(4096, 2)}
    return DEFINITIONS.add("fake", EngineSpec(name, fake.Options(token_delay=0), caches, identity=name))


async def test_engines_go_to_nodes_with_enough_memory(tmp_path: Path) -> None:
    """Two workers report nodes with 100 bytes: the second model does not fit beside the first."""
    workers = WorkerPool(tmp_path, heartbeat=LENIENT, launch=False)
    size = lambda *_: MemoryEstimate(weights=60)  # noqa: E731
    planner = MemoryPlanner(available=lambda: AvailableMemory(0), nodes=workers.nodes, estimate=size)
    scheduler = Scheduler(create=partial(create_worker_engine, workers), memory_planner=planner)
    scheduler.reconfigure({name: model_spec(name) for name in ("a", "b")})
    async with running_worker() as one, running_worker() as two:
        workers.register("one", one.endpoint, [], Node("near", AvailableMemory(100)), ("a", "b"))
        workers.register("two", two.endpoint, [], REMOTE, ("a", "b"))
        try:
            for name in ("a", "b"):
                await asyncio.wait_for(asyncio.shield(scheduler.load(name)), DEADLINE_S)
            assert [len(worker.engines) for worker in (one, two)] == [1, 1]
            held = {device.device: device.taken for device in scheduler.snapshot().devices}
            assert held == {"cpu@near": 60, "cpu@far": 60}
        finally:
            await scheduler.close()


async def test_a_registering_worker_reports_the_memory_of_its_machine(tmp_path: Path) -> None:
    workers = WorkerPool(tmp_path, launch=False)
    scheduler = Scheduler(create=partial(create_worker_engine, workers))
    workers._machine = "another"
    server = SchedulerServer(ipc_endpoint(), scheduler, workers, MemoryStore(1, 1, 1), _no_reload, heartbeat=LENIENT)
    try:
        async with running_worker() as worker:
            registering = asyncio.create_task(_register(worker, DEFINITIONS, server.endpoint, None, LENIENT))
            try:
                await until(lambda: workers.nodes()[0].name == machine_name())
            finally:
                registering.cancel()
                await asyncio.gather(registering, return_exceptions=True)
        (node,) = workers.nodes()
        assert node.memory is not None
        assert node.memory.ram_free > 0
    finally:
        await server.close()
        await scheduler.close()


async def _no_reload() -> None:
    pass
