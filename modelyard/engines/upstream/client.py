"""Where an upstream lives and how it is spoken to: one HTTP client, requests streamed, everything bounded.

Replies are always asked for as streams: a server that is asked for a whole reply does not notice that nobody waits for
it any more. Leaving the stream early closes its connection, which is how an upstream learns of a cancelled request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from modelyard.core.errors import Incomplete
from modelyard.core.events import reply_events
from modelyard.core.protocol import WireProtocol
from modelyard.engines.upstream.faults import blameless, transport_fault
from modelyard.engines.upstream.jobs import Say
from modelyard.engines.upstream.retry import Patience, Refused, patiently

_MAX_BODY = 32 << 20  # of a reply that came whole, and of an error
_CONNECT = 10.0  # seconds
_FAREWELL = 1.0  # seconds for the end of a stream whose answer is over: read to its end a connection can be used again


class Place(Struct, frozen=True, kw_only=True):
    """`name` is how people know it; `key` names where its secret is set, never the secret."""

    name: str
    base_url: str
    headers: Mapping[str, str] = {}
    key: str = "its key"
    socket: str | None = None
    timeout: float | None = None  # seconds of silence; None where the upstream's life is watched in another way
    loopback: bool = False  # a child of ours: no proxy, and no idle connections to guess about


class Client:
    """To be made on the loop that it is used on."""

    def __init__(self, place: Place, patience: Patience = Patience()) -> None:
        self.place, self._patience = place, patience
        idle = 0 if place.loopback else 32
        self._http = httpx.AsyncClient(
            base_url=place.base_url,
            headers=dict(place.headers),
            timeout=httpx.Timeout(place.timeout, connect=_CONNECT, pool=_CONNECT),
            transport=httpx.AsyncHTTPTransport(uds=place.socket) if place.socket else None,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=idle, keepalive_expiry=15.0),
            trust_env=not place.loopback,
        )

    async def close(self) -> None:
        await self._http.aclose()

    # --- an answer --------------------------------------------------------------------------------------------------

    async def stream(self, path: str, body: bytes, wire: WireProtocol, say: Say) -> None:
        """Says the upstream's answer event by event. Raises what kept it from answering; a second try comes before
        the first byte only."""

        async def attempt() -> None:
            async with self._open(path, body, wire) as response:
                await self._read(response, wire, say)

        await patiently(attempt, self._patience)

    def _open(self, path: str, body: bytes, wire: WireProtocol) -> _Opening:
        request = self._http.build_request("POST", path, content=body, headers=_JSON)
        return _Opening(self._http, request, wire, self.place)

    async def _read(self, response: httpx.Response, wire: WireProtocol, say: Say) -> None:
        try:
            if response.headers.get("content-type", "").startswith("application/json"):
                await say(list(reply_events(wire.read_reply(await _whole(response)))))
                return
            await _follow(response.aiter_bytes(), wire, say)
        except httpx.HTTPError as error:
            raise transport_fault(error, self.place.name) from error

    # --- side questions -----------------------------------------------------------------------------------------------

    async def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        """Status and JSON of a short question; None where the reply is no JSON."""
        try:
            reply = await self._http.request(method, path, content=body, headers=_JSON if body else None)
        except httpx.HTTPError as error:
            raise transport_fault(error, self.place.name) from error
        try:
            return reply.status_code, msgspec.json.decode(reply.content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return reply.status_code, None


_JSON = {"content-type": "application/json"}


class _Opening:
    """A request on its way until its reply begins; leaving closes the reply."""

    def __init__(self, http: httpx.AsyncClient, request: httpx.Request, wire: WireProtocol, place: Place) -> None:
        self._http, self._request, self._wire, self._place = http, request, wire, place
        self._response: httpx.Response | None = None

    async def __aenter__(self) -> httpx.Response:
        try:
            self._response = response = await self._http.send(self._request, stream=True)
        except httpx.HTTPError as error:
            raise Refused(transport_fault(error, self._place.name)) from error
        if response.is_success:
            return response
        try:
            raise await self._refusal(response)
        finally:
            await response.aclose()

    async def _refusal(self, response: httpx.Response) -> Refused:
        try:
            body = await _whole(response)
        except httpx.HTTPError:
            body = b""  # its status says enough
        told = self._wire.read_error(response.status_code, response.headers, body)
        return Refused(blameless(told, self._place.name, self._place.key), "retry-after" in response.headers)

    async def __aexit__(self, *_: object) -> None:
        if self._response is not None:
            await self._response.aclose()


async def _follow(data: AsyncIterator[bytes], wire: WireProtocol, say: Say) -> None:
    reader = wire.reader()
    async for some in data:
        if (events := reader.feed(some)) and await say(events):
            break
    else:
        await say(reader.finish())
        return
    try:
        async with asyncio.timeout(_FAREWELL):
            async for _ in data:
                pass
    except (TimeoutError, httpx.HTTPError):
        return  # the answer is whole: how its connection ends is nobody's concern


async def _whole(response: httpx.Response) -> bytes:
    got = bytearray()
    async for some in response.aiter_bytes():
        got += some
        if len(got) > _MAX_BODY:
            raise Incomplete(f"the upstream's reply is longer than {_MAX_BODY} bytes")
    return bytes(got)


def with_fields(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """A written JSON object with more fields at its end: a long conversation is not parsed again for them."""
    return body[:-1] + b"," + msgspec.json.encode(fields)[1:] if fields else body
