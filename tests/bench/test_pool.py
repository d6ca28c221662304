"""The scheduler's benchmark runs and counts what it says; how fast is not a test's business."""

from __future__ import annotations

import io

from rich.console import Console

from bench.pool import TARGET_US, Case, Row, cases, measure, show


async def test_a_case_with_waiters_goes_through_the_queue_and_leaves_it():
    row = await measure(Case(models=2, waiting=20, replicas=2), rounds=1)
    assert (row.what, row.micros > 0) == ("through the queue", True)


async def test_a_case_without_waiters_is_granted_at_once():
    assert (await measure(Case(models=3, waiting=0), rounds=1)).what == "granted at once"


def test_the_cases_are_one_to_sixty_four_models_with_nobody_and_a_thousand_waiting():
    assert {(case.models, case.waiting) for case in cases()} >= {(m, w) for m in (1, 8, 64) for w in (0, 1000)}


def test_a_row_over_its_target_is_marked():
    out = io.StringIO()
    show([Row(Case(1, 0), "fast", 1.0), Row(Case(1, 0), "slow", TARGET_US + 1)], Console(file=out, width=120))
    assert [("✓" in line, "✗" in line) for line in out.getvalue().splitlines() if "≤" in line] == [
        (True, False),
        (False, True),
    ]
