"""The cost of an open page: differences between the two gateways cancel out, and the whole interval decides."""

from __future__ import annotations

import io
import json
import math
import os

import psutil
import pytest
from rich.console import Console

from bench.servers import Server
from bench.workbench import (
    PageCost,
    PageFeel,
    Pair,
    cpu_per_response,
    crossover_cost,
    difference,
    fill_table,
    judge,
    log_ratio,
    request_body,
    show,
)
from modelyard_bench.statistics import Interval
from tests.live_server import LiveServer, demo_config, live_server


def test_a_constant_difference_between_the_gateways_cancels_out() -> None:
    slow, fast, page = 0.5, 0.3, 0.01
    blocks = [[Pair(slow + page, fast)] * 5, [Pair(fast + page, slow)] * 5]
    found = crossover_cost(blocks, difference)
    assert (found.middle, found.low, found.high) == pytest.approx((page, page, page))


def test_a_lost_share_of_throughput_is_recovered() -> None:
    slow, fast, kept = 3e-4, 2e-4, 0.98
    found = crossover_cost([[Pair(slow / kept, fast)] * 3, [Pair(fast / kept, slow)] * 3] * 2, log_ratio)
    assert 1 - math.exp(-found.middle) == pytest.approx(0.02)


def test_an_outlier_widens_the_interval_instead_of_deciding() -> None:
    steady = [Pair(1.0 + number / 1000, 1.0) for number in range(10)]
    calm = crossover_cost([steady, steady], difference)
    wild = crossover_cost([[*steady, Pair(9.0, 1.0)], [*steady, Pair(1.0, 1.0)]], difference)
    assert wild.low < calm.low <= calm.middle <= calm.high < wild.high
    assert judge(wild, 0.02) == "undecided"


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_block_without_its_counterpart_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="changed sides"):
        crossover_cost([[Pair(1.0, 1.0)]] * count, difference)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-0.01, 0.019, "met"), (0.001, 0.03, "undecided"), (0.02, 0.03, "missed"), (-0.01, 0.02, "undecided")],
)
def test_the_whole_interval_decides(low: float, high: float, verdict: str) -> None:
    assert judge(Interval((low + high) / 2, low, high), 0.02) == verdict


def cost(paced: float, full_load: float) -> PageCost:
    """A page that costs this; the second gateway uses a tenth more all the time."""
    shares = ((Pair(0.1 + paced, 0.11),) * 4, (Pair(0.11 + paced, 0.1),) * 4)
    factor = 1 / (1 - full_load)
    responses = ((Pair(1e-3 * factor, 1.1e-3),) * 4, (Pair(1.1e-3 * factor, 1e-3),) * 4)
    return PageCost(shares, PageFeel(17.0, 50.0, 1000), responses)


@pytest.mark.parametrize(
    ("paced", "full_load", "good"), [(0.015, 0.01, True), (0.025, 0.01, False), (0.015, 0.025, False)]
)
def test_both_loads_must_meet_the_target(paced: float, full_load: float, good: bool) -> None:
    out = io.StringIO()
    assert show(cost(paced, full_load), Console(file=out, width=200)) is good
    first, second, last = out.getvalue().splitlines()
    assert f"costs {paced * 100:.2f} % of the gateway's throughput at 50 requests per second" in first
    assert f"costs {full_load * 100:.2f} % of the gateway's throughput at full load" in second
    assert f"(95 %: {full_load * 100:.2f} to {full_load * 100:.2f}; 8 pairs)" in second
    assert "1000 rows" in last


def server_of(served: LiveServer) -> Server:
    return Server(psutil.Process(os.getpid()), int(served.url.rpartition(":")[2]))


async def test_responses_are_counted_and_each_costs_cpu_time() -> None:
    with live_server(demo_config()) as served:
        assert await cpu_per_response(server_of(served), 0.0, 0.0) > 0
        wrong = json.dumps(json.loads(request_body()) | {"model": 7})
        with pytest.raises(SystemExit, match="the server did not respond: 400"):
            await cpu_per_response(server_of(served), 0.0, 0.0, wrong)


async def test_the_table_is_filled_with_requests_of_forty_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.workbench.ROWS", 40)
    with live_server(demo_config()) as served:
        await fill_table(server_of(served))
        records = list(served.app.gateway.history.recent(1000))
    assert len(records) == 40
