"""The protocol `plain_text`: `POST /plain` takes a prompt as the body and the model as a header, and answers with
the text as it is generated.

    curl -H "x-model: markov" -d "the cat" http://127.0.0.1:8000/plain
"""

from __future__ import annotations

from collections.abc import Mapping

from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound, RateLimited
from modelyard.core.events import BlockDelta, BlockStart, Event, Failed, Reply
from modelyard.core.protocol import WireError
from modelyard.core.request import Message, Request, Text

NAME = "plain_text"  # the name of the entry point
PATHS = ("/plain",)
_STATUS = {InvalidRequest: 400, NotFound: 404, RateLimited: 429}
_TEXT = "text/plain; charset=utf-8"


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: {error}") from error
    return Request(model=headers.get("x-model", ""), messages=(Message("user", (Text(text),)),), stream=True)


def write_reply(replies: list[Reply], request: Request) -> bytes:
    del request
    return "\n".join(reply.text for reply in replies).encode()


def write_error(
    error: ModelyardError, *, trace: str, streaming: bool = False, request: Request | None = None
) -> WireError:
    del request, streaming
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
    return WireError(status, f"{error.message} ({trace})\n".encode(), content_type=_TEXT)


class PlainTextWriter:
    """The text of the answer, without its reasoning."""

    content_type = _TEXT.encode()

    def __init__(self, trace: str) -> None:
        self._trace = trace
        self._is_text = False

    def write(self, event: Event, choice: int = 0) -> bytes:
        del choice
        if isinstance(event, BlockStart):
            self._is_text = event.kind == "text"
        if isinstance(event, BlockDelta) and self._is_text:
            return event.text.encode()
        return f"\n{event.error.message} ({self._trace})\n".encode() if isinstance(event, Failed) else b""

    def keepalive(self) -> bytes:
        return b""

    def end(self) -> bytes:
        return b"\n"


def writer(request: Request, trace: str) -> PlainTextWriter:
    del request
    return PlainTextWriter(trace)
