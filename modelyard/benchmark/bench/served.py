"""A server for the time of a measurement: `modelyard serve` in a child process, on a free port of this machine."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import httpx

from modelyard.core.errors import Timeout, Unavailable
from modelyard.processes.child import Child, fate
from modelyard.protocols import openai_chat

T = TypeVar("T")

_LISTENING = re.compile(r"listening on (https?)://[^\s:]+:(\d+)")
_START_S, _LOAD_S = 120.0, 900.0
_PAUSE_S = 0.05
_WORDS = 5  # lines of its output that explain an early end


@asynccontextmanager
async def served(config: Path | None, model: str, key: str | None, say: Callable[[str], None]) -> AsyncIterator[str]:
    """Its URL, once the model is loaded."""
    file = () if config is None else ("--config", str(config))
    argv = [sys.executable, "-m", "modelyard", "serve", "--host", "127.0.0.1", "--port", "0", *file]
    child = await Child.start(argv, dict(os.environ))
    try:
        say("starting a server")
        url = await _within(_START_S, "listen", _address(child))
        say("loading the model")
        await _within(_LOAD_S, "load the model", _ready(child, url, model, key))
        yield url
    finally:
        await child.stop()


async def _within(seconds: float, what: str, wait: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await wait
    except TimeoutError:
        raise Timeout(f"the server did not {what} within {seconds:g} s") from None


async def _address(child: Child) -> str:
    while True:
        for line in child.log.lines():
            if found := _LISTENING.search(line):
                return f"{found.group(1)}://127.0.0.1:{found.group(2)}"
        await _pause(child)


async def _ready(child: Child, url: str, model: str, key: str | None) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(headers=headers, timeout=60, trust_env=False) as http:
        while (state := await _state(http, f"{url}/v1/models/{quote(model)}")) != "ready":
            if state == "failed":
                raise Unavailable(f"the server could not load {model!r}: {child.log.tail(_WORDS)}")
            if state not in ("loading", "starting"):
                return  # it is loaded by the first request
            await _pause(child)


async def _state(http: httpx.AsyncClient, card: str) -> str:
    try:
        reply = await http.get(card)
    except httpx.HTTPError as error:
        raise Unavailable(f"the server does not answer: {error}") from None
    if reply.status_code != 200:
        raise openai_chat.read_error(reply.status_code, reply.headers, reply.content)
    return str(reply.json()["state"])


async def _pause(child: Child) -> None:
    await asyncio.wait({child.ended}, timeout=_PAUSE_S)
    if child.ended.done():
        raise Unavailable(f"the server {fate(child.ended.result())}: {child.log.tail(_WORDS) or 'it said nothing'}")
