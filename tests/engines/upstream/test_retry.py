"""When a refused request is sent again, and after how long."""

from __future__ import annotations

import pytest

from modelyard.core.errors import InvalidRequest, ModelyardError, Overloaded, RateLimited, Timeout, Unavailable
from modelyard.engines.upstream.retry import Patience, Refused, patiently

SOON = RateLimited("slow down", retry_after=7.0)


@pytest.mark.parametrize(
    ("error", "named", "tried", "tries", "pause"),
    [
        (SOON, True, 1, 1, 7.0),
        (SOON, False, 1, 1, 0.5),
        (Unavailable("down"), False, 3, 3, 2.0),
        (Overloaded("full", retry_after=3), True, 1, 2, 3.0),
        (Timeout("late"), False, 1, 1, 0.5),
        (SOON, True, 1, 0, None),  # no tries were allowed
        (SOON, True, 3, 2, None),
        (RateLimited("much later", retry_after=3600), True, 1, 5, None),
        (InvalidRequest("bad"), False, 1, 5, None),
        (Unavailable("key", code="upstream_auth_failed"), False, 1, 5, None),
    ],
)
def test_the_pause(error: ModelyardError, named: bool, tried: int, tries: int, pause: float | None) -> None:
    assert Patience(tries).pause(Refused(error, named), tried) == pause


async def test_tries_go_on_until_one_is_taken() -> None:
    came: list[int] = []

    async def attempt() -> None:
        came.append(1)
        if len(came) < 3:
            raise Refused(RateLimited("wait", retry_after=0), True)

    await patiently(attempt, Patience(2))
    assert len(came) == 3


async def test_the_last_refusal_is_told_as_what_it_was() -> None:
    async def attempt() -> None:
        raise Refused(Unavailable("down"))

    with pytest.raises(Unavailable, match="down"):
        await patiently(attempt, Patience(0))
