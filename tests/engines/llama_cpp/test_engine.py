"""The engine on the default model: what the conformance suite does not test for every engine."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelyard.core.engine import (
    CacheInfo,
    Chunk,
    Control,
    End,
    Media,
    Progress,
    Prompt,
    ReasoningBounds,
    ReasoningBudget,
    TokenRun,
    Tokens,
)
from modelyard.core.errors import InvalidRequest, ModelyardError, Overloaded, Timeout, Unavailable, Unsupported
from modelyard.core.request import Constraint
from modelyard.engines import llama_cpp
from modelyard.engines.in_process import ThreadCall
from modelyard.engines.llama_cpp import loading
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.engines.llama_cpp.job import LlamaCppJob
from tests.engines.llama_cpp import reference
from tests.engines.llama_cpp.helpers import (
    Tap,
    answer,
    chatml,
    id_prompt,
    model_file,
    prompt,
    running,
    spec,
    text_of,
    vocabulary,
)
from tests.engines.reading import accepted, end, ids, read, until

TEXTS = ("Tell me about Paris.", "What is 2 + 2?", "Write one line of Python that prints the squares of 0 to 9.")
LONG = "A long walk along the river. " * 18


async def test_greedy_answers_are_those_of_llama_cpp() -> None:
    expected = reference.greedy(model_file(), [prompt(text).ids for text in TEXTS], 8)
    async with running() as engine:
        for text, tokens in zip(TEXTS, expected, strict=True):
            assert ids(await answer(engine, text, max_tokens=8)) == tokens


async def test_a_stream_waits_for_one_slice_of_a_long_prompt_at_most() -> None:
    async with running() as engine:
        tap = Tap(engine)
        stream = engine.generate(prompt("Tell me a long story.", session="a", max_tokens=60))
        await until(stream, Tokens)
        await answer(engine, LONG, session="b", max_tokens=1)
        stream.cancel()
        await read(stream)
    order = [(job, type(chunk)) for job, chunk in tap.seen]
    reports = [at for at, seen in enumerate(order) if seen == (2, Progress)]
    assert len(reports) > 5
    for earlier, later in pairwise(reports):
        assert (1, Tokens) in order[earlier:later]


async def test_a_long_prompt_in_one_cache_does_not_stop_streams_of_another() -> None:
    async with running({"main": CacheInfo(512, 1), "fast": CacheInfo(512, 1)}) as engine:
        tap = Tap(engine)
        stream = engine.generate(prompt("Tell me a long story.", cache="fast", max_tokens=60))
        await until(stream, Tokens)
        await answer(engine, LONG, max_tokens=1)
        stream.cancel()
        await read(stream)
    order = [(job, type(chunk)) for job, chunk in tap.seen]
    reports = [at for at, seen in enumerate(order) if seen == (2, Progress)]
    assert len(reports) > 5
    for earlier, later in pairwise(reports):
        assert order[earlier:later].count((1, Tokens)) == 1


# --- cancelling -----------------------------------------------------------------------------------------------------


class CancelAt(Tap):
    """Cancels a job on the engine's thread at its first chunk of a type."""

    def __init__(self, engine: LlamaCppEngine, kind: type) -> None:
        super().__init__(engine)
        self._kind = kind

    def on_chunk(self, job: LlamaCppJob, chunk: Chunk) -> None:
        if isinstance(chunk, self._kind):
            job.cancel()


@pytest.mark.parametrize("kind", [Progress, Tokens])
async def test_a_cancelled_job_gets_no_further_slice(kind: type) -> None:
    async with running() as engine:
        CancelAt(engine, kind)
        chunks = await answer(engine, LONG if kind is Progress else "Hello!")
    assert end(chunks).reason == "cancelled"
    assert sum(isinstance(chunk, kind) for chunk in chunks) == 1


async def test_a_job_cancelled_in_the_inbox_is_not_started() -> None:
    async with running() as engine:
        looks = block(engine)
        generation = engine.generate(prompt())
        generation.cancel()
        looks.set()
        (last,) = await read(generation)
        assert isinstance(last, End)
        assert last.reason == "cancelled"
        assert engine.stats().evaluated_tokens == 0


async def test_the_kv_of_a_cancelled_job_stays_valid() -> None:
    async with running() as engine:
        CancelAt(engine, Progress)
        await answer(engine, LONG)
        fresh = await answer(engine, "Hello!")
        assert end(fresh).reason == "length"
        held = engine._caches["main"].slots[0].tokens
        assert len(held) == 16
        assert list(held) == prompt(LONG).ids[:16]


