"""The chat engines under the conformance suite, each told how to be made and what it takes to be asked."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, cast

import pytest

from modelyard.core.engine import CacheInfo, ChatEngine, EngineSpec
from modelyard.engines import fake, openai_remote
from modelyard.engines.openai_remote.options import ApiKind
from tests.engines.llama_server import helpers as llama_stage
from tests.engines.vllm_serve import helpers as vllm_stage
from tests.engines.vllm_serve import real_server as vllm_real
from tests.serving import serving

CACHES = {"main": CacheInfo(2048, 2)}
ECHO: dict[str, Any] = {
    "echo": True,
    "token_delay": 0,
    "script": [{"when": "^Endless", "steps": [{"text": "so far"}, {"hang": True}]}],
}


class ChatSubject(Protocol):
    """`made` gives an engine that is not opened, with all that it needs around it.

    `counts`: it can tell a prompt's tokens; `exact`: it says the same again, whatever runs beside it.
    """

    counts: bool
    exact: bool

    def made(self) -> AbstractAsyncContextManager[ChatEngine]: ...


class Fake:
    counts = exact = True

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ChatEngine]:
        options = fake.Options(kind="chat", **ECHO)
        yield cast(ChatEngine, fake.create(EngineSpec("demo", options, CACHES)))


class LlamaServer:
    counts, exact = True, False

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ChatEngine]:
        yield llama_stage.engine(CACHES)


class VllmServe:
    """Without vLLM: a program that takes its command line, and only echoes."""

    counts = exact = True

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ChatEngine]:
        yield vllm_stage.engine(CACHES)


class VllmServeOverLlamaServer:
    """Without vLLM, and with a real model: a llama-server behind vLLM's command line. It counts in another way."""

    counts = exact = False

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ChatEngine]:
        yield vllm_stage.engine(CACHES, **vllm_stage.real_model())


class RealVllmServe:
    counts, exact = True, False

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ChatEngine]:
        yield vllm_real.engine(CACHES)


class Remote:
    """In front of a second Modelyard, whose engine is the fake."""

    exact = True

    def __init__(self, kind: ApiKind) -> None:
        self._kind, self.counts = kind, kind != "chat_completions"

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ChatEngine]:
        for url in _second():
            options = openai_remote.Options(
                remote_base_url=f"{url}/v1", remote_model="demo", remote_api_kind=self._kind, remote_extensions=True
            )
            yield cast(ChatEngine, openai_remote.create(EngineSpec("frontier", options, CACHES)))


def _second() -> Iterator[str]:
    with serving({"models": {"demo": {"backend": "fake", "n_ctx": 4096, "parallel": 8, **ECHO}}}) as other:
        yield other.url


class RemoteLlamaServer:
    """In front of a llama-server that somebody else runs."""

    counts = exact = False

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ChatEngine]:
        async with llama_stage.running_engine(CACHES, llama_server_host="127.0.0.1") as there:
            place = there._running.client.place
            options = openai_remote.Options(
                remote_base_url=f"{place.base_url}/v1", remote_model="smollm2", remote_headers=dict(place.headers)
            )
            yield cast(ChatEngine, openai_remote.create(EngineSpec("frontier", options, CACHES)))


CHAT_SUBJECTS: dict[str, ChatSubject] = {
    "fake": Fake(),
    "llama_server": LlamaServer(),
    "remote_chat": Remote("chat_completions"),
    "remote_responses": Remote("responses"),
    "remote_anthropic": Remote("anthropic_messages"),
    "remote_llama_server": RemoteLlamaServer(),
    "vllm_serve": VllmServe(),
    "vllm_serve_over_llama_server": VllmServeOverLlamaServer(),
    "vllm_serve_real": RealVllmServe(),
}
MARKED = {"vllm_serve_real": pytest.mark.vllm}  # too heavy for every run
