from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from modelyard.telemetry.metrics import Metrics
from modelyard.telemetry.metrics_hub import MetricsHub, MetricsPeer
from tests.telemetry.reading import values
from tests.telemetry.test_metrics import StillMachine


@asynccontextmanager
async def _hub() -> AsyncIterator[MetricsHub]:
    hub = MetricsHub(60.0)
    await hub.open()
    try:
        yield hub
    finally:
        await hub.close()


@asynccontextmanager
async def _peer(path: str, requests: int) -> AsyncIterator[MetricsPeer]:
    metrics = Metrics(StillMachine())
    for _ in range(requests):
        metrics.http("/v1/messages", "POST", 200, 0.1)
    peer = MetricsPeer(path, metrics, push_every_s=3600, deadline_s=60)
    await peer.open()
    try:
        yield peer
    finally:
        await peer.close()


async def _requests(peer: MetricsPeer) -> float:
    return sum(values(await peer.scrape(), "http_requests_total").values())


async def test_any_child_that_is_scraped_answers_for_all() -> None:
    async with _hub() as hub, _peer(hub.path, 3) as a, _peer(hub.path, 4) as b:
        assert await _requests(b) >= 4  # by now the hub has heard of b
        assert await _requests(a) == 7
        assert await _requests(b) == 7


async def test_several_scrapes_at_once_all_get_the_whole() -> None:
    async with _hub() as hub, _peer(hub.path, 3) as a, _peer(hub.path, 4) as b:
        await _requests(b)
        await _requests(a)
        assert await asyncio.gather(*(_requests(peer) for peer in (a, b, a, b))) == [7] * 4


async def test_a_child_that_ends_in_peace_loses_no_count() -> None:
    async with _hub() as hub, _peer(hub.path, 3) as a:
        async with _peer(hub.path, 4) as b:
            await _requests(b)
            b._metrics.http("/v1/messages", "POST", 200, 0.1)
        assert await _requests(a) == 8


async def test_without_a_hub_a_child_answers_for_itself_and_knows_that_it_is_alone() -> None:
    async with _peer("/no/such/socket", 3) as peer:
        assert peer.lost.is_set()
        assert await _requests(peer) == 3


async def test_a_hub_that_goes_is_noticed_and_the_child_answers_for_itself() -> None:
    hub = MetricsHub(60.0)
    await hub.open()
    async with _peer(hub.path, 3) as peer:
        assert await _requests(peer) == 3
        await hub.close()
        async with asyncio.timeout(60):
            await peer.lost.wait()
        assert await _requests(peer) == 3


_CHILD = """
import asyncio, sys
from modelyard.telemetry.metrics import Metrics
from modelyard.telemetry.metrics_hub import MetricsPeer
async def main():
    metrics = Metrics()
    peer = MetricsPeer(sys.argv[1], metrics)
    await peer.open()
    for _ in range(5):
        metrics.http("/v1/messages", "POST", 200, 0.1)
    metrics.began()
    await peer.collect()
    print("told", flush=True)
    await peer.lost.wait()
asyncio.run(main())
"""


async def test_totals_never_go_backwards_when_a_child_is_killed() -> None:
    async with _hub() as hub, _peer(hub.path, 3) as peer:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CHILD, hub.path, stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        async with asyncio.timeout(60):
            assert await child.stdout.readline() == b"told\n"
        assert await _requests(peer) == 8
        child.kill()
        await child.wait()
        text = await peer.scrape()
        assert sum(values(text, "http_requests_total").values()) == 8
        assert sum(values(text, "http_request_duration_seconds_count").values()) == 8
        assert values(text, "active_requests_current") == {(): 0}


async def test_a_child_whose_parent_goes_can_tell() -> None:
    async with _hub() as hub:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CHILD, hub.path, stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        assert await child.stdout.readline() == b"told\n"
    async with asyncio.timeout(60):
        assert await child.wait() == 0
