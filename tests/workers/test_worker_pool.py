"""Who may get the next engine: workers that came by themselves, by their machines, and this one."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec, MemoryEstimate, Node
from modelyard.core.pool import ModelSpec
from modelyard.engines import fake
from modelyard.scheduler.memory_planner import MemoryPlanner
from modelyard.scheduler.scheduler import Scheduler
from modelyard.store.memory import MemoryStore
from modelyard.workers.ray import RayCluster
from modelyard.workers.scheduler_server import SchedulerServer
from modelyard.workers.worker_pool import UNKNOWN_NODE, WorkerPool, create_worker_engine, machine_name
from modelyard.workers.worker_process import _register
from tests.workers.harness import DEADLINE_S, PATIENT, address, until, working

FAR, FARTHER = Node("far", AvailableMemory(100)), Node("farther", AvailableMemory(50))


async def test_the_next_engine_may_go_where_volunteers_have_least_to_do_and_then_here(tmp_path: Path) -> None:
    crew = WorkerPool(tmp_path)
    assert crew.nodes() == (Node(),)
    crew.register("a", "ipc:///a", [], FAR)
    crew.register("b", "ipc:///b", [], FARTHER)
    crew._registered["a"].used = 1
    assert crew.nodes() == (FARTHER, FAR, Node())
    crew.unregister("b")
    assert crew.nodes() == (FAR, Node())


async def test_what_a_worker_says_of_its_machine_is_always_its_last_word(tmp_path: Path) -> None:
    crew = WorkerPool(tmp_path, launch=False)
    assert crew.register("a", "ipc:///a", [], FAR)
    assert not crew.register("a", "ipc:///a", [], Node("far", AvailableMemory(7)))
    assert crew.nodes() == (Node("far", AvailableMemory(7)),)


async def test_a_volunteer_on_this_machine_is_judged_as_this_machine(tmp_path: Path) -> None:
    crew = WorkerPool(tmp_path, launch=False)
    crew.register("a", "ipc:///a", [], Node(machine_name(), AvailableMemory(1)))
    assert crew.nodes() == (Node(),)


async def test_nobody_judges_where_nobody_is_or_where_the_cluster_decides(tmp_path: Path) -> None:
    assert WorkerPool(tmp_path, launch=False).nodes() == (Node(UNKNOWN_NODE),)
    cluster = RayCluster("auto", {}, None, PATIENT)
    assert WorkerPool(tmp_path, cluster=cluster).nodes() == (Node(UNKNOWN_NODE),)


def blueprint(crew: WorkerPool, name: str) -> ModelSpec:
    caches = {"main": CacheInfo(4096, 2)}
    spec = EngineSpec(name, fake.Options(token_delay=0), caches)

    def make(site: str = UNKNOWN_NODE) -> Any:
        return create_worker_engine(crew, "fake", spec, name, site)

    size = lambda _: MemoryEstimate(weights=60)  # noqa: E731
    return ModelSpec(name=name, caches=caches, make=make, make_at=make, identity=name, estimate=size)


async def test_engines_go_to_the_machines_that_have_room_for_them(tmp_path: Path) -> None:
    """Two workers that say they are on machines of 100 bytes: the second model does not fit beside the first."""
    crew = WorkerPool(tmp_path, heartbeat=PATIENT, launch=False)
    scheduler = Scheduler(memory_planner=MemoryPlanner(available=lambda: AvailableMemory(0), nodes=crew.nodes))
    scheduler.reconfigure({name: blueprint(crew, name) for name in ("a", "b")})
    async with working() as one, working() as two:
        crew.register("one", one.endpoint, [], Node("near", AvailableMemory(100)))
        crew.register("two", two.endpoint, [], FAR)
        try:
            for name in ("a", "b"):
                await asyncio.wait_for(asyncio.shield(scheduler.load(name)), DEADLINE_S)
            assert [len(worker.engines) for worker in (one, two)] == [1, 1]
            held = {device.device: device.taken for device in scheduler.snapshot().devices}
            assert held == {"cpu@near": 60, "cpu@far": 60}
        finally:
            await scheduler.close()


async def test_a_worker_that_offers_itself_tells_what_its_machine_has(tmp_path: Path) -> None:
    crew, scheduler = WorkerPool(tmp_path, launch=False), Scheduler()
    crew._machine = "another"
    desk = SchedulerServer(address(), scheduler, crew, MemoryStore(1, 1, 1), _nothing, heartbeat=PATIENT)
    try:
        async with working() as worker:
            offering = asyncio.create_task(_register(worker, desk.endpoint, None, PATIENT))
            try:
                await until(lambda: crew.nodes()[0].name == machine_name())
            finally:
                offering.cancel()
                await asyncio.gather(offering, return_exceptions=True)
        (site,) = crew.nodes()
        assert site.machine is not None
        assert site.machine.ram_free > 0
    finally:
        await desk.close()
        await scheduler.close()


async def _nothing() -> None:
    pass
