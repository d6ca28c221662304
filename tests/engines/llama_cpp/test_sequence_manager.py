"""KV reuse on models that show every wrong cell: next turns, copies, rewinding, and offloaded conversations."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import numpy as np
import pytest

from modelyard.core.engine import CacheInfo, Chunk, Control, Generation, Progress, Prompt, Tokens
from modelyard.core.errors import Overloaded
from modelyard.engines.llama_cpp.batch import DecodeBatch, LlamaBatch
from modelyard.engines.llama_cpp.context import LlamaContext
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.kv_snapshot import KvSnapshot
from modelyard.engines.llama_cpp.sequence_manager import ParkedKv
from modelyard.engines.llama_cpp.sequences import Checkpoint, CopyCosts, CopyMethod, TokenIds
from tests.engines.llama_cpp.exact_models import (
    N_SWA,
    VOCAB,
    exact_model,
    hybrid_model,
    recurrent_model,
    shallow_model,
    sliding_model,
)
from tests.engines.llama_cpp.helpers import Tap, chatml, id_prompt, running, text_of
from tests.engines.llama_cpp.helpers import answer as asked
from tests.engines.reading import accepted, assert_alike, end, ids, read
from tests.real_models import ENGLISH, GEMMA_ROUNDS, gemma, gemma_vocabulary


def words(seed: int, count: int = 24) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(count)]


SYSTEM = words(0, 40)


@asynccontextmanager
async def exact(*, share: bool = False, unified: bool = False, **parallel: int) -> AsyncIterator[LlamaCppEngine]:
    caches = {name: CacheInfo(256, count) for name, count in (parallel or {"main": 2}).items()}
    async with running(caches, path=str(exact_model()), share_across_caches=share, kv_unified=unified) as engine:
        yield engine


async def answer(engine: LlamaCppEngine, run: list[int], **fields: object) -> list[Chunk]:
    return await read(engine.generate(id_prompt(run, **fields)))


async def alone(run: list[int], max_tokens: int = 8) -> list[Chunk]:
    """On an empty engine."""
    async with exact(main=1) as engine:
        return await answer(engine, run, max_tokens=max_tokens)


# --- the next turn --------------------------------------------------------------------------------------------------


async def test_the_second_turn_evaluates_only_new_tokens() -> None:
    async with exact() as engine:
        first = await answer(engine, SYSTEM, session="a")
        turn = SYSTEM + ids(first) + words(1)
        held, before = len(SYSTEM) + len(ids(first)) - 1, engine.stats()
        second = await answer(engine, turn, session="a")
        after = engine.stats()
    # The last token of an answer was sampled but never evaluated: it has no KV.
    assert accepted(second).cached_tokens == accepted(second).divergence == held
    assert after.evaluated_tokens - before.evaluated_tokens == len(turn) - held
    assert after.reused_tokens - before.reused_tokens == held
    assert_alike(second, await alone(turn))


async def test_an_edited_conversation_is_evaluated_from_the_edit_on() -> None:
    edited = SYSTEM[:20] + words(1)
    assert edited[20] != SYSTEM[20]
    async with exact() as engine:
        await answer(engine, SYSTEM, session="a")
        chunks = await answer(engine, edited, session="a")
    assert accepted(chunks).cached_tokens == 20
    assert_alike(chunks, await alone(edited))


async def test_a_new_conversation_evicts_only_if_no_sequence_is_empty() -> None:
    async with exact(main=2) as engine:
        got = [await answer(engine, words(n), session=str(n)) for n in range(1, 4)]
        assert [accepted(chunks).evicted for chunks in got] == [False, False, True]
        stats = engine.stats().caches["main"]
        assert (stats.evictions, stats.evaluated_tokens) == (1, 3 * len(words(1)))
        assert [(one.id, one.tokens, one.running) for one in stats.sequences] == [(n, 31, False) for n in range(2)]
        assert all(one.used and one.session and one.session not in "123" for one in stats.sequences)
        assert accepted(await answer(engine, words(2), session="2")).cached_tokens == len(words(2)) - 1
    assert_alike(got[2], await alone(words(3)))


@pytest.mark.parametrize("session", ["main", None])
async def test_conversations_under_one_name_keep_their_kv(session: str | None) -> None:
    """Sub-agents with the main agent's session, or chats with one `prompt_cache_key`."""
    async with exact(main=3) as engine:
        talks = [words(n, 60) for n in (1, 2)]
        for turn in range(3):
            for n, talk in enumerate(talks):
                chunks = await answer(engine, talk, session=session)
                assert accepted(chunks).cached_tokens == (len(talk) - 25 if turn else 0)
                talks[n] = talk + ids(chunks) + words(10 * turn + n)
                assert_alike(chunks, await alone(talk))


async def test_the_tree_shows_what_conversations_share_and_what_is_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    worthwhile = "modelyard.engines.llama_cpp.sequences.is_copy_worthwhile"
    monkeypatch.setattr(worthwhile, lambda saved, moved, costs: saved >= 8)
    async with exact(main=2) as engine:
        for n in (1, 2, 3):
            await answer(engine, SYSTEM + words(n), session=str(n), max_tokens=1)
        leaves = engine.stats().caches["main"].prefixes
    copies = {len(SYSTEM + words(1))}  # of what was parked ahead, while nothing ran
    assert {leaf.shared for leaf in leaves} - copies == {0, len(SYSTEM)}
    assert {leaf.tokens for leaf in leaves} == {len(SYSTEM + words(1))}
    assert {leaf.id for leaf in leaves} == {0, 1, None}
    assert len({leaf.session for leaf in leaves}) == 3


async def test_moved_text_is_not_copied_to_other_sessions() -> None:
    edited = [*PARTS[0], *PARTS[2], *PARTS[3]]
    async with running({"main": CacheInfo(256, 2)}, path=str(shallow_model()), cache_reuse=8) as engine:
        await answer(engine, WHOLE, session="a")
        moved = await answer(engine, edited, session="a")
        again = await answer(engine, [*edited, 5], session="a")
        other = await answer(engine, [*edited, 6], session="b")
    assert [accepted(chunks).cached_tokens for chunks in (moved, again)] == [len(edited) - 1, len(edited)]
    assert accepted(other).cached_tokens <= len(PARTS[0])
    async with running({"main": CacheInfo(256, 2)}, path=str(shallow_model())) as engine:
        assert_alike(other, await answer(engine, [*edited, 6]))


# --- text was removed -------------------------------------------------------------------------------------------------


PARTS = [words(30 + part, 24) for part in range(4)]
WHOLE = [token for part in PARTS for token in part]


