"""The chat engines under the conformance suite: how to create each, and what it can do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, cast

import pytest

import modelyard_fake as fake
from modelyard.core.engine import CacheInfo, ChatEngine, EngineSpec
from modelyard.engines import openai_remote
from modelyard.engines.openai_remote import ApiKind
from tests.engines.llama_server import helpers as llama_helpers
from tests.engines.vllm_serve import helpers as vllm_helpers
from tests.engines.vllm_serve import real_server as vllm_real
from tests.live_server import live_server

CACHES = {"main": CacheInfo(2048, 2)}
ECHO: dict[str, Any] = {
    "echo": True,
    "token_delay": 0,
    "script": [{"when": "^Endless", "steps": [{"text": "so far"}, {"hang": True}]}],
}


class ChatSubject(Protocol):
    """`create` returns an engine that is not open yet, with everything that it needs.

    `counts`: it counts the tokens of a prompt. `is_exact`: concurrent requests do not change its answers.
    """

    counts: bool
    is_exact: bool

    def create(self) -> AbstractAsyncContextManager[ChatEngine]: ...


class Fake:
    counts = is_exact = True

    @asynccontextmanager
    async def create(self) -> AsyncIterator[ChatEngine]:
        options = fake.Options(kind="chat", **ECHO)
        yield cast(ChatEngine, fake.create(EngineSpec("demo", options, CACHES)))


class LlamaServer:
    counts, is_exact = True, False

    @asynccontextmanager
    async def create(self) -> AsyncIterator[ChatEngine]:
        yield llama_helpers.engine(CACHES)


class VllmServe:
    """A fake vllm program that only echoes."""

    counts = is_exact = True

    @asynccontextmanager
    async def create(self) -> AsyncIterator[ChatEngine]:
        yield vllm_helpers.engine(CACHES)


class VllmServeOverLlamaServer:
    """A real model: llama-server behind vLLM's command line. It has no tokenizer endpoint like vLLM's."""

    counts = is_exact = False

    @asynccontextmanager
    async def create(self) -> AsyncIterator[ChatEngine]:
        yield vllm_helpers.engine(CACHES, **vllm_helpers.real_model())


class RealVllmServe:
    counts, is_exact = True, False

    @asynccontextmanager
    async def create(self) -> AsyncIterator[ChatEngine]:
        yield vllm_real.engine(CACHES)


class Remote:
    """In front of a second Modelyard with the fake engine."""

    is_exact = True

    def __init__(self, kind: ApiKind) -> None:
        self._kind, self.counts = kind, kind != "chat_completions"

    @asynccontextmanager
    async def create(self) -> AsyncIterator[ChatEngine]:
        with live_server({"models": {"demo": {"backend": "fake", "n_ctx": 4096, "parallel": 8, **ECHO}}}) as other:
            options = openai_remote.Options(
                remote_base_url=f"{other.url}/v1",
                remote_model="demo",
                remote_api_kind=self._kind,
                remote_extensions=True,
            )
            yield cast(ChatEngine, openai_remote.create(EngineSpec("frontier", options, CACHES)))


class RemoteLlamaServer:
    """In front of a llama-server as a remote server."""

    counts = is_exact = False

    @asynccontextmanager
    async def create(self) -> AsyncIterator[ChatEngine]:
        async with llama_helpers.running_engine(CACHES, llama_server_host="127.0.0.1") as there:
            address = there.server.upstream.address
            options = openai_remote.Options(
                remote_base_url=f"{address.base_url}/v1", remote_model="smollm2", remote_headers=dict(address.headers)
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
MARKED = {"vllm_serve_real": pytest.mark.vllm}  # too slow for every run
