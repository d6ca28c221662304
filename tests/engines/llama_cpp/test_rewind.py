"""Going back in models that cannot, or not far: the KV is used only where it still holds what the next token needs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from modelyard.core.engine import CacheInfo, Chunk
from modelyard.engines.llama_cpp import loading
from modelyard.engines.llama_cpp.engine import LlamaEngine
from tests.engines.llama_cpp.exact import N_SWA, VOCAB, recurrent_model, sliding_model
from tests.engines.llama_cpp.stage import id_prompt, running
from tests.engines.reading import accepted, assert_alike, end, ids, read

MODELS = [sliding_model, recurrent_model]
Model = Callable[[], Path]


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that forgets what lies behind the window, as large models need it; the default keeps all."""
    made = loading._parameters

    def parameters(info: Any, options: Any) -> Any:
        params = made(info, options)
        params.swa_full = False
        return params

    monkeypatch.setattr(loading, "_parameters", parameters)


@asynccontextmanager
async def opened(model: Model) -> AsyncIterator[LlamaEngine]:
    async with running({"main": CacheInfo(1024, 2)}, path=str(model())) as engine:
        yield engine


def words(seed: int, count: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(count)]


async def answer(engine: LlamaEngine, run: list[int], session: str = "a") -> list[Chunk]:
    chunks = await read(engine.generate(id_prompt(run, session=session)))
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
async def test_resent_prompt_says_the_same_again(model: Model) -> None:
    run = words(1, 300)
    async with opened(model) as engine:
        first, second = await answer(engine, run), await answer(engine, run)
    assert_alike(first, second)


@pytest.mark.parametrize("model", MODELS)
async def test_copy_of_a_longer_sequence_says_what_it_says_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.engines.llama_cpp.context._COPY_FROM", 8)
    run = words(1, 300)
    async with opened(model) as engine:
        await answer(engine, run, "a")
        await answer(engine, words(9, 30), "b")
        chunks = await answer(engine, run[:100] + words(4, 10), "b")
    assert_alike(chunks, await alone(model, run[:100] + words(4, 10)))
