"""Conversations that had to make room come back as they were: an agent's errands cost its main one nothing."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from modelyard.core.engine import CacheInfo, Chunk, Control
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.engines.llama_cpp.kv_snapshot import KvSnapshot
from modelyard.engines.llama_cpp.sequence_manager import KvOffload
from modelyard.engines.llama_cpp.sequences import Checkpoint, Ids
from tests.engines.llama_cpp.exact import VOCAB, exact_model, hybrid_model, recurrent_model, sliding_model
from tests.engines.llama_cpp.stage import answer as asked
from tests.engines.llama_cpp.stage import chatml, id_prompt, running, said
from tests.engines.reading import accepted, assert_alike, end, ids, read


def run(*tokens: int) -> Ids:
    return np.array(tokens, np.int32)


def image(*tokens: int, size: int = 100, **fields: Any) -> KvSnapshot:
    return KvSnapshot(run(*tokens), np.zeros(size - 4 * len(tokens), np.uint8), **fields)


# --- the lot ----------------------------------------------------------------------------------------------------------


def test_lot_gives_whoever_holds_most_of_what_is_wanted() -> None:
    short, long = image(1, 2), image(1, 2, 3, 9)
    lot = KvOffload(1000)
    lot.park(long)
    lot.park(short)
    assert lot.best(run(1, 2, 3, 4), (), can_cut=True) == (long, 3)
    assert lot.best(run(1, 2, 3, 4), (), can_cut=False) == (short, 2)
    assert lot.best(run(7), (), can_cut=True) is None
    assert lot.best(run(1, 2), (("pirate", 1.0),), can_cut=True) is None


def test_lot_takes_one_that_cannot_be_cut_up_at_its_checkpoint() -> None:
    lot = KvOffload(1000)
    lot.park(held := image(1, 2, 3, 9, checkpoints=(Checkpoint(2, np.zeros(4, np.uint8)),)))
    assert lot.best(run(1, 2, 3, 4), (), can_cut=False) == (held, 2)


def test_lot_is_bounded_and_the_oldest_goes() -> None:
    lot = KvOffload(250)
    for tokens in ((1, 1), (2, 2), (3, 3)):
        lot.park(image(*tokens))
    assert (len(lot), lot.size) == (2, 200)
    assert lot.best(run(1, 1), (), can_cut=True) is None
    lot.park(image(4, 4, size=251))
    assert len(lot) == lot.size == 0  # it did not fit even alone


def test_conversation_that_went_on_takes_the_place_of_what_it_was() -> None:
    lot = KvOffload(1000)
    lot.park(image(1, 2))
    lot.park(image(1, 2, 3))
    lot.park(image(1, 2, 3, 4, adapters=(("pirate", 1.0),)))
    assert len(lot) == 2


def test_lot_forgets_an_adapter_and_everything() -> None:
    lot = KvOffload(1000)
    lot.park(image(1, 2, adapters=(("pirate", 1.0),)))
    lot.park(image(1, 2))
    lot.forget("pirate")
    assert (len(lot), lot.size) == (1, 100)
    lot.clear()
    assert len(lot) == lot.size == 0


# --- in the engine ----------------------------------------------------------------------------------------------------

MODELS = [exact_model, sliding_model, recurrent_model, hybrid_model]


@pytest.fixture
def _parking_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine takes to read a token."""
    monkeypatch.setattr(
        "modelyard.engines.llama_cpp.sequences.is_copy_worthwhile", lambda saved, moved, costs: saved >= 8
    )


def words(seed: int, count: int = 40) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(count)]


async def answer(engine: LlamaCppEngine, tokens: list[int], session: str, **fields: Any) -> list[Chunk]:
    return await read(engine.generate(id_prompt(tokens, session=session, max_tokens=4, **fields)))


def next_turn(told: list[int], chunks: list[Chunk]) -> tuple[list[int], int]:
    """The prompt that follows an answer, and how much of it was read before: the last token was sampled only."""
    return told + ids(chunks) + words(len(told), 6), len(told) + len(ids(chunks)) - 1


