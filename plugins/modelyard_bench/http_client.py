"""The HTTP client of the load generator: that of the upstreams, with the time of every read.

A response is kept as it arrives and interpreted after its last byte: parsing events must not delay the reads that are
being timed.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

from modelyard.core.errors import InvalidRequest
from modelyard.engines.upstream_client import UpstreamClient
from modelyard.engines.upstream_connection import ClientError, ConnectFailed, environment_proxy

_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


class HttpResponse(Struct):
    """`parts` holds the body as it was read: (time, bytes). Times are of `time.perf_counter`.

    `error` says why the response is incomplete; its parts are what arrived until then.
    """

    sent: float
    status: int = 0
    headers: dict[str, str] = {}
    parts: list[tuple[float, bytes]] = []
    ended: float = 0.0
    error: str | None = None

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.parts)


class HttpClient:
    """Requests to one server. Only TLS connections are reused: llama-server closes a connection after each stream
    without notice, and a request sent on it at that moment would look like a failure of the server."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not _has_valid_port(parts):
            raise InvalidRequest(f"{url!r} is not a URL such as http://127.0.0.1:8000")
        if key and not (key.isascii() and key.isprintable()):
            raise InvalidRequest("the API key has characters that an HTTP header must not have")
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._headers = {"accept-encoding": "identity", "content-type": "application/json"}
        self._headers |= {"authorization": f"Bearer {key}"} if key else {}
        self._proxy = None if parts.hostname in _LOCAL_HOSTS else environment_proxy(url)
        self._client: UpstreamClient | None = None

    async def send(self, method: str, path: str, body: bytes, limit_s: float) -> HttpResponse:
        """Never raises for a failure of the connection or the time limit: the response has the `error`."""
        response = HttpResponse(time.perf_counter())
        try:
            async with asyncio.timeout(limit_s):
                await self._exchange(method, path, body, response)
        except TimeoutError:
            response.error = f"not finished within {limit_s:g} s"
        except ConnectFailed as error:
            is_refused = isinstance(error.__cause__, ConnectionRefusedError)
            response.error = "connection refused" if is_refused else f"cannot connect: {error}"
        except ClientError as error:
            response.error = f"the connection broke: {error}"
        response.ended = time.perf_counter()
        return response

    async def _exchange(self, method: str, path: str, body: bytes, response: HttpResponse) -> None:
        reply = await self._open_client().send(method, path, body)
        try:
            response.status, response.headers = reply.status, reply.headers
            while data := await reply.read():
                response.parts.append((time.perf_counter(), data))
        finally:
            reply.close()

    def _open_client(self) -> UpstreamClient:
        """It belongs to the event loop that sends the first request."""
        if self._client is None:
            is_tls = self._origin.startswith("https:")
            self._client = UpstreamClient(self._origin, headers=self._headers, proxy=self._proxy, keep_alive=is_tls)
        return self._client

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.close()


def _has_valid_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:
        return False
