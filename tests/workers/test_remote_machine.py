"""A worker on another machine, at the end of a cable that can be pulled."""

from __future__ import annotations

import asyncio

import pytest

from modelyard.core.engine import CacheInfo, EngineSpec, Tokens
from modelyard.core.errors import Unavailable
from modelyard.core.lease import LeaseRequest
from modelyard.engines import fake
from modelyard.workers.remote_pool import RemotePool
from modelyard.workers.transport import HeartbeatConfig
from tests.engines.reading import end, read
from tests.engines.reading import until as read_until
from tests.workers.harness import DEADLINE_S, prompt
from tests.workers.remote_machine import machine
from tests.workers.split_engine import FarEngine

SCRIPT = [{"when": "on", "steps": [{"text": "so far"}, {"hang": True}]}]
SPEC = EngineSpec("demo", fake.Options(echo=True, script=SCRIPT, token_delay=0), {"main": CacheInfo(4096, 2)})


async def said(pool: RemotePool) -> str:
    """Of a request that waits as long as it must."""
    lease = await asyncio.wait_for(pool.request(LeaseRequest(model="demo", cache="main")).lease(), DEADLINE_S)
    try:
        return end(await asyncio.wait_for(read(lease.engine.generate(prompt("Hello."))), DEADLINE_S)).reason
    finally:
        lease.release()


@pytest.mark.cluster
async def test_a_pulled_cable_ends_the_streams_and_one_that_is_plugged_in_again_brings_the_model_back() -> None:
    far = FarEngine("fake", SPEC, HeartbeatConfig(interval_s=0.4, worker_misses=5))
    try:
        await far.open(lambda *_: None)
        pool = far.pool
        assert await said(pool) == "stop"
        lease = await asyncio.wait_for(pool.request(LeaseRequest(model="demo", cache="main")).lease(), DEADLINE_S)
        job = lease.engine.generate(prompt("Go on."))
        await read_until(job, Tokens)
        machine().pull_the_cable()
        last = end(await asyncio.wait_for(read(job), DEADLINE_S))
        assert isinstance(last.error, Unavailable)
        assert "silent" in last.error.message, "a pulled cable says nothing: the heartbeat is missed"
        lease.release()
        waiting = asyncio.create_task(said(pool))
        machine().plug_it_in()
        assert await waiting == "stop"
    finally:
        machine().plug_it_in()
        await far.close()
