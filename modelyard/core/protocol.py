"""The client protocol interface: a module in `protocols/` implements the roles of one protocol, without I/O.

Server role: `read_request`, `write_reply`, `write_error`, `Writer`. Client role, only in protocols that a ChatEngine
forwards to: `write_request`, `read_reply`, `read_error`, `Reader`. On what the protocol can express
`read(write(x)) == x`; on everything `write(read(write(x))) == write(x)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from modelyard.core.errors import ModelyardError
from modelyard.core.events import Event, Reply
from modelyard.core.request import Request

INLINE_BYTES = 1 << 18  # bodies up to this size are parsed on the event loop (about a millisecond), larger in a thread


class WireError(Struct, frozen=True):
    """A written error. A streamed one (`status` 200) has a body of events instead of JSON."""

    status: int
    body: bytes
    headers: Mapping[str, str] = {}
    content_type: str = "application/json"


class ModelCard(Struct, frozen=True):
    """A model as the model lists show it. `context` is the window of one conversation; None if unknown. `root` is the
    model that answers to the name, and `route` the rule that chose it, if the name is not its own."""

    id: str
    created: int
    context: int | None
    max_output: int | None = None
    state: str = "ready"
    display_name: str | None = None
    owned_by: str = "modelyard"
    aliases: tuple[str, ...] = ()
    modalities: tuple[str, ...] = ("text",)
    capabilities: tuple[str, ...] = ("completion", "chat")
    root: str = ""
    route: str = ""


class EventWriter(Protocol):
    """Writes the events of one request as bytes of its stream. `choice` numbers the `n` replies. A writer of other
    than server-sent events has the `content_type` of its stream as an attribute, and one that writes times a `clock`,
    which is set before the first event."""

    def write(self, event: Event, choice: int = 0) -> bytes: ...
    def keepalive(self) -> bytes: ...
    def end(self) -> bytes:
        """The bytes that close the stream after every choice has ended."""
        ...


class EventReader(Protocol):
    """Reads bytes of a stream, split anywhere, as events. `finish` handles an abrupt end."""

    def feed(self, data: bytes) -> list[Event]: ...
    def finish(self) -> list[Event]: ...


class WireProtocol(Protocol):
    """The interface of a module in `protocols/`."""

    NAME: str
    PATHS: tuple[str, ...]

    def read_request(self, body: bytes, headers: Mapping[str, str]) -> Request: ...
    def write_request(self, request: Request) -> bytes: ...
    def write_reply(self, replies: list[Reply], request: Request) -> bytes: ...
    def read_reply(self, body: bytes) -> Reply: ...
    def write_error(
        self, error: ModelyardError, *, trace: str, streaming: bool = False, request: Request | None = None
    ) -> WireError: ...
    def read_error(self, status: int, headers: Mapping[str, str], body: bytes) -> ModelyardError: ...
    def writer(self, request: Request, trace: str) -> EventWriter: ...
    def reader(self) -> EventReader: ...
