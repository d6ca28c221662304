"""KV that is used again, on a model that shows every wrong cell: the next turn, and copies between sequences."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from modelyard.core.engine import CacheInfo, Chunk, Generation, Prompt, Tokens
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.sequences import CopyCosts, CopyMethod
from tests.engines.llama_cpp.exact import VOCAB, exact_model
from tests.engines.llama_cpp.stage import Tap, id_prompt, running
from tests.engines.reading import accepted, assert_alike, end, ids, read


def words(seed: int, count: int = 24) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(count)]


SYSTEM = words(0, 40)


@asynccontextmanager
async def exact(**parallel: int) -> AsyncIterator[LlamaCppEngine]:
    caches = {name: CacheInfo(256, count) for name, count in (parallel or {"main": 2}).items()}
    async with running(caches, path=str(exact_model())) as engine:
        yield engine


async def answer(engine: LlamaCppEngine, run: list[int], **fields: object) -> list[Chunk]:
    return await read(engine.generate(id_prompt(run, **fields)))


async def alone(run: list[int], max_tokens: int = 8) -> list[Chunk]:
    """On an engine that holds nothing else."""
    async with exact(main=1) as engine:
        return await answer(engine, run, max_tokens=max_tokens)


# --- the next turn --------------------------------------------------------------------------------------------------


async def test_second_turn_reads_only_what_is_new() -> None:
    async with exact() as engine:
        first = await answer(engine, SYSTEM, session="a")
        turn = SYSTEM + ids(first) + words(1)
        held, before = len(SYSTEM) + len(ids(first)) - 1, engine.stats()
        second = await answer(engine, turn, session="a")
        after = engine.stats()
    # The last token of an answer was sampled and never read: no KV stands for it.
    assert accepted(second).cached_tokens == accepted(second).divergence == held
    assert after.evaluated_tokens - before.evaluated_tokens == len(turn) - held
    assert after.reused_tokens - before.reused_tokens == held
    assert_alike(second, await alone(turn))


async def test_conversation_that_was_edited_is_read_from_the_edit_on() -> None:
    edited = SYSTEM[:20] + words(1)
    assert edited[20] != SYSTEM[20]
    async with exact() as engine:
        await answer(engine, SYSTEM, session="a")
        chunks = await answer(engine, edited, session="a")
    assert accepted(chunks).cached_tokens == 20
    assert_alike(chunks, await alone(edited))


async def test_new_conversation_goes_to_an_empty_sequence_and_evicts_only_where_there_is_none() -> None:
    async with exact(main=2) as engine:
        got = [await answer(engine, words(n), session=str(n)) for n in range(1, 4)]
        assert [accepted(chunks).evicted for chunks in got] == [False, False, True]
        stats = engine.stats().caches["main"]
        assert (stats.evictions, stats.evaluated_tokens) == (1, 3 * len(words(1)))
        assert [(one.id, one.tokens, one.running) for one in stats.sequences] == [(n, 31, False) for n in range(2)]
        assert all(one.used and one.session and one.session not in "123" for one in stats.sequences)
        assert accepted(await answer(engine, words(2), session="2")).cached_tokens == len(words(2)) - 1
    assert_alike(got[2], await alone(words(3)))


# --- copies between sequences ---------------------------------------------------------------------------------------


class Followed(Tap):
    """Hands the engine further jobs the moment the first job speaks: they find it running, with its prompt read."""

    def __init__(self, engine: LlamaCppEngine, *prompts: Prompt) -> None:
        super().__init__(engine)
        self._engine, self._prompts = engine, prompts
        self.followers: list[Generation[Chunk]] = []

    def on_chunk(self, job: LlamaCppJob, chunk: Chunk) -> None:
        if isinstance(chunk, Tokens) and not self.followers:
            self.followers = [self._engine.generate(prompt) for prompt in self._prompts]


@pytest.fixture(params=["stream", "state"])
def _copies_pay(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine takes to read a token; and by either way, where there is one."""

    def way(
        saved: int, size: int, held: int, window: int, costs: CopyCosts, ways: list[CopyMethod]
    ) -> CopyMethod | None:
        first: CopyMethod | None = request.param if request.param in ways else next(iter(ways), None)
        return first if saved >= 8 else None

    monkeypatch.setattr("modelyard.engines.llama_cpp.sequences.choose_copy_method", way)


@pytest.mark.usefixtures("_copies_pay")
async def test_shared_start_is_copied_from_a_running_sequence() -> None:
    runs = [SYSTEM + words(n) for n in range(1, 4)]
    async with exact(main=3) as engine:
        tap = Followed(engine, *(id_prompt(run, session=str(run)) for run in runs[1:]))
        got = [await answer(engine, runs[0], session="a", max_tokens=60)]
        got += [await read(follower) for follower in tap.followers]
    assert [accepted(chunks).cached_tokens for chunks in got] == [0, len(SYSTEM), len(SYSTEM)]
    for chunks, run in zip(got, runs, strict=True):
        assert_alike(chunks, await alone(run, max_tokens=end(chunks).usage.output))


