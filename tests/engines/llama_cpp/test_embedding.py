"""Embeddings: the plan of steps, and vectors of the default model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from modelyard.core.engine import AvailableMemory, CacheInfo, EmbeddingEngine, Tokens
from modelyard.core.errors import ContextOverflow, InvalidRequest, Unsupported
from modelyard.engines.llama_cpp import embedding, loading
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.embedding import EmbeddingContext, InputSlice, plan_embedding_steps
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.telemetry import system
from modelyard.tokenizer.gguf import GgufTokenizer
from tests.engines.llama_cpp import tiny_models
from tests.engines.llama_cpp.helpers import Tap, answer, model_file, prompt, running, shared_loop, spec, vocabulary
from tests.engines.reading import end, ids, read, until


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[LlamaCppEngine]:
    async with running(embeddings=True) as opened:
        yield opened


CAT, KITTEN, LAW = "A cat sleeps on the sofa.", "A kitten naps on the couch.", "The court rejected the tax appeal."


def tokens(*texts: str) -> list[list[int]]:
    return [vocabulary().encode(text) for text in texts]


def cosine(a: list[float], b: list[float]) -> float:
    return float(np.dot(a, b))


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_short_inputs_share_a_step_and_a_long_one_has_its_own_steps() -> None:
    assert plan_embedding_steps([3, 4, 20, 2, 8], 8) == [
        [InputSlice(0, 0, 3), InputSlice(1, 0, 4)],
        [InputSlice(2, 0, 8)],
        [InputSlice(2, 8, 8)],
        [InputSlice(2, 16, 4)],
        [InputSlice(3, 0, 2)],
        [InputSlice(4, 0, 8)],
    ]


@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 20), st.integers(1, 5))
def test_every_token_is_read_once_in_order_and_no_step_is_too_large(lengths: list[int], rows: int, places: int) -> None:
    steps = plan_embedding_steps(lengths, rows, places)
    pieces = [piece for step in steps for piece in step]
    for index, length in enumerate(lengths):
        own = [piece for piece in pieces if piece.index == index]
        assert [at for p in own for at in range(p.start, p.start + p.count)] == list(range(length))
    assert all(sum(p.count for p in step) <= rows and len(step) <= places for step in steps)
    # A step that begins an input clears the context: no other input may be unfinished.
    assert all(len(step) == 1 or all(p.start == 0 for p in step) for step in steps)


# --- on the model -----------------------------------------------------------------------------------------------------


@shared_loop
async def test_similar_sentences_have_similar_vectors_of_length_one(engine: LlamaCppEngine) -> None:
    assert isinstance(engine, EmbeddingEngine)
    assert engine.info.capabilities.embeddings
    made = await engine.embed(tokens(CAT, KITTEN, LAW, CAT))
    cat, kitten, law, again = made.vectors
    assert made.prompt_tokens == sum(map(len, tokens(CAT, KITTEN, LAW, CAT)))
    assert cosine(cat, kitten) > cosine(cat, law)
    assert cat == again
    assert [cosine(one, one) for one in made.vectors] == pytest.approx([1.0] * 4, abs=1e-5)


@shared_loop
async def test_a_vector_does_not_depend_on_the_batch(engine: LlamaCppEngine) -> None:
    (alone,) = (await engine.embed(tokens(CAT))).vectors
    (again,) = (await engine.embed(tokens(CAT))).vectors
    _, _, beside = (await engine.embed(tokens(LAW * 16, KITTEN, CAT))).vectors
    assert alone == again
    assert cosine(alone, beside) > 0.999


@pytest.mark.parametrize(("pooling", "code"), [("mean", 1), ("cls", 2), ("last", 3)])
async def test_slices_are_pooled_as_llama_cpp_pools_the_whole(pooling: str, code: int) -> None:
    text = tokens(LAW + " " + CAT + " " + KITTEN)[0]
    assert len(text) > 16
    async with running(pooling=pooling, embeddings=True) as engine:
        (sliced,) = (await engine.embed([text])).vectors
    assert cosine(sliced, whole(text, code)) > 0.999


def whole(text: list[int], pooling: int) -> list[float]:
    """Pooled by llama.cpp, in one micro-batch."""
    asked = spec(n_ubatch=64, n_batch=64)
    model = loading.load_model(model_file(), asked.options, lambda _: True)
    params = loading.context_parameters(CacheInfo(256), asked.options)
    params.embeddings, params.pooling_type = True, pooling
    raw = lib.llama_init_from_model(model, params)
    batch = embedding.LlamaBatch(64)
    batch.add(np.array(text, np.int32), 0, 0, last=True)
    batch.output[: len(text)] = 1
    assert lib.llama_decode(raw, batch.raw) == 0
    made = np.ctypeslib.as_array(lib.llama_get_embeddings_seq(raw, 0), (576,)).copy()
    lib.llama_free(raw)
    lib.llama_model_free(model)
    return embedding.normalize(made)


async def test_a_stream_waits_for_one_slice_of_a_long_input_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    reads = EmbeddingContext.read

    def noted(self: EmbeddingContext, *arguments: Any) -> None:
        order.append("slice")
        reads(self, *arguments)

    monkeypatch.setattr(EmbeddingContext, "read", noted)
    async with running(embeddings=True) as engine:
        tap = Tap(engine)
        monkeypatch.setattr(tap, "on_chunk", lambda _, chunk: isinstance(chunk, Tokens) and order.append("token"))
        stream = engine.generate(prompt("Tell me a long story.", max_tokens=400))
        await until(stream, Tokens)
        await engine.embed(tokens(LAW * 12))
        stream.cancel()
        await read(stream)
    slices = [at for at, what in enumerate(order) if what == "slice"]
    assert len(slices) > 4
    for earlier, later in pairwise(slices):
        assert "token" in order[earlier:later]


@shared_loop
async def test_embeddings_do_not_touch_the_caches(engine: LlamaCppEngine) -> None:
    before = await answer(engine, "Tell me about Paris.", session="a")
    await engine.embed(tokens(CAT))
    after = await answer(engine, "Tell me about Paris.", session="a")
    assert ids(after) == ids(before)
    assert end(after).usage.cached > 0


@shared_loop
@pytest.mark.parametrize("bad", [[], [49152], [-1]])
async def test_an_invalid_input_is_refused(engine: LlamaCppEngine, bad: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        await engine.embed([*tokens(CAT), bad])
    assert len((await engine.embed(tokens(CAT))).vectors) == 1


async def test_a_context_that_does_not_fit_is_refused_and_the_engine_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(embeddings=True) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(system, "free_memory", lambda **_: AvailableMemory(0))
            with pytest.raises(InvalidRequest, match="are free"):
                await engine.embed(tokens(CAT))
        assert end(await answer(engine)).reason == "length"
        assert len((await engine.embed(tokens(CAT))).vectors) == 1


# --- models that only embed -------------------------------------------------------------------------------------------


def wrapped(file: Path, text: str) -> list[int]:
    tokenizer = GgufTokenizer(file)
    first, last = tokenizer.wrapping
    return [*first, *tokenizer.encode(text), *last]


async def test_an_encoder_reads_a_long_input_in_one_micro_batch_beside_short_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tiny_models.nomic_bert()
    steps: list[list[InputSlice]] = []
    reads = EmbeddingContext.read

    def noted(self: EmbeddingContext, step: list[InputSlice], *rest: Any) -> None:
        steps.append(step)
        reads(self, step, *rest)

    monkeypatch.setattr(EmbeddingContext, "read", noted)
    long, short = wrapped(file, "the cat naps " * 200), wrapped(file, "paris is a capital")
    async with running({"main": CacheInfo(1024, 1)}, path=str(file)) as engine:
        (alone,) = (await engine.embed([short])).vectors
        (first,) = (await engine.embed([long])).vectors
        whole, beside = (await engine.embed([long, short])).vectors
    assert steps[0] == [InputSlice(0, 0, len(short))]
    assert [len(step) for step in steps[1:]] == [1, 2]
    assert steps[2] == [InputSlice(0, 0, len(long)), InputSlice(1, 0, len(short))]
    assert (cosine(first, whole), cosine(alone, beside)) == pytest.approx((1.0, 1.0), abs=1e-4)


async def test_learned_positions_limit_the_window_and_a_longer_input_is_refused_with_the_limit() -> None:
    async with running({"main": CacheInfo(4096, 1)}, path=str(tiny_models.bert("cls"))) as engine:
        assert engine.info.caches["main"].window == tiny_models.BERT_WINDOW
        with pytest.raises(ContextOverflow) as caught:
            await engine.embed([[2] + [80] * tiny_models.BERT_WINDOW])
        assert (caught.value.prompt_tokens, caught.value.window) == (513, 512)
        assert len((await engine.embed([[2] + [80] * 511])).vectors) == 1


async def test_an_embedding_model_generates_nothing_and_needs_no_kv() -> None:
    async with running({"main": CacheInfo(512, 1)}, path=str(tiny_models.bert("mean"))) as engine:
        can = engine.info.capabilities
        assert (can.generates, can.embeddings, can.rerank) == (False, True, False)
        refusal = end(await answer(engine)).error
        assert refusal is not None
        assert refusal.code == "model_has_no_chat"
        assert engine.stats().sequences == 0


async def test_a_model_that_generates_embeds_only_if_its_settings_say_so() -> None:
    async with running({"main": CacheInfo(512, 1)}, path=str(tiny_models.coder())) as engine:
        assert not engine.info.capabilities.embeddings
        with pytest.raises(Unsupported) as caught:
            await engine.embed([[1, 2]])
        assert caught.value.code == "embeddings_unsupported"


async def test_a_file_without_pooling_needs_a_setting() -> None:
    file = str(tiny_models.bert("none"))
    async with running({"main": CacheInfo(512, 1)}, path=file) as engine:
        with pytest.raises(Unsupported, match="set pooling"):
            await engine.embed([[2, 80, 3]])
    async with running({"main": CacheInfo(512, 1)}, path=file, pooling="cls") as engine:
        assert len((await engine.embed([[2, 80, 3]])).vectors[0]) == tiny_models.WIDTH


async def test_a_ranking_model_returns_its_scores_also_for_an_input_in_slices() -> None:
    file = tiny_models.last_token_ranker()
    ids = wrapped(file, "Is Paris the capital of France? " * 5)
    async with running({"main": CacheInfo(512, 1)}, path=str(file)) as engine:
        assert engine.info.capabilities.rerank
        (sliced,) = (await engine.embed([ids])).vectors
    async with running({"main": CacheInfo(512, 1)}, path=str(file), n_ubatch=128, n_batch=128) as engine:
        (whole,) = (await engine.embed([ids])).vectors
    assert len(ids) > 32
    assert len(whole) == 2
    assert sliced == pytest.approx(whole, abs=1e-3)
    assert sum(whole) == pytest.approx(1.0, abs=1e-4)  # the model ends in a softmax
