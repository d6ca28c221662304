"""A worker on another machine, whose network connection can be cut."""

from __future__ import annotations

import asyncio

import pytest

import modelyard_fake as fake
from modelyard.core.engine import CacheInfo, EngineSpec, Tokens
from modelyard.core.errors import Unavailable
from modelyard.core.pool import LeaseRequest
from modelyard.workers.remote_pool import RemotePool
from modelyard.workers.transport import HeartbeatConfig
from tests.engines.reading import end, read
from tests.engines.reading import until as read_until
from tests.workers.harness import DEADLINE_S, prompt
from tests.workers.remote_machine import remote_machine
from tests.workers.split_engine import RemoteMachineEngine

SCRIPT = [{"when": "on", "steps": [{"text": "so far"}, {"hang": True}]}]
SPEC = EngineSpec("demo", fake.Options(echo=True, script=SCRIPT, token_delay=0), {"main": CacheInfo(4096, 2)})


async def stop_reason(pool: RemotePool) -> str:
    """Of a request that waits for a slot as long as necessary."""
    lease = await asyncio.wait_for(pool.request(LeaseRequest(model="demo", cache="main")).lease(), DEADLINE_S)
    try:
        return end(await asyncio.wait_for(read(lease.engine.generate(prompt("Hello."))), DEADLINE_S)).reason
    finally:
        lease.release()


@pytest.mark.cluster
async def test_a_cut_connection_ends_the_streams_and_the_model_is_back_after_it_is_restored() -> None:
    engine = RemoteMachineEngine("fake", SPEC, HeartbeatConfig(interval_s=0.4, worker_misses=5))
    try:
        await engine.open(lambda *_: None)
        pool = engine.pool
        assert await stop_reason(pool) == "stop"
        lease = await asyncio.wait_for(pool.request(LeaseRequest(model="demo", cache="main")).lease(), DEADLINE_S)
        job = lease.engine.generate(prompt("Go on."))
        await read_until(job, Tokens)
        remote_machine().disconnect()
        last = end(await asyncio.wait_for(read(job), DEADLINE_S))
        assert isinstance(last.error, Unavailable)
        assert "silent" in last.error.message, "a cut connection is only noticed by missed heartbeats"
        lease.release()
        waiting = asyncio.create_task(stop_reason(pool))
        remote_machine().reconnect()
        assert await waiting == "stop"
    finally:
        remote_machine().reconnect()
        await engine.close()
