"""HTTP client of a Modelyard server: the admin API and the public protocols."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from modelyard.core.chat import Chat, ChatSummary
from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Request
from modelyard.protocols import openai_chat

Json = dict[str, Any]

_CONNECT_TIMEOUT_S, _REPLY_TIMEOUT_S = 5.0, 30.0


class ServerUnreachable(Unavailable):
    """The server could not be reached, as opposed to a server that answers with an error."""


class ApiClient:
    """`key` may change at any time. Every call raises a ModelyardError if it fails. `socket` is a unix socket to use
    instead of `url`."""

    def __init__(self, url: str, key: str = "", *, verify: bool = True, socket: str = "") -> None:
        self.url, self.key = url.rstrip("/"), key
        self._base = "http://localhost" if socket else self.url
        transport = httpx.AsyncHTTPTransport(uds=socket) if socket else None
        timeout = httpx.Timeout(_REPLY_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        self._http = httpx.AsyncClient(transport=transport, timeout=timeout, verify=verify)

    async def close(self) -> None:
        await self._http.aclose()

    # --- models -------------------------------------------------------------------------------------------------------

    async def models(self) -> list[Json]:
        return await self._list("models")

    async def load(self, model: str, overrides: Mapping[str, Any]) -> None:
        """Start a load and return. The model's record shows its progress and the reason of a failure."""
        await self._post_model(model, "load", dict(overrides), {"wait": "false"})

    async def unload(self, model: str) -> None:
        await self._post_model(model, "unload", None, {"wait": "false", "force": "false"})

    async def drain(self, model: str) -> None:
        await self._post_model(model, "drain")

    async def scale(self, model: str, replicas: int) -> None:
        await self._post_model(model, "replicas", {"replicas": replicas}, {"wait": "false"})

    async def estimate(self, model: str, overrides: Mapping[str, Any]) -> Json:
        return await self._post_model(model, "estimate", dict(overrides))

    # --- models of the hub --------------------------------------------------------------------------------------------

    async def search_hub(self, text: str) -> list[Json]:
        rows: list[Json] = (await self._admin("GET", "hub", query={"search": text}))["data"]
        return rows

    async def offer(self, repo: str) -> Json:
        return await self._admin("GET", f"hub/{quote(repo)}")

    async def set_aside(self) -> list[str]:
        return (await self._admin("GET", "set-aside"))["data"]  # type: ignore[no-any-return]

    async def downloads(self) -> list[Json]:
        return await self._list("downloads")

    async def start_download(self, source: str, quant: str | None = None) -> Json:
        return await self._admin("POST", "downloads", {"source": source, "quant": quant})

    async def cancel_download(self, id: str) -> None:
        await self._admin("POST", f"downloads/{quote(id, safe='')}/cancel")

    async def remove_model(self, model: str) -> None:
        await self._admin("DELETE", f"library/{quote(model)}")

    # --- configuration files ------------------------------------------------------------------------------------------

    async def config(self) -> Json:
        return await self._admin("GET", "config")

    async def config_fields(self, section: str, name: str, values: Json) -> Json:
        return await self._admin("POST", "config/fields", {"section": section, "name": name, "values": values})

    async def preview_config(self, change: Json) -> Json:
        return await self._admin("POST", "config/preview", change)

    async def apply_config(self, change: Json) -> Json:
        return await self._admin("POST", "config/apply", change)

    # --- API keys -----------------------------------------------------------------------------------------------------

    async def keys(self, *, revoked: bool = False) -> Json:
        return await self._admin("GET", "keys", query={"revoked": str(revoked).lower()})

    async def create_key(self, rules: Json) -> Json:
        return await self._admin("POST", "keys", rules)

    async def change_key(self, id: str, rules: Json) -> Json:
        return await self._admin("PATCH", f"keys/{quote(id, safe='')}", rules)

    async def revoke_key(self, id: str) -> Json:
        return await self._admin("DELETE", f"keys/{quote(id, safe='')}")

    async def usage(self, by: str) -> Json:
        return await self._admin("GET", "usage", query={"by": by})

    # --- state of the server ------------------------------------------------------------------------------------------

    async def memory(self) -> Json:
        return await self._admin("GET", "gpu-memory")

    async def caches(self) -> list[Json]:
        return await self._list("caches")

    async def history(self) -> Json:
        return await self._admin("GET", "history")

    async def keep_texts(self, enabled: bool) -> None:
        await self._admin("POST", "history", {"texts": enabled})

    async def optimizer_runs(self) -> list[Json]:
        return await self._list("tune")

    async def route(self, model: str, endpoint: str) -> Json:
        return await self._admin("GET", "route", query={"model": model, "endpoint": endpoint})

    async def routes(self) -> list[Json]:
        return await self._list("routes")

    async def logs(self, limit: int, since: float, level: str, id: str = "") -> list[Json]:
        query = {"limit": str(limit), "since": repr(since), "level": level, "id": id}
        lines: list[Json] = (await self._admin("GET", "logs", query=query))["lines"]
        return lines

    # --- requests -----------------------------------------------------------------------------------------------------

    async def requests(self, limit: int, since: float) -> Json:
        return await self._admin("GET", "requests", query={"limit": str(limit), "since": repr(since)})

    async def request(self, id: str) -> Json:
        return await self._admin("GET", f"requests/{quote(id, safe='')}")

    async def cancel(self, id: str) -> None:
        await self._admin("POST", f"requests/{quote(id, safe='')}/cancel")

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
            url = self._base + protocol.PATHS[0]
            request = self._http.build_request("POST", url, content=body, headers=self._headers(), timeout=timeout)
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
        route = await self.route(request.model, openai_chat.PATHS[0])
        return int(counted["input_tokens"]), route["window"]

    # --- chats --------------------------------------------------------------------------------------------------------

    async def chats(self, search: str = "") -> list[ChatSummary]:
        rows = (await self._admin("GET", "chats", query={"search": search}))["data"]
        return msgspec.convert(rows, list[ChatSummary])

    async def chat(self, id: str) -> Chat:
        return msgspec.convert(await self._admin("GET", f"chats/{quote(id, safe='')}"), Chat)

    async def store_chat(self, chat: Chat) -> int:
        """Returns the revision of the stored version."""
        return int((await self._admin("PUT", f"chats/{quote(chat.id, safe='')}", chat))["revision"])

    async def delete_chat(self, id: str) -> None:
        await self._admin("DELETE", f"chats/{quote(id, safe='')}")

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}

    async def _list(self, path: str) -> list[Json]:
        rows: list[Json] = (await self._admin("GET", path))["data"]
        return rows

    async def _post_model(
        self, model: str, action: str, body: Any = None, query: Mapping[str, str] | None = None
    ) -> Json:
        return await self._admin("POST", f"models/{quote(model)}/{action}", body, query)

    async def _admin(self, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None) -> Json:
        return await self._send(method, f"/v1/admin/{path}", body, query)

    async def _send(self, method: str, path: str, body: Any = None, query: Mapping[str, str] | None = None) -> Json:
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