@pytest.mark.usefixtures("_parking_pays")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("parallel", [1, 2])
async def test_main_conversation_outlives_sub_agents_and_errands_on_few_sequences(model: Any, parallel: int) -> None:
    async with running({"main": CacheInfo(512, parallel)}, path=str(model()), swa_full=False) as engine:
        told, kept = next_turn(words(1), await answer(engine, words(1), "main"))
        for n in range(3):
            await answer(engine, words(20 + n), f"main:agent{n}")
            await answer(engine, words(30 + n), f"main~errand{n}", priority="background")
        back = await answer(engine, told, "main")
        stats = engine.stats().caches["main"]
    assert accepted(back).cached_tokens == kept
    assert stats.evictions == 3  # the errands: nobody misses them
    async with running({"main": CacheInfo(512, 1)}, path=str(model()), swa_full=False) as engine:
        assert_alike(back, await answer(engine, told, "alone"))


@pytest.mark.usefixtures("_parking_pays")
async def test_parked_conversation_is_gone_where_nothing_is_kept() -> None:
    async with running({"main": CacheInfo(512, 1)}, path=str(exact_model()), parked_mb=0) as engine:
        told, _ = next_turn(words(1), await answer(engine, words(1), "main"))
        other = await answer(engine, words(2), "other")
        back = await answer(engine, told, "main")
    assert [accepted(chunks).cached_tokens for chunks in (other, back)] == [0, 0]
    assert [accepted(chunks).evicted for chunks in (other, back)] == [True, True]


@pytest.mark.usefixtures("_parking_pays")
async def test_evicting_a_cache_empties_its_lot() -> None:
    async with running({"main": CacheInfo(512, 1)}, path=str(exact_model())) as engine:
        told, _ = next_turn(words(1), await answer(engine, words(1), "main"))
        await answer(engine, words(2), "other")
        await engine.control(Control("evict"))
        assert accepted(await answer(engine, told, "main")).cached_tokens == 0


@pytest.mark.usefixtures("_parking_pays")
async def test_conversation_that_shares_its_start_leaves_the_parked_one_where_it_is() -> None:
    system = words(1)
    async with running({"main": CacheInfo(512, 1)}, path=str(exact_model())) as engine:
        told, kept = next_turn(system + words(2, 9), await answer(engine, system + words(2, 9), "first"))
        await answer(engine, words(3), "other")
        second = await answer(engine, system + words(4, 9), "second")
        await answer(engine, words(5), "another")
        first = await answer(engine, told, "first")
    assert [accepted(chunks).cached_tokens for chunks in (second, first)] == [len(system), kept]


@pytest.mark.usefixtures("_parking_pays")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(2))
async def test_conversations_in_any_order_say_what_each_says_alone(model: Any, seed: int) -> None:
    """Five conversations on two sequences, some of them cut back between two turns."""
    random = Random(seed)
    told = {n: words(n) for n in range(5)}
    turns: list[tuple[list[int], list[Chunk]]] = []
    async with running({"main": CacheInfo(512, 2)}, path=str(model()), swa_full=False) as engine:
        for _ in range(20):
            n = random.randrange(5)
            chunks = await answer(engine, told[n], str(n), priority=random.choice(["main", "background"]))
            assert end(chunks).reason == "length"
            turns.append((told[n], chunks))
            kept = told[n] + ids(chunks) if random.random() < 0.8 else told[n][: random.randint(20, len(told[n]))]
            told[n] = kept + words(random.randrange(1000), 8)
    for prompt, chunks in turns:
        async with running({"main": CacheInfo(512, 1)}, path=str(model()), swa_full=False) as engine:
            assert_alike(chunks, await answer(engine, prompt, "alone"))


# --- on the real model ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_parking_pays")
async def test_an_agents_next_turn_on_the_real_model_reads_only_what_is_new() -> None:
    """One sequence for a conversation, a sub-agent, a title and a verdict."""
    system = ("system", "You are a coding agent with many tools and long instructions. " * 8)
    async with running({"main": CacheInfo(1024, 1)}) as engine:
        first = await asked(engine, chatml(system, ("user", "Fix the tests.")), session="s")
        await asked(engine, chatml(("system", "Explore the code."), ("user", "Find it.")), session="s:1")
        await asked(engine, chatml(("system", "Title this."), ("user", "Fix.")), session="s~1", priority="background")
        await asked(engine, chatml(("system", "Block? " * 60), ("user", "rm")), session="s~2", priority="background")
        history = (system, ("user", "Fix the tests."), ("assistant", said(first)))
        second = await asked(engine, chatml(*history, ("user", "Now the docs.")), session="s")
    held = end(first).usage.prompt + end(first).usage.output - 1
    assert accepted(second).cached_tokens == held
