"""Two hostile keys beside three honest ones: a short run against a real server, and what its verdict notices."""

from __future__ import annotations

from collections import Counter

from bench.hostile import BOMBS, Measured, Verdict, configuration, run
from bench.resources import Usage
from bench.servers import modelyard_server

BEFORE = Usage(100, 10, 5, 1)


async def test_honest_keys_are_answered_beside_hostile_ones() -> None:
    with modelyard_server(configuration("fake")) as server:
        verdict = await run(server, seconds=2.0, size=2 << 20, fills_caches=False)
    assert set(verdict.bombs) == {bomb.__name__ for bomb in BOMBS}
    assert set(verdict.beside.outcomes) == {"200"}
    assert verdict.after.rss_mb < verdict.before.rss_mb + 150


def measured(seconds: float, **outcomes: int) -> Measured:
    return Measured([(0.0, seconds)] * 100, Counter({"200": 100} | outcomes))


def test_a_verdict_notices_what_is_not_answered_slower_or_larger() -> None:
    alone, bombs = measured(1.0), {"pieces": [(0.0, 1.0)]}
    assert Verdict(alone, alone, measured(2.1), bombs, BEFORE, Usage(110, 12, 5, 1)).faults() == []
    assert (
        "ReadTimeout"
        in Verdict(alone, alone, measured(1.0, ReadTimeout=1), bombs, BEFORE, Usage(110, 12, 5, 1)).faults()[0]
    )
    assert "p99" in Verdict(alone, alone, measured(2.5), bombs, BEFORE, Usage(110, 12, 5, 1)).faults()[0]
    assert "100 → 130 MiB" in Verdict(alone, alone, alone, bombs, BEFORE, Usage(130, 10, 5, 1)).faults()[0]
    assert "30 open files" in Verdict(alone, alone, alone, bombs, BEFORE, Usage(100, 30, 5, 1)).faults()[0]
    assert Verdict(alone, alone, Measured(), {}, BEFORE, BEFORE).faults() == ["nothing was measured"]


def test_answers_beside_a_bomb_are_those_of_the_same_time() -> None:
    seen = Measured([(0.0, 1.0), (2.0, 5.0), (6.0, 6.5)])
    assert seen.quantile(1.0) == 3.0
    assert seen.quantile(1.0, [(0.5, 0.6), (6.4, 9.0)]) == 1.0
    assert seen.quantile(1.0, [(5.5, 5.9)]) == 0.0
