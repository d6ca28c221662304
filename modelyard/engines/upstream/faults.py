"""What goes wrong on the way to another server, as our errors: one line for each kind of fault."""

from __future__ import annotations

import httpx

from modelyard.core.errors import Forbidden, ModelyardError, Timeout, Unauthenticated, Unavailable

LOST, UNREACHABLE = "upstream_lost", "upstream_unreachable"


def transport_fault(error: httpx.HTTPError, where: str) -> ModelyardError:
    told = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
        return Unavailable(f"{where} did not take the connection in time", code=UNREACHABLE)
    if isinstance(error, httpx.TimeoutException):
        return Timeout(f"{where} was silent for too long", code="upstream_timeout")
    if isinstance(error, httpx.ConnectError | httpx.UnsupportedProtocol | httpx.ProxyError):
        return Unavailable(f"{where} cannot be reached: {told}", code=UNREACHABLE)
    return Unavailable(f"{where} broke the connection off: {told}", code=LOST)


def blameless(error: ModelyardError, where: str, key: str) -> ModelyardError:
    """A refused key is this gateway's, not the client's: its own key is good, and no client should ask for another."""
    if isinstance(error, Unauthenticated):
        return Unavailable(f"{where} refused the key of this gateway: check {key}", code="upstream_auth_failed")
    if isinstance(error, Forbidden):
        return Unavailable(f"{where} refused this gateway: {error.message}", code="upstream_auth_failed")
    return error
