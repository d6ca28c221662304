"""vLLM's deltas as chunks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from modelyard.core.engine import Accepted, CacheInfo, End, IdLogprob, Media, Prompt, TokenRun, Tokens
from modelyard.core.errors import ContextOverflow, Internal, InvalidRequest, NotFound, Unavailable
from modelyard.core.request import Constraint
from modelyard.engines import vllm
from modelyard.engines.vllm import errors
from modelyard.engines.vllm.async_llm import AsyncLlmRunner, VllmJob
from tests.engines.vllm.helpers import prompt


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


# vLLM's side of the engine: how what it says reaches the reader's loop.


async def test_what_one_step_says_to_all_jobs_wakes_the_reader_once() -> None:
    posted: list[Any] = []
    core = AsyncLlmRunner(None, lambda _, parcels: posted.append(parcels), lambda _: None, lambda _: None)  # type: ignore[arg-type]
    jobs = [VllmJob(f"{n}", prompt(), asyncio.get_running_loop(), lambda _: None) for n in range(8)]
    for step in range(2):
        for job in jobs:  # each in a task of its own, all woken in the same round
            core._emit(job, [Tokens([step])])
        assert len(posted) == step
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(posted) == step + 1
    assert [len(parcels) for parcels in posted] == [8, 8]


# What vLLM raises, as our errors.

REFUSED = (ValueError,)


def test_our_own_errors_stay_what_they_are() -> None:
    own = NotFound("gone")
    assert errors.request_error(own, REFUSED) is own


def test_prompt_that_is_too_long_is_an_overflow() -> None:
    words = "The decoder prompt (length 300) is longer than the maximum model length of 256. Make sure that …"
    assert errors.request_error(ValueError(words), REFUSED) == ContextOverflow(300, 256)


def test_refusal_of_a_grammar_names_the_field() -> None:
    error = errors.request_error(ValueError("Grammar error: at 1(8)"), REFUSED, Constraint("regex", "("))
    assert (error.code, error.param) == ("bad_grammar", "regex")


def test_refusal_of_anything_else_is_told_in_vllms_words() -> None:
    error = errors.request_error(ValueError("min_p must be in [0, 1]"), REFUSED, Constraint("regex", "a"))
    assert isinstance(error, InvalidRequest)
    assert "min_p must be in [0, 1]" in error.message


def test_what_is_not_the_clients_fault_says_nothing_of_the_inside() -> None:
    error = errors.request_error(RuntimeError("secret"), REFUSED)
    assert isinstance(error, Internal)
    assert "secret" not in error.message


def test_death_tells_how_the_process_ended() -> None:
    assert errors.death_error([None, -9]) == Unavailable("vLLM's engine process was killed by SIGKILL")
    assert errors.death_error([]) == Unavailable("vLLM's engine process died")


def test_death_at_the_first_token_tells_the_way_out() -> None:
    assert "killed by SIGILL" in (told := errors.first_token_error([-4]).message)
    assert "float32" in told


def test_load_that_failed_is_explained_by_what_vllms_processes_wrote() -> None:
    failed = errors.load_error(RuntimeError("Engine core initialization failed. See root cause above."), "/m")
    lines = [
        "(EngineCore pid=812) INFO 11-15 09:51:02 [core.py:1] all is well",
        "(EngineCore pid=812) ERROR 11-15 09:51:02 [core.py:1101] ValueError: the KV cache does not fit",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    explained = vllm.explain(failed, lines)
    assert explained.message == "vLLM cannot load /m: ValueError: the KV cache does not fit"
    assert explained.code == failed.code
    assert vllm.explain(failed, []) is failed


def test_fault_of_another_kind_needs_no_explanation() -> None:
    missing = NotFound("the model is not here")
    assert vllm.explain(missing, ["ValueError: something"]) is missing
