"""A revoked lease calls its callbacks once, before or after their registration."""

from __future__ import annotations

from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.core.pool import RevocableLease

REASON = Unavailable("unloaded")


def test_every_callback_gets_the_reason_once() -> None:
    lease, errors = RevocableLease(), list[ModelyardError]()
    lease.on_revoke(errors.append)
    lease.on_revoke(errors.append)
    lease.revoke(REASON)
    lease.revoke(Unavailable("again"))
    assert errors == [REASON, REASON]


def test_a_late_callback_runs_at_once() -> None:
    lease, errors = RevocableLease(), list[ModelyardError]()
    lease.revoke(REASON)
    lease.on_revoke(errors.append)
    assert errors == [REASON]
