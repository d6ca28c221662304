"""Which errors lead to the next model of a route, and what a client reads if no model answers."""

from __future__ import annotations

import pytest

from modelyard.core import errors
from modelyard.core.errors import ModelyardError
from modelyard.gateway.fallbacks import Attempt, fallback_header, leads_on, no_answer
from modelyard.telemetry.history import SkippedModel


@pytest.mark.parametrize(
    ("error", "leads"),
    [
        (errors.Conflict("not loaded"), True),
        (errors.Overloaded("full"), True),
        (errors.Unavailable("lost"), True),
        (errors.Timeout("waited"), True),
        (errors.RateLimited("an upstream's limit", retry_after=1.0), True),
        (errors.Internal("a bug"), True),
        (errors.Incomplete("cut"), True),
        (errors.Unsupported("no images"), True),
        (errors.ContextOverflow(9, 5), True),
        (errors.OutputOverflow(1, 9, 5), True),
        (errors.Forbidden("a remote model"), True),
        (errors.InvalidRequest("wrong for every model"), False),
        (errors.KeyLimited("the key's limit", retry_after=1.0), False),
        (errors.QuotaExceeded("the key's budget"), False),
        (errors.Cancelled("the client left"), False),
        (errors.Unavailable("the server is shutting down", code="shutting_down"), False),
    ],
)
def test_what_leads_to_the_next_model(error: ModelyardError, leads: bool) -> None:
    assert leads_on(error) is leads


def test_the_error_of_all_attempts_names_each_and_can_be_retried() -> None:
    found = no_answer(
        [Attempt("a", errors.Unsupported("no images")), Attempt("b", errors.Overloaded("full", retry_after=7.0))]
    )
    assert isinstance(found, errors.Overloaded)
    assert found.retry_after == 7.0
    assert found.message == "no model of this route could answer: a: no images; b: full"


def test_the_clients_own_error_stays_what_it_is() -> None:
    found = no_answer([Attempt("a", errors.Unavailable("lost")), Attempt("b", errors.InvalidRequest("bad", param="x"))])
    assert isinstance(found, errors.InvalidRequest)
    assert found.param == "x"


def test_names_in_the_header_cannot_break_it() -> None:
    skipped = [SkippedModel("a; b\r\nx: y", "full"), SkippedModel("模型", "lost")]
    assert fallback_header(skipped, "c/d:e") == (
        "from=a%3B%20b%0D%0Ax:%20y; reason=full; to=%E6%A8%A1%E5%9E%8B, from=%E6%A8%A1%E5%9E%8B; reason=lost; to=c/d:e"
    )
