"""Rate limits of one key, with explicit times."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.errors import RateLimited
from modelyard.core.pool import KeyLimits
from modelyard.scheduler.rate_limit import KeyRateLimiter


def limiter_with(**limits: Any) -> KeyRateLimiter:
    return KeyRateLimiter("ann", KeyLimits(**limits), 0.0)


def ask(limiter: KeyRateLimiter, now: float, tokens: int = 0) -> float | None:
    """None if it is allowed, else the retry hint."""
    try:
        limiter.check(tokens, now, None)
    except RateLimited as error:
        return error.retry_after
    limiter.start_request(tokens, now)
    return None


def test_a_burst_of_one_minute_is_allowed_and_refills_evenly():
    limiter = limiter_with(requests_per_minute=3)
    assert [ask(limiter, 0.0) for _ in range(4)] == [None, None, None, 20.0]
    assert ask(limiter, 19.0) == pytest.approx(1.0)
    assert ask(limiter, 20.0) is None


def test_unused_requests_do_not_accumulate_beyond_a_minute():
    limiter = limiter_with(requests_per_minute=2)
    assert [ask(limiter, 600.0) for _ in range(3)] == [None, None, 30.0]


def test_prompt_and_output_tokens_share_a_bucket():
    limiter = limiter_with(tokens_per_minute=600)
    assert ask(limiter, 0.0, 500) is None
    limiter.spend(400, 0.0)
    assert ask(limiter, 0.0, 100) == pytest.approx(40.0)
    assert ask(limiter, 40.0, 100) is None


def test_a_prompt_larger_than_the_limit_passes_when_the_bucket_is_full():
    limiter = limiter_with(tokens_per_minute=100)
    assert ask(limiter, 0.0, 250) is None
    assert ask(limiter, 0.0, 250) == pytest.approx(150.0)
    assert ask(limiter, 150.0, 250) is None


def test_the_retry_hint_of_the_concurrency_limit_is_the_service_time():
    limiter = limiter_with(max_concurrent=1)
    limiter.active = 1
    with pytest.raises(RateLimited, match="1 requests at a time") as refused:
        limiter.check(0, 0.0, 7.5)
    assert refused.value.retry_after == 7.5


def test_a_refused_request_draws_nothing():
    limiter = limiter_with(requests_per_minute=1, tokens_per_minute=60)
    assert ask(limiter, 0.0, 60) is None
    assert ask(limiter, 30.0, 60) == 30.0
    assert ask(limiter, 60.0, 60) is None


def test_a_key_without_limits_is_never_refused():
    assert ask(limiter_with(), 0.0, 10**9) is None
