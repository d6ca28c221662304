"""Drafts of a model's own MTP layer: answers are the same, and the head follows its sequence wherever that goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from modelyard import libllama
from modelyard.core.engine import CacheInfo, Control, Tokens
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Sampling
from modelyard.engines import llama_cpp
from modelyard.engines.llama_cpp import loading, mtp, sequences
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.engines.llama_cpp.mtp import MtpDrafter, computed_order
from modelyard.engines.llama_cpp.speculation import DraftCost
from tests.engines.llama_cpp.architectures import draft_file, model
from tests.engines.llama_cpp.exact_models import write
from tests.engines.llama_cpp.helpers import id_prompt, running
from tests.engines.llama_cpp.mtp_models import WIDTH, agreeing_draft, agreeing_model, distribution, following
from tests.engines.reading import accepted, ids, read, until

TEXT = [*range(20, 110)]


@pytest.fixture(autouse=True)
def drafts_whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftCost, "per_row", lambda *_: 0.0)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "is_copy_worthwhile", lambda saved, moved, costs: saved > 0)


@asynccontextmanager
async def opened(path: Path, parallel: int = 3, **options: Any) -> AsyncIterator[LlamaCppEngine]:
    chosen: dict[str, Any] = {"path": str(path), "speculation": "mtp", "draft_p_min": 0.0} | options
    async with running({"main": CacheInfo(512, parallel)}, **chosen) as engine:
        yield engine


async def answer(engine: LlamaCppEngine, text: Sequence[int], count: int = 12, **fields: Any) -> list[int]:
    return ids(await read(engine.generate(id_prompt(list(text), max_tokens=count, logprobs=None, **fields))))


def chain(token: int, count: int) -> list[int]:
    found = []
    for _ in range(count):
        token = following(token)
        found.append(token)
    return found


# --- a head that is always right --------------------------------------------------------------------------------------


async def test_all_guesses_of_a_head_that_is_right_are_accepted() -> None:
    async with opened(agreeing_model()) as engine:
        assert await answer(engine, TEXT, 41) == chain(TEXT[-1], 41)
        stats = engine.stats()
    assert stats.guessed_tokens == stats.accepted_tokens == 30  # of 40 after the first, three in each step


async def test_streams_of_different_lengths_draft_together() -> None:
    texts = [TEXT[: 90 - 23 * n] for n in range(3)]
    async with opened(agreeing_model()) as engine:
        found = await asyncio.gather(*(answer(engine, text, 30 + n) for n, text in enumerate(texts)))
        stats = engine.stats()
    assert found == [chain(text[-1], 30 + n) for n, text in enumerate(texts)]
    assert stats.accepted_tokens >= 45
    assert stats.accepted_tokens == stats.guessed_tokens


async def test_a_new_prompt_beside_streams_does_not_mix_up_hidden_rows() -> None:
    async with opened(agreeing_model()) as engine:
        streams = [engine.generate(id_prompt(TEXT[n:], max_tokens=60, logprobs=None)) for n in range(2)]
        for stream in streams:
            await until(stream, Tokens)
        late = await answer(engine, [*range(30, 100)], 20)
        for stream in streams:
            await read(stream)
        stats = engine.stats()
    assert late == chain(99, 20)
    assert stats.guessed_tokens - stats.accepted_tokens <= 3  # a step that a new job interrupts


async def test_a_job_that_ends_within_a_draft_ends_there() -> None:
    async with opened(agreeing_model()) as engine:
        for count in range(1, 9):
            assert len(await answer(engine, [*TEXT, 60 + count], count)) == count
        stop = chain(TEXT[-1], 6)[-1]
        found = await answer(engine, TEXT, 40, stop_ids=frozenset({stop}))
    assert found == chain(TEXT[-1], 5)


async def test_drafts_follow_a_decode_in_flight() -> None:
    """As on a GPU, which computes the next step while tokens are emitted."""
    async with opened(agreeing_model()) as engine:
        (context,) = engine._contexts
        context._is_async = True
        assert await answer(engine, TEXT, 40) == chain(TEXT[-1], 40)
        assert context.speculator is not None
        context.speculator._max_draft = 0  # nothing to try: each step launches the next
        assert await answer(engine, TEXT[:50], 40) == chain(TEXT[49], 40)
        context.speculator._max_draft = 3
        before = engine.stats()
        assert await answer(engine, [*TEXT[:50], *chain(TEXT[49], 40)], 40) == chain(chain(TEXT[49], 40)[-1], 40)
        after = engine.stats()
    assert after.guessed_tokens - before.guessed_tokens == after.accepted_tokens - before.accepted_tokens > 20


async def test_heads_that_guess_in_turn_are_right_in_turn() -> None:
    texts = [TEXT[: 90 - 23 * n] for n in range(3)]
    async with opened(agreeing_model(name="step35-mtp"), draft_n_max=8) as engine:
        found = await asyncio.gather(*(answer(engine, text, 30 + n) for n, text in enumerate(texts)))
        again = await answer(engine, [*texts[0], *found[0], 40], 21)
        stats = engine.stats()
    assert found == [chain(text[-1], 30 + n) for n, text in enumerate(texts)]
    assert again == chain(40, 21)
    assert stats.accepted_tokens == stats.guessed_tokens >= 60  # never more than three, of as many heads


# --- files that draft for another model -------------------------------------------------------------------------------


async def test_a_gemma_assistant_that_is_right_has_all_guesses_accepted(tmp_path: Path) -> None:
    draft = agreeing_draft("gemma4", tmp_path / "draft.gguf")
    texts = [TEXT[: 90 - 23 * n] for n in range(3)]
    async with opened(agreeing_model(name="gemma4"), draft_model_path=str(draft)) as engine:
        found = await asyncio.gather(*(answer(engine, text, 30 + n) for n, text in enumerate(texts)))
        again = await answer(engine, [*texts[0], *found[0], 40], 20)
        stats = engine.stats()
    assert found == [chain(text[-1], 30 + n) for n, text in enumerate(texts)]
    assert again == chain(40, 20)
    assert stats.accepted_tokens == stats.guessed_tokens >= 60


@pytest.mark.parametrize("target", ["llama", "qwen35"])
async def test_eagle3_knows_the_token_before_the_last_one_of_each_stream(target: str, tmp_path: Path) -> None:
    draft = agreeing_draft(target, tmp_path / "draft.gguf")
    texts = [TEXT[: 90 - 23 * n] for n in range(3)]
    options: dict[str, Any] = {"speculation": "auto", "draft_model_path": str(draft), "draft_n_max": 1}
    async with opened(agreeing_model(name=target), **options) as engine:
        found = await asyncio.gather(*(answer(engine, text, 30 + n) for n, text in enumerate(texts)))
        again = await answer(engine, [*texts[0], *found[0], *chain(found[0][-1], 2)], 20)
        stats = engine.stats()
    assert found == [chain(text[-1], 30 + n) for n, text in enumerate(texts)]
    assert again == chain(chain(found[0][-1], 2)[-1], 20)
    assert stats.guessed_tokens >= 40
    assert stats.guessed_tokens - stats.accepted_tokens <= 3  # after each prompt the chain begins anew


async def test_a_file_that_drafts_for_another_model_is_refused(tmp_path: Path) -> None:
    draft = draft_file("llama", tmp_path / "draft.gguf")
    for target, reason in (("falcon", "does not give the inputs of the layers of falcon"), ("gemma4", "of width 64")):
        path = agreeing_model(name="gemma4") if target == "gemma4" else model(target)
        with pytest.raises(InvalidRequest, match=reason) as refused:
            async with opened(path, speculation="draft", draft_model_path=str(draft)):
                pass
        assert refused.value.code == "draft_model_unusable"


# --- a random head: where its sequence goes ---------------------------------------------------------------------------


class Recorder:
    """The drafts of one engine, in the order of its steps."""

    def __init__(self, engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafts: list[list[int]] = []
        (context,) = engine._contexts
        assert context.speculator is not None
        drafter = context.speculator._drafter
        assert isinstance(drafter, MtpDrafter)
        draft = drafter.draft

        def record(lengths: Any) -> Any:
            found = draft(lengths)
            self.drafts += [list(each) for each in found.values()]
            return found

        monkeypatch.setattr(drafter, "draft", record)

    def take(self) -> list[list[int]]:
        taken, self.drafts = self.drafts, []
        return taken


async def fresh_drafts(text: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[list[int]]]:
    async with opened(model("qwen35-mtp"), 1) as engine:
        recorder = Recorder(engine, monkeypatch)
        return await answer(engine, text), recorder.take()


def similar(found: list[list[int]], expected: list[list[int]]) -> bool:
    """Of a random model two tokens may be equally likely, and a batch adds in another order."""
    hits = [a == b for one, other in zip(found, expected, strict=False) for a, b in zip(one, other, strict=False)]
    return len(hits) >= 20 and sum(hits) >= 0.9 * len(hits)


@pytest.mark.usefixtures("copies")
async def test_the_head_goes_with_the_kv_of_its_sequence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """After reuse, an edit, a copy, an eviction and a restore it guesses as one that has read everything itself."""
    first = [5, *TEXT]
    async with opened(model("qwen35-mtp"), 2, kv_store=str(tmp_path), checkpoints=8) as engine:
        recorder = Recorder(engine, monkeypatch)
        follow = first + await answer(engine, first) + [70, 71, 72]
        edited = [*first[:88], 30, 31, 32, 33, 34, 35]  # behind a checkpoint
        for name, text in (("reuse", follow), ("edit", edited), ("copy", [*follow, 80]), ("evict", [9, *TEXT])):
            recorder.take()
            chunks = await read(engine.generate(id_prompt(list(text), max_tokens=12, logprobs=None)))
            expected, drafts = await fresh_drafts(text, monkeypatch)
            assert ids(chunks) == expected, name
            assert similar(recorder.take(), drafts), name
            assert name == "evict" or accepted(chunks).cached_tokens, name
        await engine.control(Control("save"))
        await engine.control(Control("evict"))
        await engine.control(Control("restore"))
        recorder.take()
        chunks = await read(engine.generate(id_prompt([9, *TEXT, 90, 91], max_tokens=12, logprobs=None)))
        expected, drafts = await fresh_drafts([9, *TEXT, 90, 91], monkeypatch)
    assert accepted(chunks).cached_tokens
    assert ids(chunks) == expected
    assert similar(recorder.take(), drafts)


async def test_a_cancelled_job_leaves_a_head_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(model("qwen35-mtp"), 1) as engine:
        recorder = Recorder(engine, monkeypatch)
        generation = engine.generate(id_prompt(TEXT, max_tokens=100, logprobs=None))
        await until(generation, Tokens)
        generation.cancel()
        await read(generation)
        recorder.take()
        found, drafts = await answer(engine, [*TEXT, 40, 41]), recorder.take()
        expected, fresh = await fresh_drafts([*TEXT, 40, 41], monkeypatch)
    assert found == expected
    assert similar(drafts, fresh)


async def test_what_nobody_drafts_from_is_read_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(model("qwen35-mtp"), 1) as engine:
        (context,) = engine._contexts
        assert context.speculator is not None
        context.speculator._max_draft = 0
        first = await answer(engine, TEXT, 100)
        assert engine.stats().guessed_tokens == 0
        context.speculator._max_draft = 3
        recorder = Recorder(engine, monkeypatch)
        text = [*TEXT, *first, 33]
        found, drafts = await answer(engine, text), recorder.take()
        expected, fresh = await fresh_drafts(text, monkeypatch)
    assert found == expected
    assert similar(drafts, fresh)


async def test_what_waits_too_long_is_forgotten_and_drafts_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp, "_MAX_BYTES", 4 * WIDTH * 40)  # 40 rows
    async with opened(agreeing_model(), 2) as engine:
        (context,) = engine._contexts
        assert context.speculator is not None
        assert context.head is not None
        context.speculator._max_draft = 0
        found = await answer(engine, TEXT, 200)
        assert max(len(state.rows) for state in context.head._waiting.values()) <= 40
        context.speculator._max_draft = 3
        text = [*TEXT, *found]
        assert await answer(engine, text, 40) == chain(text[-1], 40)
        stats = engine.stats()
    assert stats.accepted_tokens == stats.guessed_tokens > 20


@pytest.mark.usefixtures("copies")
async def test_two_caches_share_prefixes_and_answer_as_without_drafts() -> None:
    """A sequence of one cache is copied into the other; both draft in one batch."""
    found = []
    for speculation in ("mtp", "off"):
        options: dict[str, Any] = {"speculation": speculation, "draft_p_min": 0.0, "share_across_caches": True}
        caches = {"main": CacheInfo(512, 2), "fast": CacheInfo(512, 1)}
        async with running(caches, path=str(model("qwen35-mtp")), **options) as engine:
            first = await answer(engine, TEXT, 16)
            texts = [[*TEXT, *first, 40 + n] for n in range(3)]
            names = ("fast", "main", "main")
            jobs = [answer(engine, text, 20, cache=name) for text, name in zip(texts, names, strict=True)]
            found.append([first, *await asyncio.gather(*jobs)])
            stats = engine.stats()
        assert (stats.guessed_tokens > 60) == (speculation == "mtp")
        assert stats.reused_tokens + stats.copied_tokens
    assert alike(found[0], found[1])


async def test_streams_of_several_lora_adapters_answer_as_without_drafts(tmp_path: Path) -> None:
    """A step has the streams of one adapter; the head knows no adapters."""
    adapters = {}
    for n in range(2):
        random, tensor = np.random.default_rng(n), "blk.1.attn_output.weight"
        tensors = {
            f"{tensor}.lora_{side}": random.normal(0, 0.5, shape).astype(np.float32)
            for side, shape in (("a", (4, 64)), ("b", (64, 4)))
        }
        facts = {"general.type": "adapter", "general.architecture": "qwen35", "adapter.type": "lora"}
        adapters[f"a{n}"] = str(tmp_path / f"{n}.gguf")
        write(Path(adapters[f"a{n}"]), {**facts, "adapter.lora.alpha": 4.0}, tensors)
    sets: list[tuple[tuple[str, float], ...]] = [(), (("a0", 1.0),), (("a1", 0.5),)]
    found = []
    for speculation in ("mtp", "off"):
        async with opened(model("qwen35-mtp"), speculation=speculation, lora=adapters) as engine:
            first = await asyncio.gather(*(answer(engine, TEXT, 20, adapters=each) for each in sets))
            again = [
                await answer(engine, [*TEXT, *ids, 7], 12, adapters=each) for ids, each in zip(first, sets, strict=True)
            ]
            found.append([*first, *again])
            assert (engine.stats().guessed_tokens > 60) == (speculation == "mtp")
    assert alike(found[0], found[1])
    assert found[0][0] != found[0][1]


def alike(found: list[list[int]], expected: list[list[int]]) -> bool:
    """Of a random model two tokens may be equally likely: then a text goes on otherwise."""
    return sum(a == b for a, b in zip(found, expected, strict=True)) >= len(found) - 1


# --- sampling ---------------------------------------------------------------------------------------------------------


async def test_sampled_tokens_keep_their_distribution() -> None:
    """The third token, which a draft may have had: the head guesses the most likely one."""
    async with opened(agreeing_model("token", sharp=False), 8) as engine:
        jobs = [answer(engine, TEXT, 4, sampling=Sampling(temperature=1.0, top_k=6)) for _ in range(400)]
        found = [await each for at in range(0, 400, 8) for each in map(asyncio.ensure_future, jobs[at : at + 8])]
        stats = engine.stats()
    assert 0.2 < stats.accepted_tokens / stats.guessed_tokens < 0.8
    chi_square, freedom = 0.0, 0
    for second in {tokens[1] for tokens in found}:
        thirds = [tokens[2] for tokens in found if tokens[1] == second]
        expected = distribution(second, 6)
        assert set(thirds) <= set(expected)
        if len(thirds) >= 40:
            wanted = {token: len(thirds) * share for token, share in expected.items()}
            chi_square += sum((thirds.count(token) - count) ** 2 / count for token, count in wanted.items())
            freedom += 5
    assert freedom
    assert chi_square < freedom + 7 * np.sqrt(2 * freedom)  # by chance one in a hundred thousand


async def test_a_draft_ends_before_a_token_that_is_not_likely_enough() -> None:
    """Some guesses are, others are not: the KV of the last one must go, too."""
    async with opened(agreeing_model("token", sharp=False), draft_p_min=0.1) as engine:
        found = await answer(engine, TEXT, 60)
        stats, head = engine.stats(), engine._contexts[0].head
    assert head is not None
    assert head.works
    assert found == await _plain(agreeing_model("token", sharp=False), 60)
    assert 0 < stats.guessed_tokens < 100


async def _plain(path: Path, count: int) -> list[int]:
    async with opened(path, speculation="off") as engine:
        return await answer(engine, TEXT, count)


# --- what cannot draft ------------------------------------------------------------------------------------------------


async def test_a_file_without_mtp_layers_is_refused_with_the_reason() -> None:
    engine = llama_cpp.create(_spec(model("qwen35")))
    with pytest.raises(InvalidRequest, match="the file has no MTP layers") as refused:
        await engine.open(lambda *_: None)
    assert refused.value.code == "mtp_unavailable"
    ((field, message),) = llama_cpp.faults(_spec(model("qwen35")))
    assert (field, message) == ("speculation", refused.value.message)
    assert not list(llama_cpp.faults(_spec(model("qwen35-mtp"))))


def _spec(path: Path) -> Any:
    from tests.engines.llama_cpp.helpers import spec

    return spec(path=str(path), speculation="mtp")


async def test_a_library_without_the_functions_drafts_from_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lib, "missing", frozenset({"llama_set_embeddings_nextn"}))
    engine = llama_cpp.create(_spec(model("qwen35-mtp")))
    with pytest.raises(InvalidRequest, match="does not export llama_set_embeddings_nextn"):
        await engine.open(lambda *_: None)
    async with opened(model("qwen35-mtp"), speculation="auto") as engine:
        assert engine._contexts[0].head is None
        assert len(await answer(engine, TEXT)) == 12


async def test_auto_drafts_with_the_layers_of_the_file() -> None:
    async with opened(agreeing_model(), speculation="auto") as engine:
        assert engine._contexts[0].head is not None
        assert await answer(engine, TEXT, 30) == chain(TEXT[-1], 30)
        assert engine.stats().accepted_tokens > 15


async def test_auto_leaves_the_layers_alone_where_a_gpu_takes_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "uses_gpu", lambda options: True)
    async with opened(agreeing_model(), speculation="auto") as engine:
        assert engine._contexts[0].head is None
        assert await answer(engine, TEXT, 30) == chain(TEXT[-1], 30)


# --- the order of hidden rows -----------------------------------------------------------------------------------------


def order(counts: Sequence[tuple[int, int]], tail: int = 0) -> list[int] | None:
    """With logits for the last row of each sequence."""
    ends = set((np.cumsum([count for _, count in counts]) - 1).tolist())
    outputs = [row in ends for row in range(sum(count for _, count in counts))]
    found = computed_order(counts, outputs, tail)
    return None if found is None else found.tolist()


def test_rows_of_equal_counts_keep_the_order_of_the_batch() -> None:
    assert order([(0, 3), (1, 3), (5, 3)]) is None
    assert order([(4, 7)]) is None


def test_neighbours_are_computed_together_as_many_rows_as_all_have() -> None:
    assert order([(0, 1), (1, 3)]) == [0, 1, 2, 3]
    assert order([(0, 3), (2, 1)]) == [0, 1, 2, 3]  # not neighbours
    # 0 and 3 first, then 1 and 2; the outputs are the rows 3 and 2, and change places: so do the first two hidden rows.
    assert order([(0, 3), (1, 1)]) == [3, 0, 1, 2]


def test_the_last_rows_that_can_be_taken_back_stay_together() -> None:
    assert order([(0, 3), (1, 1)], tail=4) == [0, 1, 2, 3]
    assert order([(0, 1), (1, 4), (2, 1)], tail=4) == [0, 1, 2, 3, 4, 5]


# --- the names of the functions ---------------------------------------------------------------------------------------


class Symbols:
    """A library that exports these names."""

    def __init__(self, names: Sequence[str]) -> None:
        for name in names:
            setattr(self, name, lambda: None)


def test_functions_are_found_as_cpp_and_as_plain_c() -> None:
    plain = list(libllama.FEATURES["mtp"])
    mangled = ["_Z26llama_set_embeddings_nextnP13llama_contextbb", "_Z26llama_get_embeddings_nextnP13llama_context"]
    assert list(libllama.staged(cast("Any", Symbols(plain)))) == plain
    assert set(libllama.staged(cast("Any", Symbols(mangled)))) == {
        "llama_set_embeddings_nextn",
        "llama_get_embeddings_nextn",
    }
    assert lib.lacks("mtp") == []
