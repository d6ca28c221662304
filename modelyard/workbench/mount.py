"""The workbench as an ASGI app of a few lines: everything behind it is imported when somebody first visits the page."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from contextlib import AsyncExitStack

from msgspec import Struct
from msgspec.structs import replace
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelyard.core.errors import TooLarge
from modelyard.workbench.relay import Door, Relay

PREFIX = "/workbench"
_MOST_BYTES = 32 * 1024**2  # of a picture that is dropped on the page
# NiceGUI compiles its templates in the browser, so scripts of the page's own cannot be forbidden; all others are.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-frame-options", b"DENY"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
)


class Address(Struct, frozen=True):
    """The server that a page works with. `verify` is off for our own certificate on our own port; `socket` is its unix
    socket, where it has one for this."""

    url: str
    verify: bool = True
    socket: str = ""


def own_address(scope: Scope) -> Address:
    """The server that the visitor has reached, as it can be reached from here."""
    host, port = scope.get("server") or ("127.0.0.1", None)
    if port is None:  # over a unix socket: the visitor's own word for it, which people will read
        return Address(f"http://{dict(scope['headers']).get(b'host', b'localhost').decode('latin-1')}")
    host = f"[{host}]" if ":" in host else host
    secure = scope.get("scheme") in ("https", "wss")
    return Address(f"{'https' if secure else 'http'}://{host}:{port}", verify=not secure)


class Workbench:
    """`address` says which server the page of a visitor works with; `meeting` where the processes of a fleet meet, and
    `own` where this one is met by the others."""

    def __init__(
        self,
        address: Callable[[Scope], Address] = own_address,
        *,
        meeting: str = "",
        keeper: bool = True,
        own: str = "",
    ) -> None:
        self._address, self._meeting, self._own = address, meeting, own
        self._opening: asyncio.Future[ASGIApp] | None = None
        self._life = AsyncExitStack()
        self._relay = Relay(meeting) if meeting and not keeper else None

    async def meet(self, app: ASGIApp) -> None:
        """In a fleet, `app` is the whole server: what siblings are to reach of it."""
        doors = [self._own]
        if self._relay is not None:
            self._life.push_async_callback(self._relay.close)
        else:
            doors.append(self._meeting)
        for path in filter(None, doors):
            door = Door(path)
            await door.open(app)
            self._life.push_async_callback(door.close)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _check_size(scope)
        if self._relay is not None:
            await self._relay(scope, receive, send)
            return
        app = await self._opened(scope)
        await app(_inside(scope), receive, _sealed(scope, send))

    async def _opened(self, scope: Scope) -> ASGIApp:
        """Made once, by the first who comes; what went wrong then is tried anew by the next."""
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            address = replace(self._address(scope), socket=self._meeting)
            self._opening = asyncio.ensure_future(self._open(address))
        return await asyncio.shield(self._opening)

    async def _open(self, address: Address) -> ASGIApp:
        """In a thread: it takes a second, in which others have their answers to get."""
        site = await asyncio.to_thread(importlib.import_module, "modelyard.workbench.site")
        app: ASGIApp = await self._life.enter_async_context(site.opened(address, PREFIX))
        return app

    async def close(self) -> None:
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._life.aclose()


def _check_size(scope: Scope) -> None:
    """What is sent to the page is small, but for a picture; its size is told first, or it is not read."""
    if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
        return
    told = dict(scope["headers"]).get(b"content-length", b"")
    if not told.isdigit() or int(told) > _MOST_BYTES:
        raise TooLarge(f"the workbench takes no more than {_MOST_BYTES} bytes at a time, and wants to know how many")


def _inside(scope: Scope) -> Scope:
    """As a sub-app wants it; nobody stands before us who might know the prefix better."""
    path = scope["path"] if scope["path"] != PREFIX else PREFIX + "/"
    headers = [(name, value) for name, value in scope["headers"] if not name.startswith(b"x-forwarded-")]
    return {**scope, "path": path, "headers": headers}


def _sealed(scope: Scope, send: Send) -> Send:
    """No other site may frame the page, and nothing of another site runs in it."""
    if scope["type"] != "http":
        return send

    async def sealed(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *_HEADERS]}
        await send(message)

    return sealed
