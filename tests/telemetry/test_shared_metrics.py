from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from modelyard.telemetry.metrics import Metrics
from modelyard.telemetry.shared_metrics import SharedMetrics
from tests.telemetry.prometheus_text import sample_values
from tests.telemetry.test_metrics import FixedMonitor


def count(metrics: Metrics, requests: int = 1) -> None:
    for _ in range(requests):
        metrics.http_request("/v1/messages", "POST", 200, 0.1)


@asynccontextmanager
async def process(folder: Path, index: int, requests: int, deadline_s: float = 60) -> AsyncIterator[SharedMetrics]:
    """Writes its file when it is asked, and never by itself."""
    metrics = Metrics(FixedMonitor())
    shared = SharedMetrics(folder, index, metrics, write_every_s=3600, deadline_s=deadline_s)
    await shared.open()
    count(metrics, requests)
    try:
        yield shared
    finally:
        await shared.close()


async def total(shared: SharedMetrics) -> float:
    return sum(sample_values(await shared.scrape(), "http_requests_total").values())


async def test_any_scraped_process_answers_for_all(tmp_path: Path) -> None:
    async with process(tmp_path, 0, 3) as a, process(tmp_path, 1, 4) as b:
        assert await total(a) == await total(b) == 7
        count(b._metrics)
        assert await total(a) == 8
        text = await b.scrape()
    assert sample_values(text, "memory_usage_bytes") == {(): 16 << 30}
    assert sample_values(text, "gpu_memory_used_bytes") == {("GPU-1",): 1000}


async def test_concurrent_scrapes_all_get_the_totals(tmp_path: Path) -> None:
    async with process(tmp_path, 0, 3) as a, process(tmp_path, 1, 4) as b:
        assert await asyncio.gather(*(total(each) for each in (a, b, a, b))) == [7] * 4


async def test_a_process_that_exits_orderly_loses_no_count_and_its_place_can_be_taken(tmp_path: Path) -> None:
    async with process(tmp_path, 0, 3) as a:
        async with process(tmp_path, 1, 4):
            pass
        assert await total(a) == 7
        for _ in range(2):
            async with process(tmp_path, 1, 5):
                pass
        assert await total(a) == 17


async def test_a_process_that_does_not_answer_counts_with_what_it_wrote_last(tmp_path: Path) -> None:
    async with process(tmp_path, 0, 3, deadline_s=0.01) as a, process(tmp_path, 1, 4) as late:
        assert await total(late) == 7
        count(late._metrics)
        never = asyncio.Event()

        async def measure() -> None:
            await never.wait()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(late._metrics, "measure_system", measure)
            assert await total(a) == 7
            never.set()
        assert await total(late) == 8


_CHILD = """
import asyncio, sys
from pathlib import Path
from modelyard.telemetry.metrics import Metrics
from modelyard.telemetry.shared_metrics import SharedMetrics
async def main():
    metrics = Metrics()
    shared = SharedMetrics(Path(sys.argv[1]), 1, metrics)
    await shared.open()
    for _ in range(5):
        metrics.http_request("/v1/messages", "POST", 200, 0.1)
    metrics.active += 1
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_totals_never_decrease_when_a_process_is_killed(tmp_path: Path) -> None:
    async with process(tmp_path, 0, 3) as a:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CHILD, tmp_path, stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        async with asyncio.timeout(60):
            assert await child.stdout.readline() == b"ready\n"
        assert await total(a) == 8
        assert sample_values(await a.scrape(), "active_requests_current") == {(): 1}
        child.kill()
        await child.wait()
        text = await a.scrape()
        assert sum(sample_values(text, "http_requests_total").values()) == 8
        assert sum(sample_values(text, "http_request_duration_seconds_count").values()) == 8
        assert sample_values(text, "active_requests_current") == {(): 0}
        async with process(tmp_path, 1, 2) as b:
            assert await total(b) == 10
