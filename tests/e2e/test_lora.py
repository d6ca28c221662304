"""LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from modelyard.library import default_model
from tests.engines.llama_cpp.lora_files import write_lora
from tests.live_server import live_server


@pytest.fixture(scope="module")
def lora_sdk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    default_model.fetch()
    file = write_lora(tmp_path_factory.mktemp("lora") / "law.gguf", width=576, layers=30, seed=3, strength=0.2)
    models = {"smollm2": {"n_threads": 1, "lora": {"law": str(file)}}}
    with (
        live_server({"models": models, "caches": {"main": {"n_ctx": 512}, "fast": {"n_ctx": 512}}}) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="sk-dummy", max_retries=0) as client,
    ):
        yield client


def colours(lora_sdk: openai.OpenAI, adapter: str | None) -> str | None:
    reply = lora_sdk.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Name three colours."}],
        max_tokens=8,
        temperature=0,
        extra_body={"lora_adapter": adapter} if adapter else {},
    )
    return reply.choices[0].message.content


def test_a_lora_adapter_affects_only_its_request(lora_sdk: openai.OpenAI):
    before, adapted, after = colours(lora_sdk, None), colours(lora_sdk, "law"), colours(lora_sdk, None)
    assert adapted != before
    assert after == before


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_lora_adapter_is_a_400_that_lists_the_known_ones(lora_sdk: openai.OpenAI, stream: bool):
    with pytest.raises(openai.BadRequestError, match="unknown adapter 'poet'; use one of 'law'") as caught:
        lora_sdk.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "hi"}],
            stream=stream,
            extra_body={"lora_adapter": "poet"},
        )
    assert caught.value.code == "adapter_unknown"
    assert caught.value.param == "lora_adapter"
