"""W3C trace context: the `traceparent` of a request, which upstreams get, too, and what observes requests that end.

Observers are plug-ins (`modelyard.observers`); `plugins/modelyard_otel` makes spans of OpenTelemetry.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Protocol

from msgspec import Struct

from modelyard import plugins
from modelyard.core.errors import ModelyardError
from modelyard.telemetry.history import RequestRecord

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
current_traceparent: ContextVar[str] = ContextVar("current_traceparent", default="")


class EndedRequest(Struct, frozen=True, kw_only=True):
    """A request that was answered. `ended` is unix time; `records` are its generations."""

    trace: str
    traceparent: str  # of its caller; empty if it sent none
    method: str
    path: str
    status: int
    error: str
    seconds: float
    ended: float
    records: Sequence[RequestRecord]


class Observer(Protocol):
    """Is called on the event loop, so it must not wait."""

    def traceparent(self, trace: str, parent: str) -> str:
        """What upstreams are sent for the request `trace`."""

    def ended(self, request: EndedRequest) -> None: ...


def read_traceparent(header: str) -> str:
    """It is sent on, so nothing but the format of version 00 is accepted."""
    return header if _TRACEPARENT.fullmatch(header) else ""


def find_observers() -> list[Observer]:
    """Those of installed plug-ins that are switched on. One that cannot be loaded is reported, and requests run."""
    found: list[Observer] = []
    for name in plugins.names("observers"):
        try:
            made: Observer | None = plugins.load("observers", name)()
        except ModuleNotFoundError as error:
            logging.getLogger(__name__).warning("%s", plugins.missing_library(name, error))
            continue
        except ModelyardError as error:
            logging.getLogger(__name__).warning("%s", error.message)
            continue
        found += [made] if made is not None else []
    return found
