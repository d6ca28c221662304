"""Two hostile keys beside three honest ones: a short run against a real server, and what its verdict notices."""

from __future__ import annotations

from collections import Counter

from bench.hostile import BOMBS, Measured, Verdict, configuration, run
from bench.servers import modelyard_server


async def test_honest_keys_are_answered_beside_hostile_ones() -> None:
    with modelyard_server(configuration("fake")) as server:
        verdict = await run(server, seconds=2.0, size=2 << 20, fills_caches=False)
    assert set(verdict.bombs) == {bomb.__name__ for bomb in BOMBS}
    assert set(verdict.beside.outcomes) == {"200"}
    assert verdict.after < verdict.before + (150 << 20)


def measured(seconds: float, **outcomes: int) -> Measured:
    return Measured([seconds] * 100, Counter({"200": 100} | outcomes))


def test_a_verdict_notices_what_is_not_answered_slower_or_larger() -> None:
    alone, bombs = measured(1.0), Counter({"pieces": 1})
    assert Verdict(alone, measured(2.1), bombs, 100, 110).faults() == []
    assert "ReadTimeout" in Verdict(alone, measured(1.0, ReadTimeout=1), bombs, 100, 110).faults()[0]
    assert "p99" in Verdict(alone, measured(2.5), bombs, 100, 110).faults()[0]
    assert "memory" in Verdict(alone, alone, bombs, 100, 130).faults()[0]
    assert Verdict(alone, Measured(), Counter(), 100, 100).faults() == ["nothing was measured"]
