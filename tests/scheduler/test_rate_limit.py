"""What one key may ask for, on a clock of our own."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.errors import RateLimited
from modelyard.scheduler.rate_limit import KeyLimits, KeyRateLimiter


def allowed(**limits: Any) -> KeyRateLimiter:
    return KeyRateLimiter("ann", KeyLimits(**limits), 0.0)


def ask(allowance: KeyRateLimiter, now: float, tokens: int = 0) -> float | None:
    """None: it may; else when to come back."""
    try:
        allowance.check(tokens, now, None)
    except RateLimited as error:
        return error.retry_after
    allowance.start_request(tokens, now)
    return None


def test_a_minutes_worth_may_come_at_once_and_then_one_at_a_time():
    allowance = allowed(requests_per_minute=3)
    assert [ask(allowance, 0.0) for _ in range(4)] == [None, None, None, 20.0]
    assert ask(allowance, 19.0) == pytest.approx(1.0)
    assert ask(allowance, 20.0) is None


def test_what_is_not_used_does_not_gather_beyond_a_minute():
    allowance = allowed(requests_per_minute=2)
    assert [ask(allowance, 600.0) for _ in range(3)] == [None, None, 30.0]


def test_tokens_of_prompts_and_answers_are_drawn_from_the_same_bucket():
    allowance = allowed(tokens_per_minute=600)
    assert ask(allowance, 0.0, 500) is None
    allowance.spend(400, 0.0)
    assert ask(allowance, 0.0, 100) == pytest.approx(40.0)
    assert ask(allowance, 40.0, 100) is None


def test_a_prompt_larger_than_the_limit_passes_when_the_bucket_is_full():
    allowance = allowed(tokens_per_minute=100)
    assert ask(allowance, 0.0, 250) is None
    assert ask(allowance, 0.0, 250) == pytest.approx(150.0)
    assert ask(allowance, 150.0, 250) is None


def test_too_many_at_a_time_come_back_when_an_answer_is_likely_over():
    allowance = allowed(max_concurrent=1)
    allowance.active = 1
    with pytest.raises(RateLimited, match="1 requests at a time") as refused:
        allowance.check(0, 0.0, 7.5)
    assert refused.value.retry_after == 7.5


def test_a_refused_request_draws_nothing():
    allowance = allowed(requests_per_minute=1, tokens_per_minute=60)
    assert ask(allowance, 0.0, 60) is None
    assert ask(allowance, 30.0, 60) == 30.0
    assert ask(allowance, 60.0, 60) is None


def test_a_key_without_limits_may_do_anything():
    assert ask(allowed(), 0.0, 10**9) is None
