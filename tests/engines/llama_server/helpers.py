"""What the llama_server engine's tests share: the real program and the default model, one thread, small windows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.core.events import Event
from modelyard.core.request import Message, Request, Sampling, Text
from modelyard.engines import llama_server
from modelyard.engines.llama_server.engine import LlamaServer
from modelyard.library.default_model import fetch
from modelyard.library.llama_server import fetch_binary


@cache
def program() -> str:
    """Fetched where this machine does not have it yet."""
    return str(fetch_binary())


def options(**chosen: Any) -> llama_server.Options:
    base = {"path": str(fetch()), "llama_server_binary": program(), "llama_server_n_threads": 1}
    return llama_server.Options(**base | chosen)


def engine(caches: Mapping[str, CacheInfo] | None = None, **chosen: Any) -> LlamaServer:
    made = llama_server.create(EngineSpec("smollm2", options(**chosen), caches or {"main": CacheInfo(512, 2)}))
    assert isinstance(made, LlamaServer)
    return made


@asynccontextmanager
async def running(caches: Mapping[str, CacheInfo] | None = None, **chosen: Any) -> AsyncIterator[LlamaServer]:
    it = engine(caches, **chosen)
    try:
        await it.open(lambda *_: None)
        yield it
    finally:
        await it.close()


def asked(text: str = "Say hello.", **fields: Any) -> Request:
    chosen: dict[str, Any] = {"max_tokens": 8, "sampling": Sampling(temperature=0)}
    return Request(model="smollm2", messages=(Message("user", (Text(text),)),), **chosen | fields)


async def read(it: LlamaServer, request: Request) -> list[Event]:
    return [event async for batch in it.chat(request) for event in batch]
