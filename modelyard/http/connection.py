"""A connection that bounds what a client may send before it is answered, in bytes and in time.

uvicorn's httptools protocol has no such limits: a client that never ends its headers would hold memory for ever. And
it refuses what is not HTTP in plain text: here every refusal has a protocol's own shape.
"""

from __future__ import annotations

import asyncio
import secrets
from functools import lru_cache
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import unquote

from httptools import parse_url
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from modelyard.core.errors import InvalidRequest, ModelyardError, TooLarge
from modelyard.http.cycle import Cycle
from modelyard.http.disconnect import Farewells, enlist, withdraw
from modelyard.http.errors import written
from modelyard.http.request_context import RequestContext
from modelyard.http.together import Parade
from modelyard.http.write_coalescer import CoalescingTransport, WriteCoalescer

_HEAD = "HTTP/1.1 {} {}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {}\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """`patience_s` is for all headers together, and for each silence in the body that follows."""

    max_header_bytes = 64 * 1024
    patience_s = 30.0
    parade: Parade
    post: WriteCoalescer

    @classmethod
    def bounded(cls, max_header_bytes: int) -> type[BoundedHttp]:
        shared = {"parade": Parade(), "post": WriteCoalescer()}
        return type("BoundedHttp", (cls,), {"max_header_bytes": max_header_bytes, **shared})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.url, self.headers = b"", []
        self._header_bytes, self._reading_headers, self._reading_body = 0, True, True
        self._patience: asyncio.TimerHandle | None = None
        self._farewells: Farewells = set()
        self._idle_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = cast(asyncio.Transport, CoalescingTransport(transport, self.loop, self.post))
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._calm()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        super().connection_lost(exc)
        for cancel in tuple(self._farewells):
            cancel()
        scope: Any = self.scope
        if scope is not None:
            withdraw(scope)

    def data_received(self, data: bytes) -> None:
        """A request that comes in one piece, as most do, never starts the clock."""
        HttpToolsProtocol.data_received(self, data)  # `super()` is an object more, four times a request
        if self._reading_headers:
            self._header_bytes += len(data)
            if self._header_bytes > self.max_header_bytes:
                too_large = f"the request headers are larger than {self.max_header_bytes} bytes (http.max_header_bytes)"
                self._refuse(431, TooLarge(too_large, code="headers_too_large"))
            elif self._patience is None:
                self._wait()
        elif self._reading_body:
            self._wait()
        elif self._patience is not None:
            self._calm()

    def on_message_begin(self) -> None:
        HttpToolsProtocol.on_message_begin(self)
        self._header_bytes, self._reading_headers, self._reading_body = 0, True, True

    def on_headers_complete(self) -> None:
        self._reading_headers = False
        scope: Any = self.scope
        enlist(scope, self._farewells)
        parser = self.parser
        if parser.should_upgrade():
            HttpToolsProtocol.on_headers_complete(self)
            return
        scope["method"] = parser.get_method().decode("ascii")
        scope["path"], scope["raw_path"], scope["query_string"] = _address(self.url)
        if (version := parser.get_http_version()) != "1.1":
            scope["http_version"] = version
        before, self.cycle = self.cycle, Cycle(self, version != "1.0" and parser.should_keep_alive())
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:  # requests that are sent before the last one is answered wait for their turn
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        scope: Any = cycle.scope
        self.parade.join(cycle.run_asgi(app), scope, self.loop, self.tasks)

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if type(cycle) is not Cycle or self.parser.should_upgrade():
            HttpToolsProtocol.on_body(self, body)
        elif not cycle.response_complete:
            cycle.came(body)
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()

    def on_message_complete(self) -> None:
        self._reading_body = False
        cycle = self.cycle
        if type(cycle) is not Cycle or self.parser.should_upgrade():
            HttpToolsProtocol.on_message_complete(self)
        elif not cycle.response_complete:
            cycle.more_body = False
            cycle.tell()

    # --- idle connections -----------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def _unset_keepalive_if_required(self) -> None:
        """The timer goes on: to stop it and start another at every request costs more than to look when it is over."""
        self._idle_since = None

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left <= 0:
            HttpToolsProtocol.timeout_keep_alive_handler(self)
        else:
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)

    # --- running out of patience ----------------------------------------------------------------------------------

    def _wait(self) -> None:
        self._calm()
        self._patience = self.loop.call_later(self.patience_s, self._give_up)

    def _give_up(self) -> None:
        if self.flow.read_paused:  # the silence is ours
            self._wait()
        else:
            self.transport.close()

    def _calm(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    # --- refusing what never becomes a request --------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, InvalidRequest(msg, code="invalid_http"))

    def _refuse(self, status: int, error: ModelyardError) -> None:
        if self.transport.is_closing():
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers}
        body = written(error, RequestContext(secrets.token_hex(12), self.url.decode("latin-1"), headers)).body
        self.transport.write(_HEAD.format(status, HTTPStatus(status).phrase, len(body)).encode() + body)
        self.transport.close()


@lru_cache(maxsize=64)
def _address(url: bytes) -> tuple[str, bytes, bytes]:
    """The path, the same as it was sent, and the query."""
    parsed = parse_url(url)
    path = parsed.path.decode("ascii")
    return unquote(path) if "%" in path else path, parsed.path, parsed.query or b""