@pytest.mark.parametrize(("kv", "flash", "tolerance"), [("f32", "off", 1e-3), ("f16", "on", 0.03)])
async def test_text_behind_what_was_removed_moves_instead_of_being_read_again(
    kv: str, flash: str, tolerance: float
) -> None:
    """With a single layer the moved KV is that of a fresh prompt; fp16 rounds keys twice."""
    edited = [*PARTS[0], *PARTS[2], *PARTS[3], *words(40)]
    caches = {"main": CacheInfo(256, 2, type_k=kv, type_v=kv)}
    async with running(caches, path=str(shallow_model()), flash_attn=flash) as engine:
        expected = await answer(engine, edited)
    async with running(caches, path=str(shallow_model()), cache_reuse=16, flash_attn=flash) as engine:
        await answer(engine, WHOLE, session="a")
        before = engine.stats()
        moved = await answer(engine, edited, session="a")
        evaluated = engine.stats().evaluated_tokens - before.evaluated_tokens
        again = await answer(engine, [*edited, *ids(moved), *words(41)], session="a")
    assert (accepted(moved).cached_tokens, evaluated) == (72, len(words(40)))
    assert_alike(moved, expected, tolerance)
    assert accepted(again).cached_tokens == len(edited) + len(ids(moved)) - 1


async def test_removed_text_twice_and_other_streams_meanwhile() -> None:
    edited = [*PARTS[0], *PARTS[1][:4], *PARTS[2], *PARTS[3][5:], *words(40)]
    caches = {"main": CacheInfo(256, 2, type_k="f32", type_v="f32")}
    async with running(caches, path=str(shallow_model()), flash_attn="off") as engine:
        expected, other = await answer(engine, edited), await answer(engine, words(50), max_tokens=60)
    async with running(caches, path=str(shallow_model()), cache_reuse=8, flash_attn="off") as engine:
        await answer(engine, WHOLE, session="a")
        running_other = engine.generate(id_prompt(words(50), max_tokens=60, session="b"))
        moved = await answer(engine, edited, session="a")
        assert_alike(await read(running_other), other)
    assert accepted(moved).cached_tokens == len(edited) - len(words(40))
    assert_alike(moved, expected)


async def test_without_the_setting_everything_behind_the_edit_is_read_again() -> None:
    async with exact(main=1) as engine:
        await answer(engine, WHOLE, session="a")
        assert accepted(await answer(engine, [*PARTS[0], *PARTS[2]], session="a")).cached_tokens == 24


@pytest.mark.parametrize("model", [recurrent_model, hybrid_model, sliding_model])
async def test_a_model_that_cannot_move_its_kv_reads_again(model: Callable[[], Path]) -> None:
    edited = [*PARTS[0], *PARTS[2], *PARTS[3]]
    async with running({"main": CacheInfo(256, 1)}, path=str(model())) as engine:
        expected = await answer(engine, edited)
    async with running({"main": CacheInfo(256, 1)}, path=str(model()), cache_reuse=8) as engine:
        await answer(engine, WHOLE, session="a")
        chunks = await answer(engine, edited, session="a")
    assert accepted(chunks).cached_tokens <= 24
    assert_alike(chunks, expected)


async def test_another_clients_text_does_not_move() -> None:
    async with running({"main": CacheInfo(256, 1)}, path=str(shallow_model()), cache_reuse=8) as engine:
        await answer(engine, WHOLE, scope="ann")
        chunks = await answer(engine, [*PARTS[0], *PARTS[2], *PARTS[3]], scope="bob")
    assert accepted(chunks).cached_tokens == 0


# --- copies between sequences ---------------------------------------------------------------------------------------


class SubmitAtFirstToken(Tap):
    """Submits more jobs at the first token of the first job."""

    def __init__(self, engine: LlamaCppEngine, *prompts: Prompt) -> None:
        super().__init__(engine)
        self._engine, self._prompts = engine, prompts
        self.followers: list[Generation[Chunk]] = []

    def on_chunk(self, job: LlamaCppJob, chunk: Chunk) -> None:
        if isinstance(chunk, Tokens) and not self.followers:
            self.followers = [self._engine.generate(prompt) for prompt in self._prompts]


