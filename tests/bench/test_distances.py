"""A token's way, measured by a clock that is sent along."""

from __future__ import annotations

import pytest

from bench import distances
from modelyard.core.engine import End, Tokens
from tests.engines.reading import read


async def test_the_engine_says_the_time_as_often_as_it_is_asked() -> None:
    began = distances.now_us()
    chunks = await read(distances.Clock().generate(distances.workers.prompt(4)))
    told = [(id - began) % distances._TURN for chunk in chunks if isinstance(chunk, Tokens) for id in chunk.ids]
    assert (len(told), told) == (4, sorted(told))
    assert isinstance(chunks[-1], End)


async def test_a_way_is_right_when_the_clock_comes_round_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0, distances._TURN - 1000, 1000])

    class Late(distances.Clock):
        def _say(self, box, left):  # type: ignore[no-untyped-def]
            box.put_many([Tokens([next(times)]), Tokens([next(times)]), End("length")], last=True)

    monkeypatch.setattr(distances, "now_us", lambda: 1000)
    assert await distances.ways(Late(), 2) == 2.0