@pytest.mark.usefixtures("_copies_pay")
async def test_copy_and_its_source_go_on_apart() -> None:
    runs = [SYSTEM + words(n) for n in (1, 2)]
    async with exact(main=2) as engine:
        tap = Followed(engine, id_prompt(runs[1], session="b"))
        first = [await answer(engine, runs[0], session="a", max_tokens=30), await read(tap.followers[0])]
        turns = [run + ids(chunks) + words(9) for run, chunks in zip(runs, first, strict=True)]
        second = [await answer(engine, turn, session=name) for turn, name in zip(turns, "ab", strict=True)]
    for turn, chunks in zip(turns, second, strict=True):
        assert accepted(chunks).cached_tokens == len(turn) - len(words(9)) - 1
        assert_alike(chunks, await alone(turn))


@pytest.mark.usefixtures("_copies_pay")
async def test_copy_onto_a_sequence_that_held_something_else_leaves_nothing_of_it() -> None:
    run = SYSTEM + words(3)
    async with exact(main=2) as engine:
        await answer(engine, SYSTEM + words(1), session="a")
        await answer(engine, words(2, 100), session="b")
        chunks = await answer(engine, run, session="b")
    assert accepted(chunks).cached_tokens == len(SYSTEM)
    assert_alike(chunks, await alone(run))


async def test_few_shared_tokens_are_read_anew_instead() -> None:
    async with exact(main=2) as engine:
        tap = Followed(engine, id_prompt(SYSTEM + words(2), session="b"))
        await answer(engine, SYSTEM + words(1), session="a", max_tokens=30)
        place = accepted(await read(tap.followers[0]))
    assert (place.cached_tokens, place.elsewhere) == (0, len(SYSTEM))


async def test_short_prompt_that_comes_again_goes_on_in_the_sequence_of_its_long_answer() -> None:
    run = words(1)
    async with exact(main=2) as engine:
        got = [await answer(engine, run, max_tokens=60) for _ in range(3)]
    assert [accepted(chunks).cached_tokens for chunks in got] == [0, len(run) - 1, len(run) - 1]
    assert not any(accepted(chunks).elsewhere or accepted(chunks).evicted for chunks in got)
    assert_alike(got[2], await alone(run, max_tokens=60))


# --- copies between caches --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_copies_pay")
async def test_shared_system_prompt_is_copied_from_a_cache_that_is_alike() -> None:
    runs = [SYSTEM + words(n) for n in (1, 2)]
    async with exact(main=2, fast=2) as engine:
        first = await answer(engine, runs[0], session="a")
        second = await answer(engine, runs[1], session="b", cache="fast")
        stats = engine.stats()
        again = await answer(engine, runs[0] + ids(first) + words(3), session="a")
    assert accepted(second).cached_tokens == stats.copied_tokens == len(SYSTEM)
    assert not accepted(second).evicted
    assert stats.evaluated_tokens == len(runs[0]) + len(runs[1]) - len(SYSTEM)
    assert accepted(again).cached_tokens == len(runs[0]) + len(ids(first)) - 1, "the source keeps its own"
    assert_alike(second, await alone(runs[1]))
    assert_alike(again, await alone(runs[0] + ids(first) + words(3)))


@pytest.mark.usefixtures("_copies_pay")
@pytest.mark.parametrize(
    "other",
    [
        CacheInfo(256, 2, type_k="f32"),
        CacheInfo(256, 2, type_v="f32"),
        CacheInfo(256, 2, flash_attn=False),
        CacheInfo(256, 3),
    ],
)
async def test_nothing_is_copied_between_caches_that_are_not_alike(other: CacheInfo) -> None:
    async with running({"main": CacheInfo(256, 2), "fast": other}, path=str(exact_model())) as engine:
        await answer(engine, SYSTEM + words(1), session="a")
        chunks = await answer(engine, SYSTEM + words(2), session="b", cache="fast")
    assert accepted(chunks).cached_tokens == 0


@pytest.mark.usefixtures("_copies_pay")
async def test_conversation_longer_than_the_other_caches_window_is_not_copied() -> None:
    async with running({"main": CacheInfo(512, 2), "fast": CacheInfo(256, 2)}, path=str(exact_model())) as engine:
        await answer(engine, SYSTEM + words(1, 400), session="a")
        await answer(engine, SYSTEM[:20], session="b", cache="fast")
        long = await answer(engine, SYSTEM + words(2), session="b", cache="fast")
        await answer(engine, SYSTEM + words(1), session="c")
        short = await answer(engine, SYSTEM + words(3), session="d", cache="fast")
    assert [accepted(chunks).cached_tokens for chunks in (long, short)] == [20, len(SYSTEM)]
    assert_alike(short, await alone(SYSTEM + words(3)))


