"""The short way says exactly what the long way says."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.engine import Accepted, CacheInfo, Chunk, End, EngineSpec, Prompt, TokenRun, Tokens
from modelyard.core.request import Constraint
from modelyard.engines import fake
from modelyard.engines.fake.text import FakeTextEngine

CACHES = {"main": CacheInfo(window=256, parallel=4)}


async def opened(**options: Any) -> FakeTextEngine:
    engine = fake.create(EngineSpec("m", fake.Options(**options), CACHES))
    assert isinstance(engine, FakeTextEngine)
    await engine.open(lambda done, what: None)
    return engine


async def chunks(engine: FakeTextEngine, **prompt: Any) -> list[Chunk]:
    asked = Prompt(**{"parts": (TokenRun(engine.vocab.encode("Hello, you there")),), "max_tokens": 64, **prompt})
    return [chunk async for batch in engine.generate(asked) for chunk in batch]


def essence(told: list[Chunk]) -> tuple[Any, ...]:
    accepted, end = told[0], told[-1]
    assert isinstance(accepted, Accepted)
    assert isinstance(end, End)
    return accepted, [i for c in told if isinstance(c, Tokens) for i in c.ids], end.reason, end.usage


SCRIPT = [{"steps": [{"text": "Good day, what can I do for you?"}]}]


@pytest.mark.parametrize("more", [{}, {"stop_ids": (2,)}, {"max_tokens": 3}, {"session": "s"}])
async def test_both_ways_tell_the_same(more: dict[str, Any]):
    short, long = await opened(script=SCRIPT), await opened(script=SCRIPT)
    long._bursts._fit = False
    for _ in range(2):
        assert essence(await chunks(short, **more)) == essence(await chunks(long, **more))
    assert short.stats() == long.stats()


async def test_both_ways_find_and_evict_the_same_in_a_cache_that_fills_up():
    short, long = await opened(script=SCRIPT), await opened(script=SCRIPT)
    long._bursts._fit = False
    prompts = [[1, 2, 3, 10 + n % 7, 4 + n % 3] * (1 + n % 2) for n in range(30)]
    for number, ids in enumerate(prompts):
        asked = {"parts": (TokenRun(ids),), "session": "s" if number % 5 == 0 else None}
        assert essence(await chunks(short, **asked)) == essence(await chunks(long, **asked))
    assert short.stats() == long.stats()
    assert short.stats().sequences == CACHES["main"].parallel


async def test_both_ways_tell_the_same_where_some_prompts_have_opened_the_reasoning():
    short, long = await opened(script=SCRIPT), await opened(script=SCRIPT)
    long._bursts._fit = False
    inside = short.vocab.encode("Hello<think>")
    for ids in (inside, inside[:-1], inside):
        asked = {"parts": (TokenRun(ids),)}
        assert essence(await chunks(short, **asked)) == essence(await chunks(long, **asked))


async def test_a_job_that_needs_more_than_words_takes_the_long_way():
    engine = await opened(script=SCRIPT)
    prompt = Prompt(parts=(TokenRun([1, 2]),), max_tokens=64)
    assert engine._bursts.take(prompt) is not None
    for field in ({"logprobs": 0}, {"constraint": Constraint("json_object")}, {"deadline": 1e12}, {"max_tokens": 1}):
        assert engine._bursts.take(Prompt(**{"parts": prompt.parts, "max_tokens": 64, **field})) is None


@pytest.mark.parametrize("script", [[{"steps": [{"delay": 1}]}], [{"when": "x", "steps": []}], SCRIPT * 2])
async def test_an_engine_with_something_to_decide_has_no_short_way(script: list[dict[str, Any]]):
    engine = await opened(script=script)
    assert engine._bursts.take(Prompt(parts=(TokenRun([1, 2]),), max_tokens=64)) is None
