"""HTTP client of a Modelyard server: the admin API and the public protocols."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from modelyard.accounts.owner import OWNER_HEADER, USER_HEADER
from modelyard.core.chat import Chat, ChatSummary
from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Request
from modelyard.http.inference import PROGRESS_HEADER
from modelyard.protocols import openai_chat

Json = dict[str, Any]

_CONNECT_TIMEOUT_S, _REPLY_TIMEOUT_S = 5.0, 30.0


class ServerUnreachable(Unavailable):
    """The server could not be reached, as opposed to a server that answers with an error."""


class ApiClient:
    """`key` may change at any time; `owner` is the token of the server's user, on their pages, `visitor` another user
    of the machine with that token. Every call raises a ModelyardError if it fails. `socket` is a unix socket to use
    instead of `url`."""

    def __init__(self, url: str, key: str = "", *, verify: bool = True, socket: str = "") -> None:
        self.url, self.key, self.owner = url.rstrip("/"), key, ""
        self.visitor = "", ""
        self._base = "http://localhost" if socket else self.url
        transport = httpx.AsyncHTTPTransport(uds=socket) if socket else None
        timeout = httpx.Timeout(_REPLY_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        self._http = httpx.AsyncClient(transport=transport, timeout=timeout, verify=verify)

    async def close(self) -> None:
        await self._http.aclose()

    # --- the admin API ------------------------------------------------------------------------------------------------

    async def get(self, *path: str, **query: Any) -> Json:
        return await self.send("GET", *path, **query)

    async def rows(self, *path: str, **query: Any) -> list[Json]:
        rows: list[Json] = (await self.get(*path, **query))["data"]
        return rows

    async def post(self, *path: str, body: Any = None, **query: Any) -> Json:
        return await self.send("POST", *path, body=body, **query)

    async def send(self, method: str, *path: str, body: Any = None, **query: Any) -> Json:
        return await self._send(method, "/v1/admin/" + "/".join(quote(part, safe="") for part in path), body, query)

    async def who(self) -> Json:
        """Role, name of the key, and the MCP servers that requests may name."""
        return await self.get("role")

    # --- requests -----------------------------------------------------------------------------------------------------

    async def models(self) -> list[Json]:
        """Those that the key may use, without their other names; those that are loaded come first."""
        found: list[Json] = (await self._send("GET", "/v1/models"))["data"]
        names = {row["id"] for row in found}
        rows = [row for row in found if row.get("root") in (None, row["id"]) or row["root"] not in names]
        return sorted(rows, key=lambda row: row.get("state") != "ready")

    async def default_sampling(self, model: str) -> Json:
        settings = (await self._send("GET", "/props", query={"model": model})).get("default_generation_settings")
        return dict(settings["params"]) if settings else {}

    async def prompt_prefix(self, model: str, prompt: str, tokens: int) -> str:
        """The text of the first `tokens` tokens of the prompt."""
        tokenized = await self._send("POST", "/tokenize", {"model": model, "content": prompt, "parse_special": True})
        prefix = {"model": model, "tokens": tokenized["tokens"][:tokens]}
        return str((await self._send("POST", "/detokenize", prefix))["content"])

    async def stream(self, protocol: WireProtocol, body: bytes) -> AsyncIterator[bytes]:
        """The bytes of a reply as they arrive. Closing the iterator disconnects, which cancels the request."""
        with self._translated_errors():
            # No read timeout: the server sends keep-alives, and silence means that it is busy.
            timeout = httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S)
            url, headers = self._base + protocol.PATHS[0], {**self._headers(), PROGRESS_HEADER: "true"}
            request = self._http.build_request("POST", url, content=body, headers=headers, timeout=timeout)
            reply = await self._http.send(request, stream=True)
            try:
                if reply.status_code != 200:
                    raise protocol.read_error(reply.status_code, reply.headers, await reply.aread())
                async for data in reply.aiter_bytes():
                    yield data
            finally:
                await reply.aclose()

    async def count_tokens(self, request: Request) -> tuple[int, int | None]:
        """The tokens of a request, and the window that they go into, if it is known."""
        body = msgspec.json.decode(openai_chat.write_request(request))
        counted = await self._send("POST", "/v1/chat/completions/input_tokens", body)
        about = await self._send("GET", f"/v1/models/{quote(request.model, safe='')}")
        return int(counted["input_tokens"]), about.get("context_length")

    # --- chats --------------------------------------------------------------------------------------------------------

    async def chats(self, search: str = "") -> list[ChatSummary]:
        return msgspec.convert(await self.rows("chats", search=search), list[ChatSummary])

    async def chat(self, id: str) -> Chat:
        return msgspec.convert(await self.get("chats", id), Chat)

    async def store_chat(self, chat: Chat) -> int:
        """Returns the revision of the stored version."""
        return int((await self.send("PUT", "chats", chat.id, body=chat))["revision"])

    async def delete_chat(self, id: str) -> None:
        await self.send("DELETE", "chats", id)

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    def _headers(self) -> dict[str, str]:
        headers = {"authorization": f"Bearer {self.key}"} if self.key else {}
        if self.owner:
            return {**headers, OWNER_HEADER: self.owner}
        user, token = self.visitor
        return {**headers, OWNER_HEADER: token, USER_HEADER: user} if user else headers

    async def _send(self, method: str, path: str, body: Any = None, query: Mapping[str, Any] | None = None) -> Json:
        with self._translated_errors():
            content = None if body is None else msgspec.json.encode(body)
            headers = {**self._headers(), "content-type": "application/json"}
            reply = await self._http.request(method, self._base + path, content=content, params=query, headers=headers)
        if reply.status_code >= 400:
            raise openai_chat.read_error(reply.status_code, reply.headers, reply.content)
        try:
            return msgspec.json.decode(reply.content, type=dict[str, Any])
        except msgspec.DecodeError:
            raise Unavailable(f"the server at {self.url} is not Modelyard: its reply is not JSON") from None

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.InvalidURL as error:
            raise InvalidRequest(f"{self.url} is not a URL: {error}") from None
        except httpx.TimeoutException:
            raise ServerUnreachable(f"{self.url} does not answer in time") from None
        except httpx.HTTPError as error:
            raise ServerUnreachable(f"no server answers at {self.url}: {error or type(error).__name__}") from None
