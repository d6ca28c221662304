"""Decodes that are launched before the last tokens are emitted, as on a GPU: forced here on a CPU."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import CacheInfo, Chunk, Control, Generation, Prompt, Tokens
from modelyard.core.request import Sampling
from modelyard.engines.llama_cpp import context
from modelyard.engines.llama_cpp.batch import DecodeBatch
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.speculation import DraftCost, Speculator
from tests.engines.llama_cpp.exact_models import exact_model, repetitive_model
from tests.engines.llama_cpp.helpers import Tap, id_prompt, running
from tests.engines.llama_cpp.test_sequence_manager import SYSTEM, words
from tests.engines.reading import accepted, assert_alike, end, ids, read

SAMPLED = Sampling(temperature=0.9, top_k=50, seed=5)
PENALISED = Sampling(temperature=0.9, repetition_penalty=1.2, seed=5)
TYPICAL = Sampling(temperature=0.9, typical_p=0.8, seed=5)  # sampled by llama.cpp


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As with a library built for GPUs. Collects the number of jobs of each launched decode."""
    sent: list[int] = []
    plain = context.LlamaContext._launch

    def counted(cache: context.LlamaContext, batch: DecodeBatch, tokens: list[int]) -> None:
        sent.append(len(batch))
        plain(cache, batch, tokens)

    monkeypatch.setattr(context.lib, "llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr(context.LlamaContext, "_launch", counted)
    return sent


@asynccontextmanager
async def exact(parallel: int = 4, **options: Any) -> AsyncIterator[LlamaCppEngine]:
    async with running({"main": CacheInfo(256, parallel)}, **({"path": str(exact_model())} | options)) as engine:
        yield engine


class AtFifthToken(Tap):
    """After the fifth token of the first job it runs `action` on the loop, and the engine's thread waits for it."""

    def __init__(self, engine: LlamaCppEngine, action: Callable[[], object]) -> None:
        super().__init__(engine)
        self._action, self._loop, self._count = action, asyncio.get_running_loop(), 0

    def on_chunk(self, job: LlamaCppJob, chunk: Chunk) -> None:
        if job.arrival != 1 or not isinstance(chunk, Tokens):
            return
        self._count += 1
        if self._count == 5:
            done = threading.Event()
            self._loop.call_soon_threadsafe(lambda: (self._action(), done.set()))
            assert done.wait(60)


async def answer(engine: LlamaCppEngine, run: list[int], **fields: Any) -> list[Chunk]:
    return await read(engine.generate(id_prompt(run, **fields)))


async def at_once(engine: LlamaCppEngine, *prompts: Prompt) -> list[list[Chunk]]:
    """The answers to prompts that are all in the inbox when the thread takes the first of them."""
    all_there = threading.Event()
    held = asyncio.create_task(engine.run_on_thread(lambda: all_there.wait(60) and None))
    await asyncio.sleep(0)  # the thread waits before it gets the prompts
    streams = [engine.generate(prompt) for prompt in prompts]
    all_there.set()
    await held
    return [await read(stream) for stream in streams]


async def on_a_cpu(run: list[int], **fields: Any) -> list[Chunk]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context.lib, "llama_supports_gpu_offload", lambda: False)
        async with exact(1) as engine:
            return await answer(engine, run, **fields)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0), SAMPLED, PENALISED, TYPICAL],
    ids=["greedy", "sampled", "penalised", "typical"],
)
@pytest.mark.parametrize("logprobs", [None, 2])
async def test_answers_are_the_same_as_on_a_cpu(ahead: list[int], sampling: Sampling, logprobs: int | None) -> None:
    asked = {"max_tokens": 12, "sampling": sampling, "logprobs": logprobs}
    async with exact() as engine:
        found = await answer(engine, SYSTEM, **asked)
    assert len(ahead) == 10  # the first comes with the prompt, and the second with the step after it
    assert ids(found) == ids(await on_a_cpu(SYSTEM, **asked))
    assert (end(found).reason, end(found).usage.output) == ("length", 12)


