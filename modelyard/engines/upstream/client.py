"""The HTTP client of engines that forward to another server. Only this module imports httpx.

An answer is always requested as a stream: a server does not notice that the client of a complete reply has left.
Leaving the stream early closes its connection, which tells the upstream that the request was cancelled.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping

import httpx
from msgspec import Struct

from modelyard.core.errors import Incomplete, ModelyardError, Timeout, Unavailable

UPSTREAM_LOST, UPSTREAM_UNREACHABLE = "upstream_lost", "upstream_unreachable"  # error codes

_MAX_BODY = 32 << 20  # bytes of a reply that is not a stream
_CONNECT_TIMEOUT_S = 10.0
_KEEPALIVE_S = 15.0
_MAX_IDLE_CONNECTIONS = 32
_JSON = {"content-type": "application/json"}


class UpstreamAddress(Struct, frozen=True, kw_only=True):
    """`name` is for error messages. `key_source` says where the key is set; it is never the key itself."""

    name: str
    base_url: str
    headers: Mapping[str, str] = {}
    key_source: str = "its key"
    socket: str | None = None  # path of a unix socket
    timeout: float | None = None  # seconds without data; None if the life of the upstream is watched otherwise
    is_child: bool = False  # a child process of ours: no proxy, no idle connections


class UpstreamHttpClient:
    """Create it on the event loop that uses it. It raises transport errors as ModelyardError."""

    def __init__(self, address: UpstreamAddress) -> None:
        self.address = address
        idle = 0 if address.is_child else _MAX_IDLE_CONNECTIONS
        self._http = httpx.AsyncClient(
            base_url=address.base_url,
            headers=dict(address.headers),
            timeout=httpx.Timeout(address.timeout, connect=_CONNECT_TIMEOUT_S, pool=_CONNECT_TIMEOUT_S),
            transport=httpx.AsyncHTTPTransport(uds=address.socket) if address.socket else None,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=idle, keepalive_expiry=_KEEPALIVE_S),
            trust_env=not address.is_child,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def post(self, path: str, body: bytes) -> HttpReply:
        """Posts JSON; returns when the headers of the reply have arrived."""
        request = self._http.build_request("POST", path, content=body, headers=_JSON)
        try:
            return HttpReply(await self._http.send(request, stream=True), self.address.name)
        except httpx.HTTPError as error:
            raise transport_error(error, self.address.name) from error

    async def request(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Status and body of a short request."""
        try:
            reply = await self._http.request(method, path, content=body, headers=_JSON if body else None)
        except httpx.HTTPError as error:
            raise transport_error(error, self.address.name) from error
        return reply.status_code, reply.content


class HttpReply:
    """A reply as a stream. Leaving its context before its end closes the connection."""

    def __init__(self, response: httpx.Response, upstream: str) -> None:
        self._response, self._upstream = response, upstream
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers

    async def __aenter__(self) -> HttpReply:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._response.aclose()

    async def chunks(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._response.aiter_bytes():
                yield chunk
        except httpx.HTTPError as error:
            raise transport_error(error, self._upstream) from error

    async def read(self) -> bytes:
        body = bytearray()
        async for chunk in self.chunks():
            body += chunk
            if len(body) > _MAX_BODY:
                raise Incomplete(f"the reply of {self._upstream} is longer than {_MAX_BODY} bytes")
        return bytes(body)


def transport_error(error: httpx.HTTPError, upstream: str) -> ModelyardError:
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
        return Unavailable(f"{upstream} did not accept the connection in time", code=UPSTREAM_UNREACHABLE)
    if isinstance(error, httpx.TimeoutException):
        return Timeout(f"{upstream} sent nothing for too long", code="upstream_timeout")
    if isinstance(error, httpx.ConnectError | httpx.UnsupportedProtocol | httpx.ProxyError):
        return Unavailable(f"{upstream} cannot be reached: {reason}", code=UPSTREAM_UNREACHABLE)
    return Unavailable(f"{upstream} closed the connection: {reason}", code=UPSTREAM_LOST)
