"""Load on any OpenAI-compatible URL: chat completions, streamed, each stream on a connection of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import SplitResult, urlsplit

import httpx
import msgspec

from modelyard.benchmark.hearing import Hearing, words
from modelyard.benchmark.sample import Sample
from modelyard.benchmark.sizes import WordSizes
from modelyard.benchmark.workload import Ask
from modelyard.core.errors import InvalidRequest, NotFound, Unavailable
from modelyard.protocols import openai_chat

_PATH = "/chat/completions"
_LOCAL = ("127.0.0.1", "localhost", "::1")
_CONNECT_S = 10.0
_IDLE_S = 2.0


def base_of(url: str) -> str:
    """Where `/chat/completions` and `/models` stand: people paste an address with or without what comes after it."""
    parts = urlsplit(url.rstrip("/"))
    if parts.scheme not in ("http", "https") or not parts.hostname or not _has_good_port(parts):
        raise InvalidRequest(f"{url!r} is not a URL such as http://127.0.0.1:8000")
    base = parts.geturl().removesuffix(_PATH)
    return base if urlsplit(base).path else f"{base}/v1"


def _has_good_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:
        return False


def _limits(base: str) -> httpx.Limits:
    """Only TLS is worth keeping a connection for. llama-server gives one up after each stream without a word before: a
    request on it in that very moment would look like a failure of the server."""
    kept = None if base.startswith("https:") else 0
    return httpx.Limits(max_connections=None, max_keepalive_connections=kept, keepalive_expiry=_IDLE_S)


def _headers(key: str | None) -> dict[str, str]:
    if key and not (key.isascii() and key.isprintable()):
        raise InvalidRequest("the API key has characters that no HTTP header may have")
    return {"authorization": f"Bearer {key}"} if key else {}


class UrlLoad:
    """`async with` it. Without a model it asks for the first that the server lists. `extra` goes into every request."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        key: str | None = None,
        name: str = "",
        limit_s: float = 600.0,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.base, self.name, self.limit_s = base_of(url), name or url, limit_s
        self._model, self._extra = model, dict(extra or {})
        self.sizes = WordSizes()
        self.http = httpx.AsyncClient(
            headers=_headers(key),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # the whole answer has a limit of its own
            limits=_limits(self.base),
            trust_env=urlsplit(self.base).hostname not in _LOCAL,  # no proxy on the way to this machine
        )

    async def __aenter__(self) -> Self:
        try:
            self._model = self._model or await self._first()
        except BaseException:
            await self.http.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    @property
    def model(self) -> str:
        return self._model or ""

    def begin(self) -> _Talk:
        return _Talk(self)

    def body(self, messages: list[dict[str, str]], output_tokens: int) -> bytes:
        asked: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return msgspec.json.encode(asked | self._extra)

    async def _first(self) -> str:
        try:
            async with asyncio.timeout(self.limit_s):
                reply = await self.http.get(f"{self.base}/models")
        except (httpx.HTTPError, TimeoutError) as error:
            raise Unavailable(f"{self.base} does not answer: {_sentence(error, self.limit_s)}") from None
        if reply.status_code != 200:
            raise openai_chat.read_error(reply.status_code, reply.headers, reply.content)
        try:
            return str(reply.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise NotFound(f"{self.base} lists no models; name one with --model") from None


class _Talk:
    def __init__(self, load: UrlLoad) -> None:
        self._load = load
        self._messages: list[dict[str, str]] = []

    async def ask(self, ask: Ask) -> Sample:
        sizes = self._load.sizes
        text = sizes.more(ask) if self._messages else sizes.first(ask)
        self._messages.append({"role": "user", "content": text})
        body = self._load.body(self._messages, ask.output_tokens)
        hearing = Hearing(time.perf_counter())
        error = await self._read(hearing, body)
        sample = hearing.sample(time.perf_counter(), error)
        if len(self._messages) == 1:
            sizes.learn(text, sample.prompt_tokens)
        self._messages.append({"role": "assistant", "content": hearing.text})
        return sample

    async def _read(self, hearing: Hearing, body: bytes) -> str | None:
        load = self._load
        try:
            async with asyncio.timeout(load.limit_s):
                return await self._stream(hearing, body)
        except (httpx.HTTPError, TimeoutError) as error:
            return _sentence(error, load.limit_s)

    async def _stream(self, hearing: Hearing, body: bytes) -> str | None:
        headers, reader = {"content-type": "application/json"}, openai_chat.reader()
        async with self._load.http.stream(
            "POST", self._load.base + _PATH, content=body, headers=headers
        ) as reply:  # fmt: skip
            if reply.status_code != 200:
                refused = openai_chat.read_error(reply.status_code, reply.headers, await reply.aread())
                return f"{reply.status_code}: {words(refused)}"
            async for data in reply.aiter_bytes():
                hearing.hear(reader.feed(data), time.perf_counter())
            hearing.hear(reader.finish(), time.perf_counter())
        return None


def _sentence(error: Exception, limit_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"not finished within {limit_s:g} s"
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "nobody listens there"
    return f"the connection broke: {error or type(error).__name__}"