@pytest.mark.usefixtures("_copies_pay")
async def test_conversations_that_come_at_once_are_copied_one_from_the_other() -> None:
    """A copy that waits for the next decode is nothing yet that could be copied by hand, nor may its source change."""
    runs = [SYSTEM + words(n) for n in range(1, 6)]
    homes = ["main", "main", "fast", "main", "fast"]
    async with exact(main=4, fast=4) as engine:
        tap = Followed(
            engine,
            *(id_prompt(run, session=str(run), cache=home) for run, home in list(zip(runs, homes, strict=True))[1:]),
        )
        got = [await answer(engine, runs[0], session="a", max_tokens=60)]
        got += [await read(follower) for follower in tap.followers]
    assert [accepted(chunks).cached_tokens for chunks in got] == [0, *[len(SYSTEM)] * 4]
    for chunks, run in zip(got, runs, strict=True):
        assert_alike(chunks, await alone(run, max_tokens=end(chunks).usage.output))


async def test_measured_costs_decide_by_themselves() -> None:
    """Nothing is asked of what they decide: only that they are measured, and that what comes of it is right."""
    long = words(0, 300)
    async with running({"main": CacheInfo(512, 2), "fast": CacheInfo(512, 2)}, path=str(exact_model())) as engine:
        await answer(engine, long + words(1), session="a")
        chunks = await answer(engine, long + words(2), session="b", cache="fast")
        assert engine._caches["main"].places.kv.costs != CopyCosts()
    assert accepted(chunks).cached_tokens in (0, len(long))
    async with running({"main": CacheInfo(512, 1)}, path=str(exact_model())) as engine:
        assert_alike(chunks, await answer(engine, long + words(2)))


# --- isolation ------------------------------------------------------------------------------------------------------


class Reaper(Tap):
    """Cancels jobs on the engine's thread, each after so many of its chunks: in the middle of reading or speaking."""

    def __init__(self, engine: LlamaCppEngine) -> None:
        super().__init__(engine)
        self.left: dict[int, int] = {}  # chunks until the end, by the job's number

    def on_chunk(self, job: LlamaCppJob, chunk: Chunk) -> None:
        if job.arrived in self.left:
            self.left[job.arrived] -= 1
            if self.left[job.arrived] <= 0:
                job.cancel()


@pytest.mark.usefixtures("_copies_pay")
@pytest.mark.parametrize("seed", range(6))
async def test_conversations_in_any_order_say_what_each_says_alone(seed: int) -> None:
    """Two caches, alike or not, eight conversations on five or six sequences, many turns, some with a common start,
    some cancelled: sequences are taken over, copied and cut, several jobs at a time."""
    random = Random(seed)
    homes = {n: ("main", "fast")[n % 2] for n in range(8)}
    places = {"main": 3, "fast": 2 + seed % 2}
    told = {n: (SYSTEM if n % 4 < 2 else []) + words(100 + n) for n in homes}
    turns: list[tuple[list[int], list[Chunk]]] = []
    async with exact(**places) as engine:
        reaper = Reaper(engine)
        for _ in range(24):
            batch = _fitting(random.sample(list(homes), random.randint(1, 5)), homes, places)
            reaper.left = {engine._arrived + 1: random.randint(1, 6)} if random.random() < 0.4 else {}
            jobs = {n: engine.generate(id_prompt(told[n], cache=homes[n], session=str(n))) for n in batch}
            for n, job in jobs.items():
                chunks = await read(job)
                assert end(chunks).reason == ("cancelled" if n == batch[0] and reaper.left else "length")
                if ids(chunks):  # a cancelled answer is as true as far as it goes
                    turns.append((told[n], chunks))
                    told[n] = _continued(told[n], chunks, random)
    for run, chunks in turns:
        single = await alone(run, max_tokens=len(ids(chunks)))
        assert_alike(chunks, single)


def _continued(run: list[int], chunks: list[Chunk], random: Random) -> list[int]:
    """The next turn; now and then the conversation is cut back first."""
    kept = run[: random.randint(10, len(run))] if random.random() < 0.2 or len(run) > 150 else run + ids(chunks)
    return kept + words(random.randrange(1000), 12)


def _fitting(order: list[int], homes: dict[int, str], places: dict[str, int]) -> list[int]:
    """No more than a cache has places: the scheduler hands out no more."""
    return [n for at, n in enumerate(order) if sum(homes[m] == homes[n] for m in order[:at]) < places[homes[n]]]