@pytest.fixture(params=["stream", "state"])
def _copies_pay(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are always worthwhile, by the given method if possible."""

    def way(
        saved: int, size: int, held: int, window: int, costs: CopyCosts, ways: list[CopyMethod]
    ) -> CopyMethod | None:
        first: CopyMethod | None = request.param if request.param in ways else next(iter(ways), None)
        return first if saved >= 8 else None

    monkeypatch.setattr("modelyard.engines.llama_cpp.sequences.choose_copy_method", way)


@pytest.mark.usefixtures("_copies_pay")
@pytest.mark.parametrize("unified", [False, True])
async def test_a_shared_prefix_is_copied_from_a_running_sequence(unified: bool) -> None:
    runs = [SYSTEM + words(n) for n in range(1, 4)]
    async with exact(main=3, unified=unified) as engine:
        tap = SubmitAtFirstToken(engine, *(id_prompt(run, session=str(run)) for run in runs[1:]))
        got = [await answer(engine, runs[0], session="a", max_tokens=60)]
        got += [await read(follower) for follower in tap.followers]
    assert [accepted(chunks).cached_tokens for chunks in got] == [0, len(SYSTEM), len(SYSTEM)]
    for chunks, run in zip(got, runs, strict=True):
        assert_alike(chunks, await alone(run, max_tokens=end(chunks).usage.output))


@pytest.mark.usefixtures("_copies_pay")
async def test_nothing_is_copied_from_a_running_sequence_of_another_scope() -> None:
    runs = [SYSTEM + words(n) for n in range(1, 4)]
    async with exact(share=True, main=2, fast=2) as engine:
        foreign = id_prompt(runs[1], scope="bob", cache="fast")
        tap = SubmitAtFirstToken(engine, foreign, id_prompt(runs[2], scope="ann", cache="fast"))
        got = [await answer(engine, runs[0], scope="ann", max_tokens=60)]
        got += [await read(follower) for follower in tap.followers]
    assert [accepted(chunks).cached_tokens for chunks in got] == [0, 0, len(SYSTEM)]
    assert [accepted(chunks).elsewhere for chunks in got] == [0, 0, 0]


@pytest.mark.usefixtures("_copies_pay")
async def test_a_copy_and_its_source_are_independent() -> None:
    runs = [SYSTEM + words(n) for n in (1, 2)]
    async with exact(main=2) as engine:
        tap = SubmitAtFirstToken(engine, id_prompt(runs[1], session="b"))
        first = [await answer(engine, runs[0], session="a", max_tokens=30), await read(tap.followers[0])]
        turns = [run + ids(chunks) + words(9) for run, chunks in zip(runs, first, strict=True)]
        second = [await answer(engine, turn, session=name) for turn, name in zip(turns, "ab", strict=True)]
    for turn, chunks in zip(turns, second, strict=True):
        assert accepted(chunks).cached_tokens == len(turn) - len(words(9)) - 1
        assert_alike(chunks, await alone(turn))


@pytest.mark.usefixtures("_copies_pay")
async def test_a_copy_replaces_what_the_sequence_held() -> None:
    run = SYSTEM + words(3)
    async with exact(main=2) as engine:
        await answer(engine, SYSTEM + words(1), session="a")
        await answer(engine, words(2, 100), session="b")
        chunks = await answer(engine, run, session="b")
    assert accepted(chunks).cached_tokens == len(SYSTEM)
    assert_alike(chunks, await alone(run))


async def test_few_shared_tokens_are_not_copied() -> None:
    async with exact(main=2) as engine:
        tap = SubmitAtFirstToken(engine, id_prompt(SYSTEM + words(2), session="b"))
        await answer(engine, SYSTEM + words(1), session="a", max_tokens=30)
        place = accepted(await read(tap.followers[0]))
    assert (place.cached_tokens, place.elsewhere) == (0, len(SYSTEM))


async def test_a_repeated_prompt_reuses_the_sequence_of_its_answer() -> None:
    run = words(1)
    async with exact(main=2) as engine:
        got = [await answer(engine, run, max_tokens=60) for _ in range(3)]
    assert [accepted(chunks).cached_tokens for chunks in got] == [0, len(run) - 1, len(run) - 1]
    assert not any(accepted(chunks).elsewhere or accepted(chunks).evicted for chunks in got)
    assert_alike(got[2], await alone(run, max_tokens=60))


@pytest.mark.parametrize("model", [exact_model, sliding_model, recurrent_model, hybrid_model])
async def test_conversations_that_run_together_are_neighbours_wherever_their_kv_was(
    model: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scattered ones would be computed one by one."""
    seen: list[set[int]] = []
    step = LlamaContext.step

    def stepped(context: LlamaContext) -> None:
        seen.append(set(context.jobs))
        step(context)

    talks = [words(n, 40) for n in range(1, 9)]
    async with running({"main": CacheInfo(256, 6), "fast": CacheInfo(256, 4)}, path=str(model())) as engine:
        for n, talk in enumerate(talks):
            first = await answer(engine, talk, cache="fast" if n % 3 == 0 else "main")
            talks[n] = talk + ids(first) + words(20 + n)
        monkeypatch.setattr(LlamaContext, "step", stepped)
        chosen = [(n, "fast" if n % 3 == 0 else "main") for n in (0, 2, 4, 6, 7)]
        jobs = [engine.generate(id_prompt(talks[n], cache=cache, max_tokens=30)) for n, cache in chosen]
        got = [await read(job) for job in jobs]
        again = [await answer(engine, talks[n], cache="fast" if n % 3 == 0 else "main") for n in (1, 3, 5)]
    together = [ran for ran in seen if len(ran) == len(jobs)]
    assert together
    assert all(max(ran) - min(ran) < len(ran) for ran in together)
    for chunks in (*got, *again):
        assert accepted(chunks).cached_tokens == 47
    async with running({"main": CacheInfo(256, 1)}, path=str(model()), parked_mb=0) as engine:
        for n, chunks in zip((0, 2, 4, 6, 7, 1, 3, 5), (*got, *again), strict=True):
            await engine.control(Control("evict"))
            assert_alike(chunks, await answer(engine, talks[n], max_tokens=end(chunks).usage.output))


# --- a prefix that is being read --------------------------------------------------------------------------------------


class WhileReading(Tap):
    """Calls `then` once, while the first job reads its prompt."""

    def __init__(self, engine: LlamaCppEngine, then: Callable[[], None]) -> None:
        super().__init__(engine)
        self._then: Callable[[], None] | None = then

    def on_chunk(self, job: LlamaCppJob, chunk: Chunk) -> None:
        if isinstance(chunk, Progress) and self._then is not None:
            then, self._then = self._then, None
            then()


@pytest.mark.usefixtures("_copies_pay")
@pytest.mark.parametrize("model", [exact_model, sliding_model, recurrent_model, hybrid_model])
async def test_jobs_that_arrive_together_read_their_common_prefix_once(model: Callable[[], Path]) -> None:
    system = words(0, 160)
    runs = [system + words(n) for n in range(1, 5)]
    async with running({"main": CacheInfo(512, 4)}, path=str(model()), n_ubatch=32) as engine:
        got = [read(job) for job in [engine.generate(id_prompt(run, max_tokens=8)) for run in runs]]
        chunks = [await each for each in got]
        assert engine.stats().evaluated_tokens == len(system) + sum(len(run) - len(system) for run in runs)
        assert engine.stats().running == 0
    async with running({"main": CacheInfo(512, 1)}, path=str(model()), n_ubatch=32, parked_mb=0) as engine:
        for one, run in zip(chunks, runs, strict=True):
            await engine.control(Control("evict"))
            assert_alike(one, await answer(engine, run, max_tokens=8))


@pytest.mark.usefixtures("_copies_pay")
@pytest.mark.parametrize("leaves", [0, 1, 2])
async def test_whoever_leaves_while_a_prefix_is_read_the_others_go_on(leaves: int) -> None:
    system = words(0, 160)
    runs = [system + words(n) for n in range(1, 4)]
    async with running({"main": CacheInfo(256, 3)}, path=str(exact_model()), n_ubatch=16, n_batch=16) as engine:
        jobs: list[Generation[Chunk]] = []
        WhileReading(engine, lambda: jobs[leaves].cancel())
        jobs += [engine.generate(id_prompt(run, max_tokens=8)) for run in runs]
        chunks = [await read(job) for job in jobs]
        assert [end(one).reason == "cancelled" for one in chunks] == [n == leaves for n in range(3)]
        assert engine.stats().evaluated_tokens < 2 * len(system)
        assert (await answer(engine, runs[leaves], max_tokens=8))[-1] is not None
    for n in {0, 1, 2} - {leaves}:
        assert_alike(chunks[n], await alone(runs[n]))


@pytest.mark.usefixtures("_copies_pay")
async def test_nobody_waits_for_what_another_key_or_cache_reads() -> None:
    run = words(0, 160)
    async with running(
        {"main": CacheInfo(256, 2), "fast": CacheInfo(256, 1)}, path=str(exact_model()), n_ubatch=16
    ) as engine:
        whose = [{"scope": "ann"}, {"scope": "bob"}, {"scope": "ann", "cache": "fast"}]
        jobs = [engine.generate(id_prompt(run, max_tokens=2, **fields)) for fields in whose]
        assert [accepted(await read(job)).cached_tokens for job in jobs] == [0, 0, 0]


async def test_jobs_that_wait_for_a_prefix_end_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "modelyard.engines.llama_cpp.sequences.is_copy_worthwhile", lambda saved, moved, costs: saved > 8
    )
    runs = [words(0, 160) + words(n) for n in range(1, 4)]
    async with running({"main": CacheInfo(256, 3)}, path=str(exact_model()), n_ubatch=16, n_batch=16) as engine:
        submitted = Event()

        def stop() -> None:
            submitted.wait()
            engine._inbox.put(None)

        WhileReading(engine, stop)
        jobs = [engine.generate(id_prompt(run, max_tokens=200)) for run in runs]
        submitted.set()
        ended = [end(await read(job)) for job in jobs]
    assert [one.reason for one in ended] == ["error"] * 3


