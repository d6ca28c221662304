"""Going back in models that cannot, or not far: by what KV still holds, else by checkpoints, else from the start."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from modelyard.core.engine import CacheInfo, Chunk, Control
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from tests.engines.llama_cpp.exact import N_SWA, VOCAB, hybrid_model, recurrent_model, sliding_model
from tests.engines.llama_cpp.stage import id_prompt, running
from tests.engines.reading import accepted, assert_alike, end, ids, read

MODELS = [sliding_model, recurrent_model, hybrid_model]
TAIL = 8  # before the end of a prompt
LONG = 300  # tokens after which a window's cells were used again
Model = Callable[[], Path]


@asynccontextmanager
async def opened(
    model: Model, caches: dict[str, CacheInfo] | None = None, **options: Any
) -> AsyncIterator[LlamaCppEngine]:
    """With a cache that forgets what lies behind the window, as large models need it; the default keeps all."""
    chosen = {"path": str(model()), "swa_full": False} | options
    async with running(caches or {"main": CacheInfo(1024, 2)}, **chosen) as engine:
        yield engine


@pytest.fixture
def _copies_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine takes to read a token."""
    monkeypatch.setattr(
        "modelyard.engines.llama_cpp.sequences.is_copy_worthwhile", lambda saved, moved, costs: saved >= 8
    )


def words(seed: int, count: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(count)]


async def answer(engine: LlamaCppEngine, run: list[int], session: str = "a", **fields: Any) -> list[Chunk]:
    chunks = await read(engine.generate(id_prompt(run, session=session, **fields)))
    assert end(chunks).reason == "length"
    return chunks


async def alone(model: Model, run: list[int]) -> list[Chunk]:
    async with opened(model) as engine:
        return await answer(engine, run)


@pytest.mark.parametrize("model", MODELS)
async def test_conversation_that_only_grows_is_read_once(model: Model) -> None:
    async with opened(model) as engine:
        run = words(1, 300)
        first = await answer(engine, run)
        turn = run + ids(first) + words(2, 20)
        second = await answer(engine, turn)
    assert accepted(second).cached_tokens == len(run) + len(ids(first)) - 1
    assert_alike(second, await alone(model, turn))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kept", [1, N_SWA, 150, 299])
async def test_conversation_that_was_cut_back_says_what_it_says_alone(model: Model, kept: int) -> None:
    run = words(1, 300)
    edited = run[:kept] + words(3, 20)
    async with opened(model) as engine:
        await answer(engine, run)
        chunks = await answer(engine, edited)
    assert_alike(chunks, await alone(model, edited))


@pytest.mark.parametrize("model", MODELS)
async def test_window_or_state_that_is_gone_is_not_counted_as_cached(model: Model) -> None:
    run = words(1, 300)
    async with opened(model) as engine:
        await answer(engine, run)
        assert accepted(await answer(engine, run[:20] + words(3, 20))).cached_tokens == 0


@pytest.mark.parametrize("model", MODELS)
async def test_resent_prompt_is_read_from_a_little_before_its_end_and_says_the_same_again(model: Model) -> None:
    run = words(1, 100)
    async with opened(model) as engine:
        first, second = [await answer(engine, run, max_tokens=LONG) for _ in range(2)]
    assert accepted(second).cached_tokens == len(run) - TAIL
    assert_alike(first, second)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.usefixtures("_copies_pay")
async def test_copy_of_a_longer_sequence_says_what_it_says_alone(model: Model) -> None:
    run = words(1, 300)
    async with opened(model) as engine:
        await answer(engine, run, "a")
        await answer(engine, words(9, 30), "b")
        chunks = await answer(engine, run[:100] + words(4, 10), "b")
    assert_alike(chunks, await alone(model, run[:100] + words(4, 10)))


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
async def test_edited_last_message_is_read_from_the_end_of_the_turn_before(model: Model) -> None:
    async with opened(model) as engine:
        run = words(1, 100)
        told = run + ids(await answer(engine, run, max_tokens=50))
        await answer(engine, told + words(2, LONG))
        edited = told + words(3, 60)
        chunks = await answer(engine, edited)
    assert accepted(chunks).cached_tokens == len(told) - 1  # the last word of an answer was never read
    assert_alike(chunks, await alone(model, edited))


@pytest.mark.parametrize("model", MODELS)
async def test_answer_told_in_other_words_is_read_from_the_prompt_on(model: Model) -> None:
    run = words(1, 200)
    other = run + words(4, 50)
    async with opened(model) as engine:
        await answer(engine, run, max_tokens=LONG)
        chunks = await answer(engine, other)
    assert accepted(chunks).cached_tokens == len(run) - TAIL
    assert_alike(chunks, await alone(model, other))


