"""Another Modelyard, or this one, over HTTP: the admin API and the public protocols, as any client sees them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from modelyard.core.errors import InvalidRequest, ModelyardError, Unavailable
from modelyard.core.protocol import WireProtocol
from modelyard.protocols import openai_chat

Json = dict[str, Any]

_CONNECT_S, _ANSWER_S = 5.0, 30.0
_LOAD_S = 3600.0  # a large model from a slow disk; who does not want to wait closes the page


class Client:
    """`key` may change while it lives: somebody types one in. Every call raises a ModelyardError that says why."""

    def __init__(self, url: str, key: str = "", *, verify: bool = True, socket: str = "") -> None:
        self.url, self.key = url.rstrip("/"), key
        self._base = "http://localhost" if socket else self.url
        transport = httpx.AsyncHTTPTransport(uds=socket) if socket else None
        timeout = httpx.Timeout(_ANSWER_S, connect=_CONNECT_S)
        self._http = httpx.AsyncClient(transport=transport, timeout=timeout, verify=verify)

    async def close(self) -> None:
        await self._http.aclose()

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    # --- models -------------------------------------------------------------------------------------------------------

    async def models(self) -> list[Json]:
        return _rows(await self._ask("GET", "models"))

    async def load(self, model: str, overrides: Mapping[str, Any]) -> None:
        """Ordered, not awaited: the model's record tells how far it is, and why it failed."""
        await self._order(model, "load", dict(overrides), {"wait": "false"})

    async def unload(self, model: str, *, force: bool = False) -> None:
        await self._order(model, "unload", None, {"wait": "false", "force": "true" if force else "false"})

    async def drain(self, model: str) -> None:
        await self._order(model, "drain", None, {})

    async def scale(self, model: str, replicas: int) -> None:
        await self._order(model, "replicas", {"replicas": replicas}, {"wait": "false"})

    async def estimate(self, model: str, overrides: Mapping[str, Any]) -> Json:
        return await self._order(model, "estimate", dict(overrides), {})

    async def _order(self, model: str, what: str, body: Any, query: Mapping[str, str]) -> Json:
        return await self._ask("POST", f"models/{quote(model)}/{what}", body, query)

    # --- what the server holds ----------------------------------------------------------------------------------------

    async def memory(self) -> Json:
        return await self._ask("GET", "gpu-memory")

    async def caches(self) -> list[Json]:
        return _rows(await self._ask("GET", "caches"))

    async def history(self) -> Json:
        return await self._ask("GET", "history")

    async def keep_texts(self, on: bool) -> None:
        await self._ask("POST", "history", {"texts": on})

    async def tune(self) -> list[Json]:
        return _rows(await self._ask("GET", "tune"))

    async def route(self, model: str, endpoint: str) -> Json:
        return await self._ask("GET", "route", query={"model": model, "endpoint": endpoint})

    # --- requests -----------------------------------------------------------------------------------------------------

    async def requests(self, limit: int, since: float) -> Json:
        return await self._ask("GET", "requests", query={"limit": str(limit), "since": repr(since)})

    async def request(self, id: str) -> Json:
        return await self._ask("GET", f"requests/{quote(id, safe='')}")

    async def cancel(self, id: str) -> None:
        await self._ask("POST", f"requests/{quote(id, safe='')}/cancel")

    async def covered(self, model: str, prompt: str, tokens: int) -> str:
        """The text of the prompt's first so many tokens."""
        told = await self._send("POST", "/tokenize", {"model": model, "content": prompt, "parse_special": True})
        ids = told["tokens"][:tokens]
        text = await self._send("POST", "/detokenize", {"model": model, "tokens": ids})
        return str(text["content"])

    # --- answers ------------------------------------------------------------------------------------------------------

    async def stream(self, wire: WireProtocol, body: bytes) -> AsyncIterator[bytes]:
        """The answer's bytes as they come. Closing the iterator hangs up, which ends the work there."""
        with self._plain_words():
            patience = httpx.Timeout(None, connect=_CONNECT_S)  # the server pings: silence is its work, not its death
            request = self._http.build_request(
                "POST", self._base + wire.PATHS[0], content=body, headers=self.headers, timeout=patience
            )
            reply = await self._http.send(request, stream=True)
            try:
                if reply.status_code != 200:
                    raise wire.read_error(reply.status_code, reply.headers, await reply.aread())
                async for data in reply.aiter_bytes():
                    yield data
            finally:
                await reply.aclose()

    # --- the wire -----------------------------------------------------------------------------------------------------

    async def _ask(self, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None) -> Json:
        return await self._send(method, f"/v1/admin/{path}", body, query)

    async def _send(self, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None) -> Json:
        with self._plain_words():
            content = None if body is None else msgspec.json.encode(body)
            headers = {**self.headers, "content-type": "application/json"}
            reply = await self._http.request(method, self._base + path, content=content, params=query, headers=headers)
        if reply.status_code >= 400:
            raise openai_chat.read_error(reply.status_code, reply.headers, reply.content)
        try:
            return msgspec.json.decode(reply.content, type=dict[str, Any])
        except msgspec.DecodeError:
            raise Unavailable(f"{self.url} answers, but not as a Modelyard does") from None

    @contextmanager
    def _plain_words(self) -> Iterator[None]:
        try:
            yield
        except httpx.InvalidURL as error:
            raise InvalidRequest(f"{self.url} is not a URL: {error}") from None
        except httpx.TimeoutException:
            raise Lost(f"{self.url} does not answer in time") from None
        except httpx.HTTPError as error:
            raise Lost(f"no server answers at {self.url}: {error or type(error).__name__}") from None


class Lost(Unavailable):
    """The server could not be reached, as opposed to one that answers no."""


def _rows(told: Json) -> list[Json]:
    rows: list[Json] = told["data"]
    return rows


__all__ = ["Client", "Json", "Lost", "ModelyardError"]