# --- copies between caches --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_copies_pay")
async def test_nothing_is_reused_from_another_cache_unless_configured() -> None:
    async with exact(main=2, fast=2) as engine:
        assert len(engine._contexts) == 1
        await answer(engine, SYSTEM + words(1), session="a")
        other = await answer(engine, SYSTEM + words(1), session="a", cache="fast")
    assert (accepted(other).cached_tokens, accepted(other).elsewhere) == (0, 0)


async def test_caches_of_one_layout_decode_their_streams_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: set[tuple[int, ...]] = set()
    plain = LlamaBatch.fill_uniform

    def fill(batch: LlamaBatch, jobs: DecodeBatch) -> None:
        rows.add(tuple(jobs.by_sequence))
        plain(batch, jobs)

    monkeypatch.setattr(LlamaBatch, "fill_uniform", fill)
    caches = {"main": CacheInfo(256, 3), "fast": CacheInfo(256, 2), "long": CacheInfo(512, 1)}
    async with running(caches, path=str(exact_model())) as engine:
        assert [list(context.caches) for context in engine._contexts] == [["main", "fast"], ["long"]]
        await answer(engine, words(9), cache="fast")
        jobs = [
            engine.generate(id_prompt(words(n), cache=cache, max_tokens=40))
            for n, cache in enumerate(("main", "main", "fast", "long"))
        ]
        got = [await read(job) for job in jobs]
    assert rows & {(0, 1, 2), (1, 2, 3)}, "streams of both caches, in neighbouring sequences"
    for n, chunks in enumerate(got):
        assert_alike(chunks, await alone(words(n), max_tokens=40))


async def test_a_full_cache_does_not_take_the_sequences_of_its_neighbour() -> None:
    async with exact(main=1, fast=2) as engine:
        first = engine.generate(id_prompt(words(1), max_tokens=60))
        await first.__anext__()
        refused = await answer(engine, words(2))
        others = [await answer(engine, words(n), cache="fast", session=str(n)) for n in (3, 4)]
        await read(first)
        (held,) = engine.stats().caches["main"].sequences
    assert isinstance(end(refused).error, Overloaded)
    assert all(end(chunks).error is None for chunks in others)
    assert held.tokens == len(words(1)) + 59


async def test_evicting_one_cache_leaves_its_neighbour() -> None:
    async with exact(main=2, fast=2) as engine:
        first = await answer(engine, words(1))
        await answer(engine, words(1), cache="fast")
        await engine.control(Control("evict", cache="fast"))
        again = await answer(engine, words(1) + ids(first) + words(3))
        other = await answer(engine, words(1), cache="fast")
    assert accepted(again).cached_tokens == len(words(1)) + len(ids(first)) - 1
    assert accepted(other).cached_tokens == 0


@pytest.mark.usefixtures("_copies_pay")
async def test_a_shared_prefix_is_copied_from_a_compatible_cache() -> None:
    runs = [SYSTEM + words(n) for n in (1, 2)]
    async with exact(share=True, main=2, fast=2) as engine:
        first = await answer(engine, runs[0], session="a")
        second = await answer(engine, runs[1], session="b", cache="fast")
        stats = engine.stats()
        again = await answer(engine, runs[0] + ids(first) + words(3), session="a")
    assert accepted(second).cached_tokens == stats.copied_tokens == len(SYSTEM)
    assert not accepted(second).evicted
    assert stats.evaluated_tokens == len(runs[0]) + len(runs[1]) - len(SYSTEM)
    assert accepted(again).cached_tokens == len(runs[0]) + len(ids(first)) - 1, "the source is unchanged"
    assert_alike(second, await alone(runs[1]))
    assert_alike(again, await alone(runs[0] + ids(first) + words(3)))


@pytest.mark.usefixtures("_copies_pay")
@pytest.mark.parametrize(
    "other",
    [
        CacheInfo(256, 2, type_k="f32"),
        CacheInfo(256, 2, type_v="f32"),
        CacheInfo(256, 2, flash_attn=False),
        CacheInfo(512, 3),
    ],
)
async def test_nothing_is_copied_between_incompatible_caches(other: CacheInfo) -> None:
    caches = {"main": CacheInfo(256, 2), "fast": other}
    async with running(caches, path=str(exact_model()), share_across_caches=True) as engine:
        await answer(engine, SYSTEM + words(1), session="a")
        chunks = await answer(engine, SYSTEM + words(2), session="b", cache="fast")
    assert accepted(chunks).cached_tokens == 0


@pytest.mark.usefixtures("_copies_pay")
async def test_a_conversation_longer_than_the_window_is_not_copied() -> None:
    caches = {"main": CacheInfo(512, 2), "fast": CacheInfo(256, 2)}
    async with running(caches, path=str(exact_model()), share_across_caches=True) as engine:
        await answer(engine, SYSTEM + words(1, 400), session="a")
        await answer(engine, SYSTEM[:20], session="b", cache="fast")
        long = await answer(engine, SYSTEM + words(2), session="b", cache="fast")
        await answer(engine, SYSTEM + words(1), session="c")
        short = await answer(engine, SYSTEM + words(3), session="d", cache="fast")
    assert [accepted(chunks).cached_tokens for chunks in (long, short)] == [20, len(SYSTEM)]
    assert_alike(short, await alone(SYSTEM + words(3)))


