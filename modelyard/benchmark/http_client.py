"""The HTTP client of the load generator: aiohttp's, with the time of every read.

A response is kept as it arrives and interpreted after its last byte: parsing events must not delay the reads that are
being timed.
"""

from __future__ import annotations

import asyncio
import time
from urllib.parse import SplitResult, urlsplit

import aiohttp
import httpx
from msgspec import Struct

from modelyard.core.errors import InvalidRequest
from modelyard.engines.upstream_client import environment_proxy

_CONNECT_S = 10.0
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
        self._session: aiohttp.ClientSession | None = None

    async def send(self, method: str, path: str, body: bytes, limit_s: float) -> HttpResponse:
        """Never raises for a failure of the connection or the time limit: the response has the `error`."""
        response = HttpResponse(time.perf_counter())
        try:
            async with (
                asyncio.timeout(limit_s),
                self._open_session().request(
                    method, self._origin + path, data=body or None, proxy=self._proxy
                ) as reply,
            ):
                response.status, response.headers = reply.status, {k.lower(): v for k, v in reply.headers.items()}
                async for data in reply.content.iter_any():
                    response.parts.append((time.perf_counter(), data))
        except aiohttp.ConnectionTimeoutError:
            response.error = f"cannot connect: no connection within {_CONNECT_S:g} s"
        except TimeoutError:
            response.error = f"not finished within {limit_s:g} s"
        except aiohttp.ClientConnectorError as error:
            is_refused = isinstance(error.os_error, ConnectionRefusedError)
            response.error = "connection refused" if is_refused else f"cannot connect: {error}"
        except aiohttp.ClientHttpProxyError as error:
            response.error = f"cannot connect: the proxy refused the connection: {error.status} {error.message}"
        except aiohttp.ClientError as error:
            response.error = f"the connection broke: {error}"
        response.ended = time.perf_counter()
        return response

    def _open_session(self) -> aiohttp.ClientSession:
        """It belongs to the event loop that sends the first request."""
        if self._session is None:
            is_tls = self._origin.startswith("https:")
            connector = aiohttp.TCPConnector(
                limit=0, force_close=not is_tls, ssl=httpx.create_ssl_context() if is_tls else True
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(sock_connect=_CONNECT_S),
                auto_decompress=False,
            )
        return self._session

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


def _has_valid_port(parts: SplitResult) -> bool:
    try:
        return parts.port != 0
    except ValueError:
        return False