async def test_several_jobs_each_run_to_their_own_end(ahead: list[int]) -> None:
    asked = [
        {"max_tokens": 5, "sampling": Sampling(temperature=0)},
        {"max_tokens": 9, "sampling": SAMPLED},
        {"max_tokens": 14, "sampling": PENALISED},
        {"max_tokens": 11, "sampling": TYPICAL},
    ]
    async with exact() as engine:
        runs = (answer(engine, words(at), session=str(at), logprobs=None, **one) for at, one in enumerate(asked))
        found = await asyncio.gather(*runs)
    for at, one in enumerate(asked):
        assert ids(found[at]) == ids(await on_a_cpu(words(at), logprobs=None, **one))
        assert (end(found[at]).reason, end(found[at]).usage.output) == ("length", one["max_tokens"])
    assert ahead


async def test_jobs_that_are_sampled_together_generate_what_each_generates_alone(ahead: list[int]) -> None:
    fields = {"max_tokens": 20, "sampling": SAMPLED, "logprobs": None}
    async with exact() as engine:
        found = await at_once(engine, *(id_prompt(words(at), session=str(at), **fields) for at in range(4)))
    for at, chunks in enumerate(found):
        assert ids(chunks) == ids(await on_a_cpu(words(at), **fields))
    assert 4 in ahead


async def test_a_stop_token_of_one_job_does_not_end_others(ahead: list[int]) -> None:
    whole = ids(await on_a_cpu(words(1), max_tokens=12, logprobs=None))
    stop = next(token for at, token in enumerate(whole) if at >= 4 and token not in whole[:at])
    async with exact() as engine:
        fields = {"max_tokens": 12, "logprobs": None}
        short, long = await asyncio.gather(
            answer(engine, words(1), session="a", stop_ids=(stop,), **fields),
            answer(engine, words(2), session="b", **fields),
        )
    assert ids(short) == whole[: whole.index(stop)]
    assert end(short).reason == "stop"
    assert ids(long) == ids(await on_a_cpu(words(2), **fields))
    assert ahead


async def test_a_stop_token_of_another_job_does_not_exceed_a_limit(ahead: list[int]) -> None:
    fields = {"max_tokens": 12, "logprobs": None}
    alone = [ids(await on_a_cpu(words(at), **fields)) for at in (1, 2)]
    nearly_last = alone[0][-2]
    assert nearly_last not in alone[1]
    asked = [
        id_prompt(words(1), session="a", **fields),
        id_prompt(words(2), session="b", stop_ids=(nearly_last,), **fields | {"max_tokens": 40}),
    ]
    async with exact() as engine:
        found = await at_once(engine, *asked)
    assert ids(found[0]) == alone[0]
    assert end(found[0]).reason == "length"
    assert ids(found[1])[:12] == alone[1]
    assert 2 in ahead


async def test_the_next_turn_reuses_all_evaluated_tokens(ahead: list[int]) -> None:
    async with exact() as engine:
        first = await answer(engine, SYSTEM, session="a", max_tokens=9)
        turn = SYSTEM + ids(first) + words(1)
        second = await answer(engine, turn, session="a")
    assert accepted(second).cached_tokens == len(SYSTEM) + 8
    assert_alike(second, await on_a_cpu(turn))
    assert ahead


async def test_a_new_job_joins_running_ones(ahead: list[int]) -> None:
    async with exact() as engine:
        came: list[Generation[Chunk]] = []
        AtFifthToken(engine, lambda: came.append(engine.generate(id_prompt(words(2), session="b", max_tokens=20))))
        first = await answer(engine, SYSTEM, session="a", max_tokens=120)
        second = await read(came[0])
    assert ids(first) == ids(await on_a_cpu(SYSTEM, max_tokens=120))
    assert ids(second) == ids(await on_a_cpu(words(2), max_tokens=20))
    assert set(ahead) == {1, 2}


