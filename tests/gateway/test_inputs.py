"""Requests that generate nothing: counts, embeddings and rankings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from modelyard.core.engine import Capabilities, Embeddings
from modelyard.core.errors import (
    ContextOverflow,
    InvalidRequest,
    Unimplemented,
    Unsupported,
)
from modelyard.core.request import (
    EmbeddingRequest,
    RerankRequest,
)
from tests.gateway.harness import (
    CALLER,
    GatewayHarness,
    ManualEngine,
    ids,
    make_request,
    model,
    refusal,
)


@pytest.mark.parametrize("id", [model().pipeline.tokenizer.size, 10**9])
async def test_a_token_id_outside_the_vocabulary_is_refused(id: int) -> None:
    harness = GatewayHarness()
    error = await refusal(harness, InvalidRequest, messages=(), prompts=((1, id),))
    assert (error.param, str(id) in error.message) == ("prompt", True)
    with pytest.raises(InvalidRequest) as caught:
        await harness.gateway.inputs.embed(EmbeddingRequest(model="demo", inputs=((id,),)), CALLER)
    assert caught.value.param == "input"


async def test_counting_needs_no_engine_and_matches_the_prompt() -> None:
    harness = GatewayHarness()
    assert harness.scheduler.status()["demo"].state == "stopped"
    prepared = await harness.gateway.prepare(make_request("one two three"), CALLER)
    assert await harness.gateway.inputs.count(make_request("one two three"), CALLER) == len(prepared.prompts[0].ids)


async def test_a_chat_engine_that_is_not_loaded_cannot_count() -> None:
    with pytest.raises(Unimplemented):
        await GatewayHarness(kind="chat", text=None).gateway.inputs.count(make_request(), CALLER)


async def test_an_engine_without_embeddings_refuses_and_releases_its_slot() -> None:
    async with GatewayHarness() as harness:
        with pytest.raises(Unsupported) as caught:
            await harness.gateway.inputs.embed(EmbeddingRequest(model="demo", inputs=("hi", tuple(ids("ho")))), CALLER)
        assert caught.value.code == "embeddings_unsupported"
        assert harness.running == 0


class VectorEngine(ManualEngine):
    """Its vector of an input is its number of tokens and the first token."""

    async def embed(self, batch: Sequence[Sequence[int]]) -> Embeddings:
        return Embeddings([[float(len(ids)), float(ids[0])] for ids in batch], sum(map(len, batch)))


def reading_harness(**changes: Any) -> GatewayHarness:
    harness = GatewayHarness(**changes)
    engine = VectorEngine(dict(harness.engine.info.caches), None)
    can = Capabilities(generates=False, embeddings=True, rerank=True)
    engine.info = msgspec.structs.replace(engine.info, capabilities=can)
    harness.engine = engine
    return harness


async def test_texts_get_the_tokens_that_belong_around_them_and_ids_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model().pipeline.tokenizer, "wrapping", ([1], [2]))
    async with reading_harness() as harness:
        made = await harness.gateway.inputs.embed(
            EmbeddingRequest(model="demo", inputs=("hi", tuple(ids("hi")))), CALLER
        )
        assert [vector[0] for vector in made.vectors] == [len(ids("hi")) + 2, len(ids("hi"))]
        assert made.vectors[0][1] == 1
        assert harness.running == 0


async def test_the_best_documents_come_first_and_the_request_is_recorded() -> None:
    async with reading_harness() as harness:
        request = RerankRequest(model="demo", query="q", documents=("a", "a b c d", "a b"), top_n=2)
        found = await harness.gateway.inputs.rerank(request, CALLER)
        assert [index for index, _ in found.scores] == [1, 2]
        (record,) = harness.gateway.history.recent(5)
        assert (record.model, record.status, record.usage.prompt) == ("demo", "end", found.prompt_tokens)
        with pytest.raises(ContextOverflow) as caught:
            await harness.gateway.inputs.rerank(msgspec.structs.replace(request, documents=("word " * 5000,)), CALLER)
        assert caught.value.window == 4096


async def test_an_input_as_long_as_the_window_fits() -> None:
    async with reading_harness() as harness:
        token = ids("hi")[0]
        made = await harness.gateway.inputs.embed(EmbeddingRequest(model="demo", inputs=((token,) * 4096,)), CALLER)
        assert made.prompt_tokens == 4096
        with pytest.raises(ContextOverflow) as caught:
            await harness.gateway.inputs.embed(EmbeddingRequest(model="demo", inputs=((token,) * 4097,)), CALLER)
        assert (caught.value.prompt_tokens, caught.value.window) == (4097, 4096)
