"""What comes in on a connection: a body that is there as a whole, taken without ASGI's messages."""

from __future__ import annotations

from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def whole_body(receive: Receive) -> bytes | None:
    """The body, where all of it has come. None, with nothing done: it has to be received, or somebody stands between us
    and the connection (`receive` is not the connection's own then)."""
    cycle = getattr(receive, "__self__", None)
    if type(cycle) is not RequestResponseCycle or cycle.more_body or cycle.waiting_for_100_continue:
        return None
    if cycle.disconnected or cycle.response_complete:
        return None
    cycle.flow.resume_reading()
    cycle.message_event.clear()  # from now on it tells that the client has left
    body, cycle.body = bytes(cycle.body), bytearray()
    return body
