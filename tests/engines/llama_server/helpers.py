"""Helpers for tests of the llama-server engine: the real program, the default model, one thread, small windows."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from modelyard.core.engine import CacheInfo, EngineSpec, Generation
from modelyard.core.events import BlockDelta, Event, Finished, Usage
from modelyard.core.request import Message, Request, Sampling, Text
from modelyard.engines import llama_server
from modelyard.engines.llama_server.engine import LlamaServerEngine
from modelyard.library.default_model import fetch
from setup.llama_server import fetch_binary


@cache
def program() -> str:
    """Downloaded on the first use."""
    return str(fetch_binary())


def options(**chosen: Any) -> llama_server.Options:
    base = {"path": str(fetch()), "llama_server_binary": program(), "llama_server_n_threads": 1}
    return llama_server.Options(**base | chosen)


def engine(caches: Mapping[str, CacheInfo] | None = None, **chosen: Any) -> LlamaServerEngine:
    made = llama_server.create(EngineSpec("smollm2", options(**chosen), caches or {"main": CacheInfo(512, 2)}))
    assert isinstance(made, LlamaServerEngine)
    return made


@asynccontextmanager
async def running_engine(
    caches: Mapping[str, CacheInfo] | None = None, **chosen: Any
) -> AsyncIterator[LlamaServerEngine]:
    made = engine(caches, **chosen)
    try:
        await made.open(lambda *_: None)
        yield made
    finally:
        await made.close()


def chat_request(text: str = "Say hello.", **fields: Any) -> Request:
    chosen: dict[str, Any] = {"max_tokens": 8, "sampling": Sampling(temperature=0)}
    return Request(model="smollm2", messages=(Message("user", (Text(text),)),), **chosen | fields)


async def read_events(engine_: LlamaServerEngine, request: Request) -> list[Event]:
    return await read_rest(engine_.chat(request))


async def answer(request: Request, **chosen: Any) -> tuple[str, Usage, int | None]:
    """Text and usage of a reply by a server with these options, and its count of the prompt's tokens."""
    async with running_engine(**chosen) as made:
        events = await read_events(made, request)
        counted = await made.count(request)
    text = "".join(event.text for event in events if isinstance(event, BlockDelta))
    last = events[-1]
    assert isinstance(last, Finished)
    return text, last.usage, counted


async def read_rest(generation: Generation[Event]) -> list[Event]:
    return [event async for batch in generation for event in batch]


async def read_until_delta(generation: Generation[Event]) -> list[Event]:
    events: list[Event] = []
    while not any(isinstance(event, BlockDelta) for event in events):
        events += await anext(generation)
    return events
