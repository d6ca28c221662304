"""Connections to one upstream: names, TLS, proxies, and the pool of those that are idle."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket as sockets
import ssl
import urllib.request
from base64 import b64encode
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import certifi

from modelyard.core.errors import InvalidRequest
from modelyard.write_coalescing import CoalescingTransport, WriteCoalescer

if TYPE_CHECKING:
    from modelyard.engines.upstream_client import ClientResponse

_CONNECT_TIMEOUT_S = 10.0
_NEXT_ADDRESS_S = 2.0  # a name may have several addresses, of which some are out of reach
_KEEPALIVE_S = 15.0
MAX_HEADER_BYTES = 64 << 10
_PORTS = {"http": 80, "https": 443}

P = TypeVar("P", bound=asyncio.Protocol)


class ClientError(Exception):
    """No response, or no complete one.

    ├─ ConnectFailed          no connection: the name, the port, the certificate or the proxy
    │  └─ ConnectTimeout
    ├─ ConnectionLost         the server or the network ended it before the headers were complete
    ├─ IncompleteResponse     the same, within a body
    ├─ InvalidResponse        what was sent is not HTTP/1.1
    └─ ReadTimeout            nothing was sent for too long
    """


class ConnectFailed(ClientError):
    pass


class ConnectTimeout(ConnectFailed):
    pass


class ConnectionLost(ClientError):
    pass


# --- addresses --------------------------------------------------------------------------------------------------------


class Origin(NamedTuple):
    """Where a connection goes to. `authorization` is the header of the name and password in the address."""

    scheme: str
    host: str
    port: int
    authorization: str | None

    @classmethod
    def of(cls, url: str) -> Origin:
        """InvalidRequest: it is no address."""
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").encode("idna").decode(), parts.port
        except ValueError as error:  # the address may hold a password
            raise InvalidRequest(f"an address of an upstream or a proxy is broken: {error}") from None
        if parts.scheme not in _PORTS or not host:
            raise InvalidRequest("an address of an upstream or a proxy begins with http:// or https:// and has a host")
        credentials = None
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            credentials = f"Basic {b64encode(pair.encode()).decode()}"
        return cls(parts.scheme, host, port or _PORTS[parts.scheme], credentials)

    @property
    def bracketed_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def netloc(self) -> str:
        return self.bracketed_host if self.port == _PORTS[self.scheme] else f"{self.bracketed_host}:{self.port}"


def tls_context() -> ssl.SSLContext:
    """The authorities of `SSL_CERT_FILE` or `SSL_CERT_DIR`, else those of the system and of certifi."""
    context = ssl.create_default_context()
    if not os.environ.get("SSL_CERT_FILE") and not os.environ.get("SSL_CERT_DIR"):
        context.load_verify_locations(certifi.where())
    return context


def environment_proxy(url: str) -> str | None:
    """The proxy that `HTTP_PROXY`, `HTTPS_PROXY`, `ALL_PROXY` and `NO_PROXY` name for this address."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    if urllib.request.proxy_bypass(place) or urllib.request.proxy_bypass(parts.hostname or ""):  # IPv6 has no brackets
        return None
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy is None:
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    if (scheme := urlsplit(proxy).scheme) not in ("http", "https"):  # the address itself may hold a password
        raise InvalidRequest(
            f"the environment names a {scheme} proxy for {parts.hostname}, and only http and https proxies are "
            "supported; set NO_PROXY for this host or another proxy",
            code="proxy_unsupported",
        )
    return proxy


# --- connections ------------------------------------------------------------------------------------------------------