@pytest.mark.usefixtures("_copies_pay")
async def test_concurrent_conversations_copy_from_each_other() -> None:
    """A pending stream copy can neither be exported, nor may its source change."""
    runs = [SYSTEM + words(n) for n in range(1, 6)]
    homes = ["main", "main", "fast", "main", "fast"]
    async with exact(share=True, main=4, fast=4) as engine:
        tap = SubmitAtFirstToken(
            engine,
            *(id_prompt(run, session=str(run), cache=home) for run, home in list(zip(runs, homes, strict=True))[1:]),
        )
        got = [await answer(engine, runs[0], session="a", max_tokens=60)]
        got += [await read(follower) for follower in tap.followers]
    assert [accepted(chunks).cached_tokens for chunks in got] == [0, *[len(SYSTEM)] * 4]
    for chunks, run in zip(got, runs, strict=True):
        assert_alike(chunks, await alone(run, max_tokens=end(chunks).usage.output))


async def test_measured_costs_decide_about_copies() -> None:
    """Whatever they decide: they are measured, and the answer is right."""
    long = words(0, 300)
    caches = {"main": CacheInfo(512, 2), "fast": CacheInfo(512, 2)}
    async with running(caches, path=str(exact_model()), share_across_caches=True) as engine:
        await answer(engine, long + words(1), session="a")
        chunks = await answer(engine, long + words(2), session="b", cache="fast")
        assert engine._caches["main"].kv.costs != CopyCosts()
    assert accepted(chunks).cached_tokens in (0, len(long))
    async with running({"main": CacheInfo(512, 1)}, path=str(exact_model())) as engine:
        assert_alike(chunks, await answer(engine, long + words(2)))


# --- isolation ------------------------------------------------------------------------------------------------------


class CancelAfter(Tap):
    """Cancels jobs on the engine's thread after a number of chunks."""

    def __init__(self, engine: LlamaCppEngine) -> None:
        super().__init__(engine)
        self.left: dict[int, int] = {}  # chunks until the end, by the job's number

    def on_chunk(self, job: LlamaCppJob, chunk: Chunk) -> None:
        if job.arrival in self.left:
            self.left[job.arrival] -= 1
            if self.left[job.arrival] <= 0:
                job.cancel()


@pytest.mark.usefixtures("_copies_pay")
@pytest.mark.parametrize("seed", range(4))
async def test_mixed_conversations_generate_what_each_generates_alone(seed: int) -> None:
    """Two caches that share KV or do not, eight conversations on five or six sequences, many turns, some with a common
    start, some cancelled: sequences are taken over, copied and cut, several jobs at a time."""
    random = Random(seed)
    homes = {n: ("main", "fast")[n % 2] for n in range(8)}
    places = {"main": 3, "fast": 2 + seed % 2}
    history = {n: (SYSTEM if n % 4 < 2 else []) + words(100 + n) for n in homes}
    turns: list[tuple[list[int], list[Chunk]]] = []
    async with exact(share=seed < 2, **places) as engine:
        canceller = CancelAfter(engine)
        for _ in range(16):
            batch = _fitting(random.sample(list(homes), random.randint(1, 5)), homes, places)
            canceller.left = {engine._job_count + 1: random.randint(1, 6)} if random.random() < 0.4 else {}
            jobs = {n: engine.generate(id_prompt(history[n], cache=homes[n], session=str(n))) for n in batch}
            for n, job in jobs.items():
                chunks = await read(job)
                assert end(chunks).reason == ("cancelled" if n == batch[0] and canceller.left else "length")
                if ids(chunks):  # a cancelled answer is as true as far as it goes
                    turns.append((history[n], chunks))
                    history[n] = _continued(history[n], chunks, random)
    async with exact(main=1) as engine:
        for run, chunks in turns:
            await engine.control(Control("evict"))
            assert_alike(chunks, await answer(engine, run, max_tokens=len(ids(chunks))))


def _continued(run: list[int], chunks: list[Chunk], random: Random) -> list[int]:
    """The next turn; sometimes the conversation is cut back first."""
    kept = run[: random.randint(10, len(run))] if random.random() < 0.2 or len(run) > 150 else run + ids(chunks)
    return kept + words(random.randrange(1000), 12)


def _fitting(order: list[int], homes: dict[int, str], places: dict[str, int]) -> list[int]:
    """At most as many as a cache has sequences, like the scheduler."""
    return [n for at, n in enumerate(order) if sum(homes[m] == homes[n] for m in order[:at]) < places[homes[n]]]


# --- rewinding --------------------------------------------------------------------------------------------------------

MODELS = [sliding_model, recurrent_model, hybrid_model]
TAIL = 8  # before the end of a prompt
LONG = 300  # tokens after which a window's cells were used again
Model = Callable[[], Path]


@asynccontextmanager
async def opened(
    model: Model, caches: dict[str, CacheInfo] | None = None, **options: Any
) -> AsyncIterator[LlamaCppEngine]:
    """With a cache that drops what is behind the window, as large models need it; the default keeps all."""
    chosen = {"path": str(model()), "swa_full": False} | options
    async with running(caches or {"main": CacheInfo(1024, 2)}, **chosen) as engine:
        yield engine