async def test_a_cancelled_job_affects_neither_others_nor_its_kv(ahead: list[int]) -> None:
    async with exact() as engine:
        AtFifthToken(engine, lambda: leaving.cancel())
        leaving = engine.generate(id_prompt(SYSTEM, max_tokens=180, session="a"))
        staying = asyncio.create_task(answer(engine, words(3), session="b", max_tokens=100))
        cancelled = await read(leaving)
        again = await answer(engine, SYSTEM + ids(cancelled) + words(4), session="a")
        stayed = await staying
    assert end(cancelled).reason == "cancelled"
    assert len(ids(cancelled)) in (5, 6), "one more if a decode was in flight"
    assert accepted(again).cached_tokens == len(SYSTEM) + len(ids(cancelled)) - 1
    assert_alike(again, await on_a_cpu(SYSTEM + ids(cancelled) + words(4)))
    assert ids(stayed) == ids(await on_a_cpu(words(3), max_tokens=100))
    assert ahead


async def test_kv_is_saved_in_the_middle_of_a_stream_and_restored(ahead: list[int], tmp_path: Path) -> None:
    async with exact(kv_store=str(tmp_path)) as engine:
        stream = engine.generate(id_prompt(SYSTEM, max_tokens=150, session="a"))
        received = [await anext(stream) for _ in range(4)]
        await engine.control(Control("save"))
        received.append(await read(stream))
    output = ids([chunk for batch in received for chunk in batch])
    async with exact(kv_store=str(tmp_path)) as engine:
        turn = SYSTEM + output + words(5)
        again = await answer(engine, turn, session="a")
    assert accepted(again).cached_tokens > len(SYSTEM)
    assert_alike(again, await on_a_cpu(turn))
    assert ahead


async def test_drafts_are_tried_instead(ahead: list[int]) -> None:
    async with exact(path=str(repetitive_model()), speculation="ngram") as engine:
        found = await answer(engine, SYSTEM, max_tokens=60)
        tried = engine.stats()
    assert (end(found).reason, len(ids(found))) == ("length", 60)
    assert tried.accepted_tokens > len(ahead), "most tokens were drafted"


async def test_a_launch_does_not_wait_for_drafts_that_do_not_pay(
    ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftCost, "per_row", lambda *_: 1.0)  # a drafted row costs as much as a step
    order: list[str] = []
    launch, draft = context.LlamaContext._launch, Speculator.draft
    monkeypatch.setattr(context.LlamaContext, "_launch", lambda *given: (order.append("launch"), launch(*given))[1])
    monkeypatch.setattr(Speculator, "draft", lambda *given: (order.append("draft"), draft(*given))[1])
    async with exact(path=str(repetitive_model()), speculation="auto") as engine:
        found = await answer(engine, SYSTEM, max_tokens=12, logprobs=None)
        assert engine.stats().guessed_tokens == 0
    assert order[:5] == ["draft", "launch", "draft", "launch", "draft"]
    assert len(ahead) == 10
    async with exact(path=str(repetitive_model())) as engine:
        assert ids(found) == ids(await answer(engine, SYSTEM, max_tokens=12, logprobs=None))


async def test_a_failed_launch_is_decoded_again_in_the_next_step(
    ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = context.lib.llama_decode, 0

    def fails_once(raw: Any, batch: Any) -> int:
        nonlocal calls
        calls += 1
        return 1 if calls == 4 else plain(raw, batch)

    async with exact() as engine:
        monkeypatch.setattr(context.lib, "llama_decode", fails_once)
        found = await answer(engine, words(6, 8), max_tokens=10)
        monkeypatch.setattr(context.lib, "llama_decode", plain)
    assert ids(found) == ids(await on_a_cpu(words(6, 8), max_tokens=10))
