"""Workers as Ray actors on a cluster of three nodes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import modelyard_fake as fake
from modelyard.core.engine import CacheInfo, EngineSpec, Tokens
from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.core.pool import LeaseRequest
from modelyard.engines import llama_cpp
from modelyard.scheduler.scheduler import Scheduler
from modelyard.store import MemoryStore
from modelyard.workers.remote_pool import RemotePool
from modelyard.workers.scheduler_server import SchedulerServer
from modelyard.workers.settings import RayResources
from modelyard.workers.transport import HeartbeatConfig, generate_keys
from modelyard.workers.worker_pool import WorkerPool, create_worker_engine
from modelyard_ray import RayCluster, avoid_nodes_selector, can_hold
from tests.engines.llama_cpp import helpers as llama_helpers
from tests.engines.reading import end, read
from tests.engines.reading import until as read_until
from tests.workers.harness import ipc_endpoint, prompt, until
from tests.workers.ray_nodes import HEAD, RayNodes, ray_nodes

HEARTBEAT = HeartbeatConfig(interval_s=0.4, worker_misses=10)


def test_resources_become_ray_options() -> None:
    options = RayResources(num_cpus=2.0, num_gpus=0.5, memory=1 << 30, custom={"fast": 1.0}).options()
    assert options == {"num_cpus": 2.0, "num_gpus": 0.5, "memory": 1 << 30, "resources": {"fast": 1.0}}
    assert "memory" not in RayResources().options()


def test_a_new_actor_avoids_the_node_that_was_just_lost() -> None:
    assert avoid_nodes_selector({"b", "a"}, ["a", "b", "c"]) == {"ray.io/node-id": "!in(a,b)"}
    assert avoid_nodes_selector([], ["a", "b"]) == {}
    assert avoid_nodes_selector({"a"}, ["a"]) == {}  # the only node: perhaps only the worker died


def test_a_node_without_the_resources_of_an_actor_is_no_alternative() -> None:
    head = {"NodeID": "head", "Alive": True, "Resources": {"memory": 1e9}}
    worker = {"NodeID": "a", "Alive": True, "Resources": {"CPU": 2.0, "memory": 1e9, "big": 1.0}}
    assert [can_hold(node, RayResources()) for node in (head, worker)] == [False, True]
    assert not can_hold(worker | {"Alive": False}, RayResources())
    assert not can_hold(worker, RayResources(num_gpus=1))
    assert not can_hold(worker, RayResources(memory=2 << 30))
    assert can_hold(worker, RayResources(memory=1 << 20, custom={"big": 1.0}))


async def test_a_missing_ray_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidRequest, match=r"pip install 'modelyard\[ray\]'"):
        await RayCluster("auto", {}, None, HeartbeatConfig()).open()


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    with ray_nodes() as made:
        yield made


@asynccontextmanager
async def gateway(folder: Path, backend: str, spec: EngineSpec) -> AsyncIterator[tuple[RemotePool, Scheduler]]:
    keys = generate_keys()
    cluster = RayCluster(HEAD, {spec.model: RayResources()}, keys, HEARTBEAT)
    await cluster.open()
    workers = WorkerPool(folder / "w", keys=keys, heartbeat=HEARTBEAT, cluster=cluster)
    scheduler = Scheduler(create=lambda made, _: create_worker_engine(workers, made))
    scheduler.reconfigure({spec.model: replace(spec, backend=backend, identity="x", replica_max=2)})
    server = SchedulerServer(
        ipc_endpoint(), scheduler, workers, MemoryStore(1, 1, 1), _no_reload, keys=keys, heartbeat=HEARTBEAT
    )
    pool = RemotePool(server.endpoint, "g", keys=keys, heartbeat=HEARTBEAT)
    try:
        await scheduler.load(spec.model)
        await until(lambda: pool.engine(spec.model) is not None)
        yield pool, scheduler
    finally:
        for part in (pool, server, scheduler, cluster):
            await part.close()


async def _no_reload() -> None:
    pass


async def lease_from(pool: RemotePool, model: str) -> Any:
    return await asyncio.wait_for(pool.request(LeaseRequest(model=model, cache="main")).lease(), 120)


@pytest.mark.cluster
async def test_a_killed_actor_and_a_lost_node_end_only_their_streams(nodes: RayNodes, tmp_path: Path) -> None:
    script = [{"when": "on", "steps": [{"text": "so far"}, {"hang": True}]}]
    spec = EngineSpec("demo", fake.Options(echo=True, script=script, token_delay=0), {"main": CacheInfo(4096, 2)})
    async with gateway(tmp_path, "fake", spec) as (pool, scheduler):
        for kill in (lambda pid: os.kill(pid, signal.SIGKILL), nodes.kill_node_of):
            lease = await lease_from(pool, "demo")
            job = lease.engine.generate(prompt("Go on."))
            await read_until(job, Tokens)
            kill(scheduler.engines("demo")[0].pid)
            last = end(await asyncio.wait_for(read(job), 60))
            assert isinstance(last.error, Unavailable)
            lease.release()
            again = await lease_from(pool, "demo")
            assert end(await read(again.engine.generate(prompt("Hello.")))).reason == "stop"
            again.release()


@pytest.mark.cluster
async def test_a_real_model_runs_in_an_actor(nodes: RayNodes, tmp_path: Path) -> None:
    spec = llama_helpers.spec({"main": CacheInfo(256, 2)})
    async with gateway(tmp_path, "llama_cpp", spec) as (pool, _):
        lease = await lease_from(pool, spec.model)
        assert llama_cpp.ENGINE.holds_weights
        there = await read(lease.engine.generate(llama_helpers.prompt("Hello!")))
        assert end(there).usage.output == 8
        lease.release()
