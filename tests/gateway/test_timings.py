from __future__ import annotations

import pytest

from modelyard.core.events import Timings
from modelyard.gateway.timings import Moments, around

AT = Moments(asked=10.0, arrived=9.5, given=12.0, spoke=13.0, waited=1.75)


def test_what_the_gateway_saw_is_laid_around_the_engines_own_figures() -> None:
    told = Timings(prefill=0.5, first_token=0.6, decode=2.0, backend=2.6, total=2.6)
    assert around(told, AT, 0.25, 15.0, remote=False) == Timings(
        queue=1.75, tokenize=0.25, prefill=0.5, first_token=0.6, decode=2.0, backend=3.0, engine=5.25, total=5.5
    )


def test_an_engine_that_tells_nothing_is_timed_at_its_seam() -> None:
    seen = around(Timings(), AT, 0.25, 15.0, remote=False)
    assert (seen.prefill, seen.first_token, seen.decode) == (None, 1.0, 2.0)


@pytest.mark.parametrize("at", [AT, Moments(asked=10.0, arrived=9.5, given=12.0)])
def test_no_first_token_is_made_up(at: Moments) -> None:
    seen = around(Timings(), at, 0.25, 15.0, remote=at is AT)
    assert (seen.first_token, seen.decode, seen.backend) == (None, None, 3.0)


def test_without_an_arrival_the_total_is_the_gateways_own() -> None:
    assert around(Timings(), Moments(asked=10.0), 0.25, 15.0, remote=False) == Timings(
        queue=0.0, tokenize=0.25, engine=5.25, total=5.25
    )