class Connection(asyncio.Protocol):
    """One of the pool. Requests that begin together are sent together."""

    transport: CoalescingTransport

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self.response: ClientResponse | None = None
        self.was_used = self.is_lost = False
        self.idle_since = 0.0
        self.early = b""  # what a server says before it is asked: of another protocol, or that it is too late

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = CoalescingTransport(transport, self._pool.loop, self._pool.coalescer)
        self._pool.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self.response is not None:
            self.response.receive(data)
        elif self.was_used:
            self.close()  # nothing was requested: the next response would be another one's
        else:
            self.early = (self.early + data)[:MAX_HEADER_BYTES]

    def connection_lost(self, exc: BaseException | None) -> None:
        self.is_lost = True
        self._pool.connections.discard(self)
        if self.response is not None:
            self.response.lose_connection(exc)

    @property
    def is_usable(self) -> bool:
        return not self.is_lost and not self.transport.is_closing()

    def release(self) -> None:
        self._pool.release(self)

    def close(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # `close` would wait until the rest is sent
        else:
            self.transport.close()


class _Tunnel(asyncio.Protocol):
    """What a proxy answers to CONNECT."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._received = b""
        self.head: asyncio.Future[bytes] = loop.create_future()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if (b"\r\n\r\n" in self._received or len(self._received) > MAX_HEADER_BYTES) and not self.head.done():
            self.head.set_result(self._received)

    def connection_lost(self, exc: BaseException | None) -> None:
        if not self.head.done():
            self.head.set_exception(exc or ConnectionResetError("the proxy closed the connection"))


class ConnectionPool:
    """Connections to one server, directly, through a proxy or on a unix socket. Used on the event loop's thread."""

    def __init__(self, origin: Origin, *, proxy: Origin | None, socket: str | None, keep_alive: bool) -> None:
        self.loop = asyncio.get_running_loop()
        self.coalescer = WriteCoalescer()
        self.connections: set[Connection] = set()
        self._origin, self._proxy, self._socket, self._keep_alive = origin, proxy, socket, keep_alive
        uses_tls = "https" in (origin.scheme, proxy.scheme if proxy is not None else "")
        self._tls = tls_context() if uses_tls and socket is None else None
        self._idle: list[Connection] = []  # the longest idle first
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def acquire(self) -> Connection:
        """The connection that was used last, else a new one."""
        while self._idle:
            if (connection := self._idle.pop()).is_usable:
                return connection
        if self._is_closed:
            raise ConnectFailed("the client is closed")
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                connection = await self._connect()
        except TimeoutError as error:
            raise ConnectTimeout(f"no connection within {_CONNECT_TIMEOUT_S:g} s") from error
        except (OSError, ValueError) as error:  # ValueError: of names
            place = self._socket or (self._proxy or self._origin).netloc
            is_refused = isinstance(error, ConnectionRefusedError)
            raise ConnectFailed(f"{'connection refused' if is_refused else error} ({place})") from error
        if connection.is_lost:
            raise ConnectionLost("closed as soon as it was made")
        return connection

    def release(self, connection: Connection) -> None:
        if not self._keep_alive or self._is_closed or not connection.is_usable:
            connection.close()
            return
        connection.idle_since = self.loop.time()
        self._idle.append(connection)
        if self._timer is None:
            self._timer = self.loop.call_later(_KEEPALIVE_S, self._close_idle)

    def _close_idle(self) -> None:
        while self._idle and self._idle[0].idle_since + _KEEPALIVE_S <= self.loop.time():
            self._idle.pop(0).close()
        self._timer = None
        if self._idle:
            self._timer = self.loop.call_at(self._idle[0].idle_since + _KEEPALIVE_S, self._close_idle)

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for connection in tuple(self.connections):
            connection.close()

    # --- connecting ---------------------------------------------------------------------------------------------------

    async def _connect(self) -> Connection:
        connection = Connection(self)
        if self._socket is not None:
            await self.loop.create_unix_connection(lambda: connection, self._socket)
        elif self._proxy is None:
            await self._reach(self._origin, connection)
        elif self._origin.scheme == "http":  # the proxy reads the requests
            await self._reach(self._proxy, connection)
        else:
            await self._tunnel(self._proxy, connection)
        return connection

    async def _reach(self, place: Origin, protocol: P) -> asyncio.Transport:
        """A connection to the first of its addresses that accepts one."""
        tls, server_name = (self._tls, place.host) if place.scheme == "https" else (None, None)
        *others, last = await self._addresses(place)
        for address in others:
            try:
                async with asyncio.timeout(_NEXT_ADDRESS_S):
                    made = await self.loop.create_connection(
                        lambda: protocol, address, place.port, ssl=tls, server_hostname=server_name
                    )
                    return made[0]
            except ssl.SSLError:
                raise
            except OSError:
                continue
        made = await self.loop.create_connection(
            lambda: protocol, last, place.port, ssl=tls, server_hostname=server_name
        )
        return made[0]

    async def _addresses(self, place: Origin) -> list[str]:
        try:
            return [str(ipaddress.ip_address(place.host))]
        except ValueError:
            found = await self.loop.getaddrinfo(place.host, place.port, type=sockets.SOCK_STREAM)
            return list(dict.fromkeys(str(address[0]) for *_, address in found))

    async def _tunnel(self, proxy: Origin, connection: Connection) -> None:
        protocol, target = _Tunnel(self.loop), f"{self._origin.bracketed_host}:{self._origin.port}"
        transport = await self._reach(proxy, protocol)
        try:
            lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
            lines += [f"Proxy-Authorization: {proxy.authorization}"] if proxy.authorization else []
            transport.write("\r\n".join([*lines, "", ""]).encode())
            status, _, rest = (await protocol.head).partition(b"\r\n")
            if not status.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")):
                raise OSError(f"the proxy refused the connection: {status[9:80].decode('latin-1')}")
            if rest.partition(b"\r\n\r\n")[2] or self._tls is None:
                raise OSError("the proxy sent data before TLS began")
            secured = await self.loop.start_tls(transport, connection, self._tls, server_hostname=self._origin.host)
            if secured is None:
                raise ConnectionResetError("the connection was lost")
            connection.connection_made(secured)
        except BaseException:
            transport.abort()
            raise
