"""vLLM's deltas as chunks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from modelyard.core.engine import Accepted, CacheInfo, End, IdLogprob, Media, Prompt, TokenRun, Tokens
from modelyard.engines.vllm.async_llm import VllmJob


@pytest.fixture
def loop() -> Any:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def job(loop: Any, **fields: Any) -> VllmJob:
    prompt = Prompt(parts=(TokenRun([1, 2, 3]),), **{"max_tokens": 9} | fields)
    made = VllmJob("a", prompt, loop, lambda _: None)
    made.fit(CacheInfo(100))
    return made


def delta(ids: list[int], reason: str | None = None, logprobs: Any = None, cached: int = 0, prompt: Any = None) -> Any:
    said = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason)
    return SimpleNamespace(
        outputs=[said], finished=reason is not None, num_cached_tokens=cached, prompt_token_ids=prompt or [1, 2, 3]
    )


def test_first_delta_tells_what_was_cached(loop: Any) -> None:
    it = job(loop)
    assert it.heard(delta([7], cached=2)) == [Accepted(2, 2), Tokens([7])]
    assert it.heard(delta([8, 9])) == [Tokens([8, 9])]


def test_token_that_stops_an_answer_is_not_part_of_it(loop: Any) -> None:
    it = job(loop, logprobs=0)
    one = {7: SimpleNamespace(logprob=-0.5, rank=1)}
    *_, said, last = it.heard(delta([7, 2], "stop", [one, {2: SimpleNamespace(logprob=-0.1, rank=1)}]))
    assert said == Tokens([7], [IdLogprob(7, -0.5)])
    assert isinstance(last, End)
    assert (last.reason, last.usage.output) == ("stop", 1)


def test_answer_that_stops_at_once_says_nothing(loop: Any) -> None:
    accepted, last = job(loop).heard(delta([2], "stop"))
    assert isinstance(accepted, Accepted)
    assert isinstance(last, End)
    assert last.usage.output == 0


@pytest.mark.parametrize(("window", "reason"), [(100, "length"), (12, "length"), (11, "window")])
def test_full_answer_says_what_was_full(loop: Any, window: int, reason: str) -> None:
    it = job(loop)
    it.fit(CacheInfo(window))
    last = it.heard(delta([7] * it.most, "length"))[-1]
    assert isinstance(last, End)
    assert last.reason == reason


def test_reason_that_nobody_knows_is_an_error(loop: Any) -> None:
    last = job(loop).heard(delta([], "error"))[-1]
    assert isinstance(last, End)
    assert last.error is not None


def test_chosen_token_is_told_even_where_it_is_none_of_the_best(loop: Any) -> None:
    at = {
        5: SimpleNamespace(logprob=-4.0, rank=30),
        1: SimpleNamespace(logprob=-0.3, rank=1),
        2: SimpleNamespace(logprob=-1.5, rank=2),
    }
    _, said = job(loop, logprobs=2).heard(delta([5], logprobs=[at]))
    assert said == Tokens([5], [IdLogprob(5, -4.0, ((1, -0.3), (2, -1.5)))])


def test_picture_counts_as_many_tokens_as_its_processor_says(loop: Any) -> None:
    prompt = Prompt(parts=(TokenRun([1]), Media("image", "ab", b"", 5)), max_tokens=9)
    it = VllmJob("a", prompt, loop, lambda _: None)
    it.fit(CacheInfo(100))
    it.heard(delta([7], prompt=list(range(64))))
    assert it.prompt_tokens == 64


def test_answer_that_is_cut_before_its_length_has_filled_the_window(loop: Any) -> None:
    last = job(loop).heard(delta([7], "length"))[-1]
    assert isinstance(last, End)
    assert last.reason == "window"
