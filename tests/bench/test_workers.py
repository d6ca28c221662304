"""The workers' benchmark: engines that make tokens of the clock, whose latency is measured alone."""

from __future__ import annotations

import pytest

from bench import workers
from modelyard.core.engine import End, Tokens
from tests.engines.reading import read


async def test_the_clock_engine_makes_as_many_tokens_as_requested() -> None:
    began = workers.clock_us()
    chunks = await read(workers.ClockEngine().generate(workers.prompt(4)))
    times = [(id - began) % workers._CLOCK_PERIOD for chunk in chunks if isinstance(chunk, Tokens) for id in chunk.ids]
    assert (len(times), times) == (4, sorted(times))
    assert isinstance(chunks[-1], End)


async def test_the_step_engine_makes_one_token_per_step() -> None:
    assert await workers.tokens_per_s(workers.StepEngine(), 3, 5) > 0
    assert await workers.stream(workers.StepEngine(), 5) == 5


async def test_a_latency_is_right_when_the_clock_wraps_around(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0, workers._CLOCK_PERIOD - 1000, 1000])

    class LateEngine(workers.ClockEngine):
        def _put(self, queue, remaining):  # type: ignore[no-untyped-def]
            queue.put_many([Tokens([next(times)]), Tokens([next(times)]), End("length")], last=True)

    monkeypatch.setattr(workers, "clock_us", lambda: 1000)
    assert await workers.token_latency_ms(LateEngine(), 2) == 2.0


def test_messages_are_small() -> None:
    prompt, batched, alone = (value for _, value, _ in workers.sizes())
    assert int(prompt.split()[0].replace(",", "")) < 4500
    assert float(batched.split()[0]) < float(alone.split()[0])
