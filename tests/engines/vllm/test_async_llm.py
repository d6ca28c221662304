"""vLLM's side of the engine: outputs as chunks, delivery to the gateway's loop, and errors."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

import modelyard_vllm as vllm
from modelyard.core.engine import Accepted, Chunk, End, Media, Prompt, TokenRun, Tokens
from modelyard.core.errors import ENGINE_DIED, ContextOverflow, Internal, InvalidRequest, NotFound, Unavailable
from modelyard.core.request import Constraint
from modelyard.core.tokenizer import IdLogprob
from modelyard.plugins import MissingLibrary
from modelyard_vllm.async_llm import AsyncLlmRunner, VllmJob, find_name, require_name
from modelyard_vllm.errors import death_error, first_token_error, load_error, request_error
from tests.engines.vllm.helpers import prompt as chat_prompt
from tests.engines.vllm.helpers import use_fake_library

# --- outputs as chunks ----------------------------------------------------------------------------------------------


def create_job(prompt: Prompt | None = None, window: int = 100, **fields: Any) -> VllmJob:
    prompt = prompt or Prompt(parts=(TokenRun([1, 2, 3]),), **{"max_tokens": 9} | fields)
    return VllmJob("a", prompt, asyncio.get_running_loop(), "main", window, on_cancel=lambda _: None)


def output(ids: list[int], reason: str | None = None, logprobs: Any = None, cached: int = 0, prompt: Any = None) -> Any:
    delta = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason)
    return SimpleNamespace(
        outputs=[delta], finished=reason is not None, num_cached_tokens=cached, prompt_token_ids=prompt or [1, 2, 3]
    )


def last_chunk(job: VllmJob, result: Any) -> End:
    last = job.handle_output(result)[-1]
    assert isinstance(last, End)
    return last


async def test_first_output_gives_the_number_of_cached_tokens() -> None:
    job = create_job()
    assert job.handle_output(output([7], cached=2)) == [Accepted(2, 2), Tokens([7])]
    assert job.handle_output(output([8, 9])) == [Tokens([8, 9])]


async def test_stop_token_is_not_part_of_the_answer() -> None:
    logprobs = [{7: SimpleNamespace(logprob=-0.5, rank=1)}, {2: SimpleNamespace(logprob=-0.1, rank=1)}]
    *_, tokens, last = create_job(logprobs=0).handle_output(output([7, 2], "stop", logprobs))
    assert tokens == Tokens([7], [IdLogprob(7, -0.5)])
    assert isinstance(last, End)
    assert (last.reason, last.usage.output) == ("stop", 1)


async def test_answer_that_stops_at_once_has_no_tokens() -> None:
    accepted, last = create_job().handle_output(output([2], "stop"))
    assert isinstance(accepted, Accepted)
    assert isinstance(last, End)
    assert last.usage.output == 0


@pytest.mark.parametrize(("window", "reason"), [(100, "length"), (12, "length"), (11, "window")])
async def test_end_names_the_limit_that_was_reached(window: int, reason: str) -> None:
    job = create_job(window=window)
    assert last_chunk(job, output([7] * job.max_output, "length")).reason == reason


async def test_answer_cut_below_its_limit_has_filled_the_window() -> None:
    assert last_chunk(create_job(), output([7], "length")).reason == "window"


async def test_unknown_finish_reason_is_an_error() -> None:
    assert last_chunk(create_job(), output([], "error")).error is not None


async def test_logprobs_include_a_chosen_token_that_is_not_among_the_best() -> None:
    candidates = {
        5: SimpleNamespace(logprob=-4.0, rank=30),
        1: SimpleNamespace(logprob=-0.3, rank=1),
        2: SimpleNamespace(logprob=-1.5, rank=2),
    }
    _, tokens = create_job(logprobs=2).handle_output(output([5], logprobs=[candidates]))
    assert tokens == Tokens([5], [IdLogprob(5, -4.0, ((1, -0.3), (2, -1.5)))])


async def test_image_counts_as_many_tokens_as_vllms_processor_says() -> None:
    job = create_job(Prompt(parts=(TokenRun([1]), Media("image", "ab", b"", 5)), max_tokens=9))
    job.handle_output(output([7], prompt=list(range(64))))
    assert job.prompt_tokens == 64


# --- delivery -------------------------------------------------------------------------------------------------------


class CountingDispatch:
    def __init__(self) -> None:
        self.pending: list[Any] = []
        self.flushed: list[int] = []

    def put(self, job: VllmJob, chunks: list[Chunk], last: bool) -> None:
        self.pending.append((job, chunks, last))

    def flush(self) -> None:
        self.flushed.append(len(self.pending))
        self.pending.clear()


async def test_chunks_of_one_step_wake_the_gateways_loop_once() -> None:
    dispatch = CountingDispatch()
    runner = AsyncLlmRunner(None, dispatch, {}, lambda _: None)  # type: ignore[arg-type]
    jobs = [create_job(chat_prompt()) for _ in range(8)]
    for step in range(2):
        for job in jobs:  # the tasks of all jobs run in the same iteration of the loop
            runner._emit(job, [Tokens([step])])
        assert len(dispatch.flushed) == step
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(dispatch.flushed) == step + 1
    assert dispatch.flushed == [8, 8]


# --- errors ---------------------------------------------------------------------------------------------------------

REQUEST_ERRORS = (ValueError,)


def test_our_own_errors_stay_unchanged() -> None:
    own = NotFound("gone")
    assert request_error(own, REQUEST_ERRORS) is own


def test_too_long_prompt_is_a_context_overflow() -> None:
    message = "The decoder prompt (length 300) is longer than the maximum model length of 256. Make sure that …"
    assert request_error(ValueError(message), REQUEST_ERRORS) == ContextOverflow(300, 256)


def test_refused_grammar_names_its_field() -> None:
    error = request_error(ValueError("Grammar error: at 1(8)"), REQUEST_ERRORS, Constraint("regex", "("))
    assert (error.code, error.param) == ("bad_grammar", "regex")


def test_other_refusals_keep_vllms_message() -> None:
    error = request_error(ValueError("min_p must be in [0, 1]"), REQUEST_ERRORS, Constraint("regex", "a"))
    assert isinstance(error, InvalidRequest)
    assert "min_p must be in [0, 1]" in error.message


def test_internal_errors_reveal_no_details() -> None:
    error = request_error(RuntimeError("secret"), REQUEST_ERRORS)
    assert isinstance(error, Internal)
    assert "secret" not in error.message


def test_death_says_how_the_process_ended() -> None:
    assert death_error([None, -9]) == Unavailable("vLLM's engine process was killed by SIGKILL", code=ENGINE_DIED)
    assert death_error([]) == Unavailable("vLLM's engine process died", code=ENGINE_DIED)


def test_death_at_the_first_token_suggests_float32() -> None:
    message = first_token_error([-4]).message
    assert "killed by SIGILL" in message
    assert "float32" in message


def test_failed_load_is_explained_by_the_log_of_vllms_processes() -> None:
    failed = load_error(RuntimeError("Engine core initialization failed. See root cause above."), "/m")
    lines = [
        "(EngineCore pid=812) INFO 11-15 09:51:02 [core.py:1] all is well",
        "(EngineCore pid=812) ERROR 11-15 09:51:02 [core.py:1101] ValueError: the KV cache does not fit",
        "RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    explained = vllm.explain(failed, lines)
    assert explained.message == "vLLM cannot load /m: ValueError: the KV cache does not fit"
    assert explained.code == failed.code
    assert vllm.explain(failed, []) is failed


def test_errors_of_another_kind_are_not_explained() -> None:
    missing = NotFound("the model is not here")
    assert vllm.explain(missing, ["ValueError: something"]) is missing


# --- names of other versions ----------------------------------------------------------------------------------------


def test_names_of_vllm_are_looked_up_in_several_places() -> None:
    use_fake_library()
    assert find_name("json:gone", "no_such_module.inner:x", "json:loads") is json.loads
    assert find_name("json:gone", "json.no_such_module:x") is None
    with pytest.raises(ModuleNotFoundError, match="a_library_of_vllm"):
        find_name("tests.engines.vllm.needs_more:x")
    with pytest.raises(MissingLibrary, match=r"vLLM .* has no vllm\.Gone or vllm\.moved\.Gone, which the engine needs"):
        require_name("vllm:Gone", "vllm.moved:Gone")
