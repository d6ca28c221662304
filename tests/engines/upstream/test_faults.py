"""Faults of the network and of a key, as errors that a client can act on."""

from __future__ import annotations

import httpx
import pytest

from modelyard.core.errors import Forbidden, ModelyardError, RateLimited, Timeout, Unauthenticated, Unavailable
from modelyard.engines.upstream.faults import blameless, transport_fault


@pytest.mark.parametrize(
    ("fault", "kind", "code"),
    [
        (httpx.ConnectError("refused"), Unavailable, "upstream_unreachable"),
        (httpx.ConnectTimeout(""), Unavailable, "upstream_unreachable"),
        (httpx.PoolTimeout(""), Unavailable, "upstream_unreachable"),
        (httpx.ReadTimeout(""), Timeout, "upstream_timeout"),
        (httpx.WriteTimeout(""), Timeout, "upstream_timeout"),
        (httpx.ReadError(""), Unavailable, "upstream_lost"),
        (httpx.RemoteProtocolError("peer closed"), Unavailable, "upstream_lost"),
    ],
)
def test_a_fault_of_the_network_names_its_place(fault: httpx.HTTPError, kind: type, code: str) -> None:
    error = transport_fault(fault, "the upstream of 'm'")
    assert (type(error), error.code) == (kind, code)
    assert "the upstream of 'm'" in error.message


@pytest.mark.parametrize("refused", [Unauthenticated("bad key sk-123"), Forbidden("no funds")])
def test_a_refused_key_is_not_the_clients_fault(refused: ModelyardError) -> None:
    error = blameless(refused, "the upstream of 'm'", "the environment variable 'KEY'")
    assert isinstance(error, Unavailable)
    assert error.code == "upstream_auth_failed"
    assert "sk-123" not in error.message


def test_other_errors_keep_their_meaning() -> None:
    error = RateLimited("slow", retry_after=3)
    assert blameless(error, "it", "key") is error
