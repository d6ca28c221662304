"""Rate limits of one API key: requests and tokens per minute, and concurrent requests. Pure: time is an argument.

Each limit is a token bucket that holds a minute's worth and refills evenly. Prompt tokens are drawn before the work
starts. Output tokens are drawn when they are known, so a bucket may go into debt; the next request waits until the debt
is paid. A prompt larger than the whole bucket passes when the bucket is full, otherwise it could never pass.
"""

from __future__ import annotations

from modelyard.core.errors import KeyLimited
from modelyard.core.pool import KeyLimits

_ROUNDING = 1e-6


class TokenBucket:
    __slots__ = ("_level", "_updated", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._updated = float(per_minute), now

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be drawn; 0 means now."""
        missing = min(amount, self.per_minute) - self._refill(now)
        return missing * 60.0 / self.per_minute if missing > _ROUNDING else 0.0

    def draw(self, amount: float, now: float) -> None:
        self._level = self._refill(now) - amount

    def _refill(self, now: float) -> float:
        self._level = min(self.per_minute, self._level + (now - self._updated) * self.per_minute / 60.0)
        self._updated = now
        return self._level


class KeyRateLimiter:
    """The limits of one key and their current use. The scheduler keeps `active`, the number of its requests."""

    def __init__(self, name: str, limits: KeyLimits, now: float) -> None:
        self.name, self.limits = name, limits
        self.active = 0
        self._requests = TokenBucket(limits.requests_per_minute, now) if limits.requests_per_minute else None
        self._tokens = TokenBucket(limits.tokens_per_minute, now) if limits.tokens_per_minute else None

    def check(self, tokens: int, now: float, service_s: float | None) -> None:
        """Raise KeyLimited if one more request with `tokens` prompt tokens exceeds a limit. Draws nothing."""
        limit = self.limits.max_concurrent
        if limit is not None and self.active >= limit:
            retry = max(1.0, service_s or 1.0)
            raise KeyLimited(f"the key {self.name!r} may have {limit} requests at a time", retry_after=retry)
        for bucket, amount, unit in ((self._requests, 1, "requests"), (self._tokens, tokens, "tokens")):
            if bucket is not None and (wait := bucket.wait(amount, now)) > 0:
                message = f"the key {self.name!r} may use {bucket.per_minute} {unit} a minute"
                raise KeyLimited(message, retry_after=max(1.0, wait))

    def start_request(self, tokens: int, now: float) -> None:
        if self._requests is not None:
            self._requests.draw(1, now)
        self.spend(tokens, now)

    def spend(self, tokens: int, now: float) -> None:
        if self._tokens is not None and tokens:
            self._tokens.draw(tokens, now)