def block(engine: LlamaCppEngine) -> threading.Event:
    """Blocks the engine's thread until the event is set."""
    event = threading.Event()
    engine._inbox.put(ThreadCall(lambda: event.wait(60), engine._loop.create_future()))
    return event


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        pytest.param({"parts": ()}, InvalidRequest, id="no tokens"),
        pytest.param({"parts": (TokenRun([1, 49152]),)}, InvalidRequest, id="too large id"),
        pytest.param({"parts": (TokenRun([1, -1]),)}, InvalidRequest, id="negative id"),
        pytest.param({"parts": (Media("image", "", b"", 9), TokenRun([1]))}, Unsupported, id="image"),
        pytest.param({"parts": (TokenRun([1]),), "deadline": 1.0}, Timeout, id="past deadline"),
    ],
)
async def test_an_invalid_job_fails_alone(asked: dict[str, Any], error: type[ModelyardError]) -> None:
    async with running() as engine:
        good = engine.generate(prompt())
        (last,) = await read(engine.generate(Prompt(**asked)))
        assert isinstance(last, End)
        assert isinstance(last.error, error)
        assert end(await read(good)).reason == "length"


async def test_a_job_without_a_free_sequence_is_refused() -> None:
    async with running({"main": CacheInfo(512, 1)}) as engine:
        looks = block(engine)
        first, second = engine.generate(prompt()), engine.generate(prompt())
        looks.set()
        assert end(await read(first)).reason == "length"
        assert isinstance(end(await read(second)).error, Overloaded)


async def test_a_deadline_ends_a_running_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as engine:
        generation = engine.generate(prompt(max_tokens=400, deadline=float("inf")))
        chunks = await until(generation, Tokens)
        late = SimpleNamespace(**vars(time) | {"monotonic": lambda: float("inf")})
        monkeypatch.setattr("modelyard.engines.llama_cpp.context.time", late)
        monkeypatch.setattr("modelyard.engines.llama_cpp.batch.time", late)
        chunks += await read(generation)
    assert isinstance(end(chunks).error, Timeout)


async def test_more_streams_than_rows_of_a_batch_all_run() -> None:
    async with running({"main": CacheInfo(256, 4)}, n_batch=2, n_ubatch=2) as engine:
        looks = block(engine)
        jobs = [engine.generate(prompt("Hi.", session=str(n), max_tokens=3)) for n in range(4)]
        looks.set()
        assert [len(ids(await read(job))) for job in jobs] == [3] * 4


async def test_save_without_kv_store_is_refused() -> None:
    async with running() as engine:
        with pytest.raises(InvalidRequest, match="save"):
            await engine.control(Control("save", argument="x"))


# --- death and closing ----------------------------------------------------------------------------------------------


async def test_death_ends_every_job_and_is_reported() -> None:
    async with running() as engine:
        looks = block(engine)
        jobs = [engine.generate(prompt(session=str(n))) for n in range(2)]
        engine._contexts[0].step = explode  # type: ignore[method-assign]
        looks.set()
        for job in jobs:
            assert isinstance(end(await read(job)).error, Unavailable)
        assert "no more" in (await engine.lost).message
        assert isinstance(end(await answer(engine)).error, Unavailable)
        with pytest.raises(Unavailable):
            await engine.control(Control("evict"))


def explode() -> None:
    raise ValueError("no more")


async def test_a_failed_decode_fails_its_batch_and_drops_its_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as engine:
        with monkeypatch.context() as patched:
            patched.setattr("modelyard.engines.llama_cpp.context.lib.llama_decode", lambda *_: 1)
            assert isinstance(end(await answer(engine)).error, Unavailable)
        assert engine.stats().occupied_tokens == 0
        after = await answer(engine)
        assert accepted(after).cached_tokens == 0
        assert end(after).reason == "length"


# --- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        pytest.param(lambda data: b"", "failed to read magic", id="empty"),
        pytest.param(lambda data: b"What is this? " * 99, "invalid magic characters: 'What'", id="garbage"),
        pytest.param(lambda data: data[:100_000], "failed to read key-value pairs", id="truncated metadata"),
        pytest.param(lambda data: data[:50_000_000], "not within the file bounds", id="truncated weights"),
        pytest.param(
            lambda data: data.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0xlama", 1),
            "unknown model architecture: 'xlama'",
            id="unknown architecture",
        ),
    ],
)
async def test_a_bad_file_is_refused_with_the_reason_of_llama_cpp(
    damage: Any, reason: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(damage(model_file().read_bytes()))
    engine = llama_cpp.create(spec(path=str(broken)))
    with pytest.raises(InvalidRequest, match=reason):
        await engine.open(lambda *_: None)
    await engine.close()
    assert capfd.readouterr() == ("", "")


async def test_a_cache_that_cannot_be_created_leaves_nothing_loaded() -> None:
    odd = CacheInfo(256, 1, type_v="q4_0", flash_attn=False)  # which needs it
    caches = {"main": CacheInfo(256, 1), "odd": odd}
    engine = llama_cpp.create(spec(caches))
    with pytest.raises(InvalidRequest, match="'odd'"):
        await engine.open(lambda *_: None)
    await engine.close()
    assert isinstance(engine, LlamaCppEngine)
    assert engine._model is None


async def test_the_log_of_llama_cpp_does_not_reach_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    async with running() as engine:
        await answer(engine)
    assert capfd.readouterr() == ("", "")


def test_the_default_thread_count_is_that_of_the_usable_physical_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 8)
    assert loading.thread_counts(CacheInfo(64), llama_cpp.Options(path="x")) == (1, 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert loading.thread_counts(CacheInfo(64), llama_cpp.Options(path="x", n_threads_batch=9)) == (8, 9)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: None)
    assert loading.thread_counts(CacheInfo(64, n_threads=3), llama_cpp.Options(path="x", n_threads=2)) == (3, 3)
    assert loading.thread_counts(CacheInfo(64), llama_cpp.Options(path="x")) == (16, 16)