@pytest.mark.parametrize("model", MODELS)
async def test_third_conversation_starts_where_the_first_two_parted(model: Model) -> None:
    system = words(1, 150)
    runs = [system + words(n, LONG) for n in range(2, 5)]
    async with opened(model, {"main": CacheInfo(1024, 1)}) as engine:
        got = [await answer(engine, run, session=str(n)) for n, run in enumerate(runs)]
    assert [accepted(chunks).cached_tokens for chunks in got] == [0, 0, len(system)]
    for run, chunks in zip(runs, got, strict=True):
        assert_alike(chunks, await alone(model, run))


@pytest.mark.parametrize("model", MODELS)
async def test_going_back_behind_all_checkpoints_reads_everything_again(model: Model) -> None:
    run = words(1, 300)
    edited = run[:100] + words(3, 60)
    async with opened(model) as engine:
        told = run + ids(await answer(engine, run))
        await answer(engine, told + words(2, 60))
        chunks = await answer(engine, edited)
        (slot, _) = engine._caches["main"].slots
        assert all(one.tokens <= len(edited) for one in slot.checkpoints), (
            "what was read over is no checkpoint any more"
        )
    assert accepted(chunks).cached_tokens == 0
    assert_alike(chunks, await alone(model, edited))


@pytest.mark.parametrize("model", MODELS)
async def test_checkpoint_of_what_was_read_over_is_never_taken_up(model: Model) -> None:
    run = words(1, 100)
    async with opened(model) as engine:
        told = run + ids(await answer(engine, run))
        await answer(engine, told + words(2, LONG))
        other = run + words(3, 500)
        await answer(engine, other)
        edited = other[:500] + words(4, 60)
        chunks = await answer(engine, edited)
    assert_alike(chunks, await alone(model, edited))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("bound", [{"checkpoints": 3}, {"checkpoint_mb": 0}, {"checkpoints": 0}])
async def test_checkpoints_are_bounded(model: Model, bound: dict[str, int]) -> None:
    most = bound.get("checkpoints", 0)
    async with opened(model, **bound) as engine:
        told = words(1, 100)
        for turn in range(5):
            told = told + ids(await answer(engine, told)) + words(turn, 60)
            assert len(engine._caches["main"].slots[0].checkpoints) <= most
        chunks = await answer(engine, told)
    assert_alike(chunks, await alone(model, told))


@pytest.mark.parametrize("model", MODELS)
async def test_checkpoints_of_an_evicted_conversation_are_gone(model: Model) -> None:
    run = words(1, 200)
    async with opened(model) as engine:
        await answer(engine, run)
        await engine.control(Control("evict"))
        assert not engine._caches["main"].slots[0].checkpoints
        assert accepted(await answer(engine, run)).cached_tokens == 0


async def test_window_that_is_kept_whole_needs_no_checkpoint() -> None:
    run = words(1, 200)
    edited = run[:100] + words(3, 60)
    async with opened(sliding_model, swa_full=True) as engine:
        await answer(engine, run)
        chunks = await answer(engine, edited)
        assert not engine._caches["main"].slots[0].checkpoints
    assert accepted(chunks).cached_tokens == 100
    assert_alike(chunks, await alone(sliding_model, edited))


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_copies_pay")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("home", ["main", "fast"])
async def test_copy_starts_where_the_source_can_be_taken_up(model: Model, home: str) -> None:
    run = words(1, 200)
    other = run + words(4, 50)
    async with opened(model, {"main": CacheInfo(1024, 2), "fast": CacheInfo(1024, 2)}) as engine:
        first = await answer(engine, run, "a")
        chunks = await answer(engine, other, "b", cache=home)
        assert accepted(chunks).cached_tokens == len(run) - TAIL
        assert engine.stats().copied_tokens == len(run) - TAIL
        turn = run + ids(first) + words(5, 20)
        source = await answer(engine, turn, "a")
    assert accepted(source).cached_tokens == len(run) + len(ids(first)) - 1, "the source keeps its own"
    assert_alike(chunks, await alone(model, other))
    assert_alike(source, await alone(model, turn))


@pytest.mark.usefixtures("_copies_pay")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(2))
async def test_conversations_in_any_order_say_what_each_says_alone(model: Model, seed: int) -> None:
    """More conversations than sequences, in two caches, with a common start, continued and cut back."""
    random = Random(seed)
    system, turns = words(0, 60), []
    told = {n: (system if n % 2 else []) + words(100 + n, 40) for n in range(5)}
    async with opened(model, {"main": CacheInfo(1024, 2), "fast": CacheInfo(1024, 2)}) as engine:
        for _ in range(14):
            batch = random.sample(list(told), 2)
            jobs = {
                n: engine.generate(id_prompt(told[n], session=str(n), cache=("main", "fast")[n % 2])) for n in batch
            }
            for n, job in jobs.items():
                chunks = await read(job)
                turns.append((told[n], chunks))
                kept = told[n][: random.randint(30, len(told[n]))] if random.random() < 0.3 else told[n] + ids(chunks)
                told[n] = kept + words(random.randrange(1000), 40)
    async with opened(model, {"main": CacheInfo(1024, 1)}, checkpoints=0) as engine:
        for run, chunks in turns:
            await engine.control(Control("evict"))
            assert_alike(chunks, await answer(engine, run))
