"""The scheduler's benchmark: its cases run, and targets are marked."""

from __future__ import annotations

import io

from rich.console import Console

from bench.pool import TARGET_US, PoolCase, PoolCost, cases, measure, show


async def test_a_case_with_waiting_requests_goes_through_the_queue():
    row = await measure(PoolCase(models=2, waiting=20, replicas=2), rounds=1)
    assert (row.name, row.micros > 0) == ("through the queue", True)


async def test_a_case_without_waiting_requests_is_granted_at_once():
    assert (await measure(PoolCase(models=3, waiting=0), rounds=1)).name == "granted at once"


def test_the_cases_have_1_to_64_models_and_0_or_1000_waiting():
    assert {(case.models, case.waiting) for case in cases()} >= {(m, w) for m in (1, 8, 64) for w in (0, 1000)}


def test_a_missed_target_is_marked():
    out = io.StringIO()
    show(
        [PoolCost(PoolCase(1, 0), "fast", 1.0), PoolCost(PoolCase(1, 0), "slow", TARGET_US + 1)],
        Console(file=out, width=120),
    )
    assert [("✓" in line, "✗" in line) for line in out.getvalue().splitlines() if "≤" in line] == [
        (True, False),
        (False, True),
    ]