def test_no_context_has_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)), raising=False)
    assert loading.thread_counts(CacheInfo(64), llama_cpp.Options(path="x", n_threads=512)) == (4, 4)
    assert loading.thread_counts(CacheInfo(64, n_threads=512), llama_cpp.Options(path="x", n_threads_batch=3)) == (4, 3)


def test_the_tokenizer_is_read_from_the_model_file() -> None:
    assert llama_cpp.tokenizer_path(llama_cpp.Options(path=str(model_file()))) == model_file()
    assert vocabulary().size == 49152


# --- the budget of reasoning ------------------------------------------------------------------------------------------


def budget(tokens: int, opened: int | None = 0) -> ReasoningBudget:
    closing = tuple(vocabulary().encode("\n</think>\n\n"))
    return ReasoningBudget(tokens, (ReasoningBounds("<think>", ("</think>",), closing),), opened)


async def test_reasoning_ends_with_its_budget_and_the_answer_is_that_of_a_fresh_context() -> None:
    text = chatml(("user", "Why is the sky blue?"), opening="<think>\n")
    async with running() as engine:
        free, other = await answer(engine, text), await answer(engine, "Hello!")
        jobs = [answer(engine, text, reasoning=budget(3), max_tokens=16), answer(engine, "Hello!")]
        limited, beside = await asyncio.gather(*jobs)
        closing = list(budget(3).blocks[0].closing)
        assert ids(limited)[: 3 + len(closing)] == ids(free)[:3] + closing
        assert ids(beside) == ids(other)
        await engine.control(Control("evict"))
        written = vocabulary().encode(text) + ids(limited)[: 3 + len(closing)]
        fresh = await read(engine.generate(id_prompt(written, max_tokens=16 - 3 - len(closing))))
        assert ids(fresh) == ids(limited)[3 + len(closing) :]


async def test_a_grammar_goes_on_behind_reasoning_that_was_ended() -> None:
    grammar = Constraint("lark", 'start: /[^<]*/ "</think>" /\\s*/ "yes"')
    text = chatml(("user", "Is the sky blue?"), opening="<think>\n")
    async with running() as engine:
        limited = await answer(engine, text, reasoning=budget(2), constraint=grammar, max_tokens=40)
        assert text_of(limited).endswith("yes")
        assert len(ids(limited)) < 20


# --- the log probabilities of a prompt --------------------------------------------------------------------------------


async def test_a_prompts_log_probabilities_are_those_of_generating_it() -> None:
    """Of a prompt that takes several steps, beside another stream, after the cache has it."""
    text = vocabulary().encode(chatml(("user", "Count to a hundred, please. " * 12)))
    async with running() as engine:
        made = await read(engine.generate(id_prompt(text, max_tokens=6)))
        whole = [*text, *ids(made)]
        job = read(engine.generate(id_prompt(whole, max_tokens=0, prompt_logprobs=1)))
        chunks, _ = await asyncio.gather(job, answer(engine, max_tokens=20))
        reported = [logprob for chunk in chunks if isinstance(chunk, Progress) for logprob in chunk.logprobs or ()]
        assert [logprob.id for logprob in reported] == whole[1:]
        assert (end(chunks).reason, end(chunks).usage.output, accepted(chunks).cached_tokens) == ("length", 0, 0)
        generated = [logprob for chunk in made if isinstance(chunk, Tokens) for logprob in chunk.logprobs or ()]
        for logprob, expected in zip(reported[-6:], generated, strict=True):
            assert logprob.logprob == pytest.approx(expected.logprob, abs=0.02)
            assert logprob.top == ((logprob.id, logprob.logprob),)  # greedy


async def test_the_token_that_ends_the_output_has_a_log_probability_beside_the_prompts() -> None:
    async with running() as engine:
        first = ids(await answer(engine, max_tokens=1))[0]
        chunks = await answer(engine, max_tokens=1, stop_ids=(first,), prompt_logprobs=1)
        last = [chunk for chunk in chunks if isinstance(chunk, Tokens)]
        assert [(chunk.ids, [logprob.id for logprob in chunk.logprobs or ()]) for chunk in last] == [([], [first])]
        assert end(chunks).reason == "stop"
        plain = await answer(engine, max_tokens=1, stop_ids=(first,))
        assert not any(isinstance(chunk, Tokens) for chunk in plain)