@pytest.fixture
def _copies_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are always worthwhile."""
    monkeypatch.setattr(
        "modelyard.engines.llama_cpp.sequences.is_copy_worthwhile", lambda saved, moved, costs: saved >= 8
    )


async def rewind_answer(engine: LlamaCppEngine, run: list[int], session: str = "a", **fields: Any) -> list[Chunk]:
    chunks = await read(engine.generate(id_prompt(run, session=session, **fields)))
    assert end(chunks).reason == "length"
    return chunks


async def rewind_alone(model: Model, run: list[int]) -> list[Chunk]:
    async with opened(model) as engine:
        return await rewind_answer(engine, run)


@pytest.mark.parametrize("model", MODELS)
async def test_a_growing_conversation_is_evaluated_once(model: Model) -> None:
    async with opened(model) as engine:
        run = words(1, 300)
        first = await rewind_answer(engine, run)
        turn = run + ids(first) + words(2, 20)
        second = await rewind_answer(engine, turn)
    assert accepted(second).cached_tokens == len(run) + len(ids(first)) - 1
    assert_alike(second, await rewind_alone(model, turn))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kept", [1, N_SWA, 150, 299])
async def test_a_conversation_that_was_cut_back_generates_what_it_generates_alone(model: Model, kept: int) -> None:
    run = words(1, 300)
    edited = run[:kept] + words(3, 20)
    async with opened(model) as engine:
        await rewind_answer(engine, run)
        chunks = await rewind_answer(engine, edited)
    assert_alike(chunks, await rewind_alone(model, edited))


@pytest.mark.parametrize("model", MODELS)
async def test_a_lost_window_or_state_is_not_counted_as_cached(model: Model) -> None:
    run = words(1, 300)
    async with opened(model) as engine:
        await rewind_answer(engine, run)
        assert accepted(await rewind_answer(engine, run[:20] + words(3, 20))).cached_tokens == 0


@pytest.mark.parametrize("model", MODELS)
async def test_a_repeated_prompt_starts_at_the_checkpoint_before_its_end(model: Model) -> None:
    run = words(1, 100)
    async with opened(model) as engine:
        first, second = [await rewind_answer(engine, run, max_tokens=LONG) for _ in range(2)]
    assert accepted(second).cached_tokens == len(run) - TAIL
    assert_alike(first, second)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.usefixtures("_copies_always_pay")
async def test_a_copy_of_a_longer_sequence_generates_what_it_generates_alone(model: Model) -> None:
    run = words(1, 300)
    async with opened(model) as engine:
        await rewind_answer(engine, run, "a")
        await rewind_answer(engine, words(9, 30), "b")
        chunks = await rewind_answer(engine, run[:100] + words(4, 10), "b")
    assert_alike(chunks, await rewind_alone(model, run[:100] + words(4, 10)))


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
async def test_an_edited_last_message_starts_at_the_end_of_the_previous_turn(model: Model) -> None:
    async with opened(model) as engine:
        run = words(1, 100)
        history = run + ids(await rewind_answer(engine, run, max_tokens=50))
        await rewind_answer(engine, history + words(2, LONG))
        edited = history + words(3, 60)
        chunks = await rewind_answer(engine, edited)
    assert accepted(chunks).cached_tokens == len(history) - 1  # the last word of an answer was never read
    assert_alike(chunks, await rewind_alone(model, edited))


@pytest.mark.parametrize("model", MODELS)
async def test_a_changed_answer_starts_at_the_end_of_the_prompt(model: Model) -> None:
    run = words(1, 200)
    other = run + words(4, 50)
    async with opened(model) as engine:
        await rewind_answer(engine, run, max_tokens=LONG)
        chunks = await rewind_answer(engine, other)
    assert accepted(chunks).cached_tokens == len(run) - TAIL
    assert_alike(chunks, await rewind_alone(model, other))


@pytest.mark.parametrize("model", MODELS)
async def test_a_third_conversation_starts_where_the_first_two_diverged(model: Model) -> None:
    """The second one starts at a checkpoint inside the first prompt."""
    system = words(1, 200)
    runs = [system + words(n, LONG) for n in range(2, 5)]
    async with opened(model, {"main": CacheInfo(1024, 1)}) as engine:
        got = [await rewind_answer(engine, run, session=str(n)) for n, run in enumerate(runs)]
    assert [accepted(chunks).cached_tokens for chunks in got] == [0, 128, len(system)]
    for run, chunks in zip(runs, got, strict=True):
        assert_alike(chunks, await rewind_alone(model, run))


@pytest.mark.parametrize("model", MODELS)
async def test_rewinding_before_all_checkpoints_evaluates_everything_again(model: Model) -> None:
    run = words(1, 300)
    edited = run[:100] + words(3, 60)
    async with opened(model) as engine:
        history = run + ids(await rewind_answer(engine, run))
        await rewind_answer(engine, history + words(2, 60))
        chunks = await rewind_answer(engine, edited)
        slot = max(engine._caches["main"].slots, key=lambda slot: slot.use_order)
        assert all(one.tokens <= len(edited) for one in slot.checkpoints), (
            "what was read over is no checkpoint any more"
        )
    assert accepted(chunks).cached_tokens == 0
    assert_alike(chunks, await rewind_alone(model, edited))


@pytest.mark.parametrize("model", MODELS)
async def test_a_checkpoint_of_replaced_tokens_is_never_used(model: Model) -> None:
    run = words(1, 100)
    async with opened(model) as engine:
        history = run + ids(await rewind_answer(engine, run))
        await rewind_answer(engine, history + words(2, LONG))
        other = run + words(3, 500)
        await rewind_answer(engine, other)
        edited = other[:500] + words(4, 60)
        chunks = await rewind_answer(engine, edited)
    assert_alike(chunks, await rewind_alone(model, edited))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("bound", [{"checkpoints": 3}, {"checkpoint_mb": 0}, {"checkpoints": 0}])
async def test_checkpoints_are_limited(model: Model, bound: dict[str, int]) -> None:
    most = bound.get("checkpoints", 0)
    async with opened(model, **bound) as engine:
        history = words(1, 100)
        for turn in range(5):
            history = history + ids(await rewind_answer(engine, history)) + words(turn, 60)
            assert len(engine._caches["main"].slots[0].checkpoints) <= most
        chunks = await rewind_answer(engine, history)
    assert_alike(chunks, await rewind_alone(model, history))


@pytest.mark.parametrize("model", MODELS)
async def test_an_evicted_conversation_loses_its_checkpoints(model: Model) -> None:
    run = words(1, 200)
    async with opened(model) as engine:
        await rewind_answer(engine, run)
        await engine.control(Control("evict"))
        assert not engine._caches["main"].slots[0].checkpoints
        assert accepted(await rewind_answer(engine, run)).cached_tokens == 0


async def test_swa_full_needs_no_checkpoints() -> None:
    run = words(1, 200)
    edited = run[:100] + words(3, 60)
    async with opened(sliding_model, swa_full=True) as engine:
        await rewind_answer(engine, run)
        chunks = await rewind_answer(engine, edited)
        assert not engine._caches["main"].slots[0].checkpoints
    assert accepted(chunks).cached_tokens == 100
    assert_alike(chunks, await rewind_alone(sliding_model, edited))


@pytest.mark.parametrize("model", MODELS)
async def test_an_edit_inside_a_long_prompt_is_read_from_the_checkpoint_before_it(model: Model) -> None:
    run = words(1, 900)
    edited = run[:400] + words(2, 100)
    async with opened(model, {"main": CacheInfo(1024, 1)}) as engine:
        await rewind_answer(engine, run, "a")
        chunks = await rewind_answer(engine, edited, "a")
    assert accepted(chunks).cached_tokens == 360
    assert_alike(chunks, await rewind_alone(model, edited))


# --- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_copies_always_pay")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("home", ["main", "fast"])
async def test_a_copy_starts_at_a_checkpoint_of_its_source(model: Model, home: str) -> None:
    run = words(1, 200)
    other = run + words(4, 50)
    caches = {"main": CacheInfo(1024, 2), "fast": CacheInfo(1024, 2)}
    async with opened(model, caches, share_across_caches=True) as engine:
        first = await rewind_answer(engine, run, "a")
        chunks = await rewind_answer(engine, other, "b", cache=home)
        assert accepted(chunks).cached_tokens == len(run) - TAIL
        assert engine.stats().copied_tokens == len(run) - TAIL
        turn = run + ids(first) + words(5, 20)
        source = await rewind_answer(engine, turn, "a")
    assert accepted(source).cached_tokens == len(run) + len(ids(first)) - 1, "the source is unchanged"
    assert_alike(chunks, await rewind_alone(model, other))
    assert_alike(source, await rewind_alone(model, turn))


@pytest.mark.usefixtures("_copies_always_pay")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(2))
async def test_mixed_conversations_with_rewinds_generate_what_each_generates_alone(model: Model, seed: int) -> None:
    """More conversations than sequences, in two caches, with a common prefix, continued and cut back."""
    random = Random(seed)
    system, turns = words(0, 60), []
    history = {n: (system if n % 2 else []) + words(100 + n, 40) for n in range(5)}
    async with opened(model, {"main": CacheInfo(1024, 2), "fast": CacheInfo(1024, 2)}) as engine:
        for _ in range(14):
            batch = random.sample(list(history), 2)
            jobs = {
                n: engine.generate(id_prompt(history[n], session=str(n), cache=("main", "fast")[n % 2])) for n in batch
            }
            for n, job in jobs.items():
                chunks = await read(job)
                turns.append((history[n], chunks))
                kept = (
                    history[n][: random.randint(30, len(history[n]))]
                    if random.random() < 0.3
                    else history[n] + ids(chunks)
                )
                history[n] = kept + words(random.randrange(1000), 40)
    async with opened(model, {"main": CacheInfo(1024, 1)}, checkpoints=0) as engine:
        for run, chunks in turns:
            await engine.control(Control("evict"))
            assert_alike(chunks, await rewind_answer(engine, run))


# --- offloaded conversations ------------------------------------------------------------------------------------------


def run(*tokens: int) -> TokenIds:
    return np.array(tokens, np.int32)


def snapshot(*tokens: int, size: int = 100, **fields: Any) -> KvSnapshot:
    return KvSnapshot(run(*tokens), np.zeros(size - 4 * len(tokens), np.uint8), **fields)


def test_the_snapshot_that_covers_most_of_the_prompt_is_found() -> None:
    short, long = snapshot(1, 2), snapshot(1, 2, 3, 9)
    parked = ParkedKv(1000)
    parked.add(long)
    parked.add(short)
    assert parked.find(run(1, 2, 3, 4), (), can_rewind=True) == (long, 3)
    assert parked.find(run(1, 2, 3, 4), (), can_rewind=False) == (short, 2)
    assert parked.find(run(7), (), can_rewind=True) == (None, 0)
    assert parked.find(run(1, 2), (("pirate", 1.0),), can_rewind=True) == (None, 0)


def test_a_snapshot_that_cannot_be_cut_covers_its_checkpoint() -> None:
    parked = ParkedKv(1000)
    parked.add(held := snapshot(1, 2, 3, 9, checkpoints=(Checkpoint(2, np.zeros(4, np.uint8)),)))
    assert parked.find(run(1, 2, 3, 4), (), can_rewind=False) == (held, 2)


def test_a_snapshot_of_another_scope_is_not_found_and_not_replaced() -> None:
    parked = ParkedKv(1000)
    parked.add(kept := snapshot(1, 2, 3, scope="ann"))
    parked.add(snapshot(1, 2, 3, 4, scope="bob"))
    assert len(parked) == 2
    assert parked.find(run(1, 2, 3, 4, 5), (), "ann", can_rewind=True) == (kept, 3)
    assert parked.find(run(1, 2, 3, 4, 5), (), "eve", can_rewind=True) == (None, 0)


def test_the_oldest_snapshot_is_dropped_first() -> None:
    parked = ParkedKv(250)
    for tokens in ((1, 1), (2, 2), (3, 3)):
        parked.add(snapshot(*tokens))
    assert (len(parked), parked.size) == (2, 200)
    assert parked.find(run(1, 1), (), can_rewind=True) == (None, 0)
    parked.add(snapshot(4, 4, size=251))
    assert (len(parked), parked.size) == (2, 200)  # it would not fit even alone


def test_a_later_snapshot_replaces_the_earlier_one_of_its_conversation() -> None:
    parked = ParkedKv(1000)
    parked.add(snapshot(1, 2))
    parked.add(snapshot(1, 2, 3))
    parked.add(snapshot(1, 2, 3, 4, adapters=(("pirate", 1.0),)))
    assert len(parked) == 2


def test_no_more_snapshots_are_parked_than_a_prompt_can_be_compared_with() -> None:
    parked = ParkedKv(1 << 30)
    for n in range(ParkedKv.MOST + 2):
        parked.add(snapshot(n, n))
    assert len(parked) == ParkedKv.MOST
    assert parked.find(run(1, 1), (), can_rewind=True) == (None, 0)
    assert parked.find(run(2, 2), (), can_rewind=True)[1] == 2


def test_snapshots_are_dropped_by_adapter_or_all_at_once() -> None:
    parked = ParkedKv(1000)
    parked.add(snapshot(1, 2, adapters=(("pirate", 1.0),)))
    parked.add(snapshot(1, 2))
    parked.drop_adapter("pirate")
    assert (len(parked), parked.size) == (1, 100)
    parked.clear()
    assert len(parked) == parked.size == 0


# --- in the engine ----------------------------------------------------------------------------------------------------

OFFLOAD_MODELS = [exact_model, sliding_model, recurrent_model, hybrid_model]


async def short_answer(engine: LlamaCppEngine, tokens: list[int], session: str, **fields: Any) -> list[Chunk]:
    return await read(engine.generate(id_prompt(tokens, session=session, max_tokens=4, **fields)))


def next_turn(history: list[int], chunks: list[Chunk]) -> tuple[list[int], int]:
    """The prompt that follows an answer, and how much of it was evaluated: the last token was only sampled."""
    return history + ids(chunks) + words(len(history), 6), len(history) + len(ids(chunks)) - 1


@pytest.mark.usefixtures("_copies_always_pay")
@pytest.mark.parametrize("model", OFFLOAD_MODELS)
@pytest.mark.parametrize("parallel", [1, 2])
async def test_a_main_conversation_survives_sub_agents_and_background_work(model: Any, parallel: int) -> None:
    async with running({"main": CacheInfo(512, parallel)}, path=str(model()), swa_full=False) as engine:
        history, kept = next_turn(words(1, 40), await short_answer(engine, words(1, 40), "main"))
        for n in range(3):
            await short_answer(engine, words(20 + n, 40), f"main:agent{n}")
            await short_answer(engine, words(30 + n, 40), f"main~errand{n}", priority="background")
        back = await short_answer(engine, history, "main")
        stats = engine.stats().caches["main"]
    assert accepted(back).cached_tokens == kept
    assert stats.evictions == 3  # the background jobs
    async with running({"main": CacheInfo(512, 1)}, path=str(model()), swa_full=False) as engine:
        assert_alike(back, await short_answer(engine, history, "alone"))


async def test_where_reading_is_slow_more_keys_than_sequences_keep_their_short_prompts() -> None:
    async with running({"main": CacheInfo(512, 4)}, path=str(exact_model())) as engine:
        for turn in range(4):
            engine._caches["main"].kv.costs = CopyCosts(token=4e-3, decodes=8)  # as SmolLM2 on one core
            for n in range(5):
                chunks = await read(engine.generate(id_prompt([*words(n, 30), turn + 1], scope=str(n), max_tokens=4)))
                assert accepted(chunks).cached_tokens == (30 if turn else 0)


@pytest.mark.usefixtures("_copies_always_pay")
async def test_without_offload_an_evicted_conversation_is_lost() -> None:
    async with running({"main": CacheInfo(512, 1)}, path=str(exact_model()), parked_mb=0) as engine:
        history, _ = next_turn(words(1, 40), await short_answer(engine, words(1, 40), "main"))
        other = await short_answer(engine, words(2, 40), "other")
        back = await short_answer(engine, history, "main")
    assert [accepted(chunks).cached_tokens for chunks in (other, back)] == [0, 0]
    assert [accepted(chunks).evicted for chunks in (other, back)] == [True, True]


@pytest.mark.usefixtures("_copies_always_pay")
async def test_evicting_a_cache_drops_its_offloaded_conversations() -> None:
    async with running({"main": CacheInfo(512, 1)}, path=str(exact_model())) as engine:
        history, _ = next_turn(words(1, 40), await short_answer(engine, words(1, 40), "main"))
        await short_answer(engine, words(2, 40), "other")
        await engine.control(Control("evict"))
        assert accepted(await short_answer(engine, history, "main")).cached_tokens == 0


@pytest.mark.usefixtures("_copies_always_pay")
async def test_another_session_with_a_shared_prefix_does_not_remove_the_snapshot() -> None:
    system = words(1, 40)
    async with running({"main": CacheInfo(512, 1)}, path=str(exact_model())) as engine:
        history, kept = next_turn(system + words(2, 9), await short_answer(engine, system + words(2, 9), "first"))
        await short_answer(engine, words(3, 40), "other")
        second = await short_answer(engine, system + words(4, 9), "second")
        await short_answer(engine, words(5, 40), "another")
        first = await short_answer(engine, history, "first")
    assert [accepted(chunks).cached_tokens for chunks in (second, first)] == [len(system), kept]


@pytest.mark.usefixtures("_copies_always_pay")
@pytest.mark.parametrize("model", OFFLOAD_MODELS)
@pytest.mark.parametrize("seed", range(2))
async def test_mixed_offloaded_conversations_generate_what_each_generates_alone(model: Any, seed: int) -> None:
    """Five conversations on two sequences; some are cut back between turns."""
    random = Random(seed)
    history = {n: words(n, 40) for n in range(5)}
    turns: list[tuple[list[int], list[Chunk]]] = []
    async with running({"main": CacheInfo(512, 2)}, path=str(model()), swa_full=False) as engine:
        for _ in range(20):
            n = random.randrange(5)
            chunks = await short_answer(engine, history[n], str(n), priority=random.choice(["main", "background"]))
            assert end(chunks).reason == "length"
            turns.append((history[n], chunks))
            kept = (
                history[n] + ids(chunks) if random.random() < 0.8 else history[n][: random.randint(20, len(history[n]))]
            )
            history[n] = kept + words(random.randrange(1000), 8)
    async with running({"main": CacheInfo(512, 1)}, path=str(model()), swa_full=False) as engine:
        for prompt, chunks in turns:
            await engine.control(Control("evict"))
            assert_alike(chunks, await short_answer(engine, prompt, "alone"))


# --- on real models ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_copies_always_pay")
async def test_the_next_turn_of_an_agent_on_the_real_model_evaluates_only_new_tokens() -> None:
    """One sequence for a conversation, a sub-agent and two background jobs."""
    system = ("system", "You are a coding agent with many tools and long instructions. " * 3)
    async with running({"main": CacheInfo(1024, 1)}, n_ubatch=256, n_batch=256) as engine:
        first = await asked(engine, chatml(system, ("user", "Fix the tests.")), session="s")
        await asked(engine, chatml(("system", "Explore the code."), ("user", "Find it.")), session="s:1")
        await asked(engine, chatml(("system", "Title this."), ("user", "Fix.")), session="s~1", priority="background")
        await asked(engine, chatml(("system", "Block? " * 20), ("user", "rm")), session="s~2", priority="background")
        history = (system, ("user", "Fix the tests."), ("assistant", text_of(first)))
        second = await asked(engine, chatml(*history, ("user", "Now the docs.")), session="s")
    held = end(first).usage.prompt + end(first).usage.output - 1
    assert accepted(second).cached_tokens == held


async def test_text_behind_the_sliding_window_of_a_real_model_is_reused() -> None:
    """Its window is 512 tokens: the cells of the first ones were used again before the second turn."""
    text = gemma_vocabulary().encode(ENGLISH)
    run = [gemma_vocabulary().bos, *text[:560]]

    async def turn(prompt: list[int], session: str) -> list[Chunk]:
        return await read(engine.generate(id_prompt(prompt, session=session)))

    async with opened(gemma, {"main": CacheInfo(1024, 1)}, n_ubatch=128, n_batch=128) as engine:
        first = await turn(run, "a")
        longer = run + ids(first) + text[700:720]
        edited = longer[:-10] + text[800:820]
        second, third = await turn(longer, "a"), await turn(edited, "a")
        await engine.control(Control("evict"))
        assert_alike(second, await turn(longer, "b"), GEMMA_ROUNDS)
        await engine.control(Control("evict"))
        assert_alike(third, await turn(edited, "c"), GEMMA_ROUNDS)
    assert accepted(second).cached_tokens == len(run) + len(ids(first)) - 1
    assert accepted(third).cached_tokens >= len(run) - TAIL
