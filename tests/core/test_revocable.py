"""A place that is taken away ends the work in it, once, whoever comes first."""

from __future__ import annotations

from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.core.lease import RevocableLease

REASON = Unavailable("unloaded")


def test_everybody_who_asked_is_told_why_and_only_once() -> None:
    lease, errors = RevocableLease(), list[ModelyardError]()
    lease.on_revoke(errors.append)
    lease.on_revoke(errors.append)
    lease.revoke(REASON)
    lease.revoke(Unavailable("again"))
    assert errors == [REASON, REASON]


def test_who_comes_too_late_is_told_at_once() -> None:
    lease, errors = RevocableLease(), list[ModelyardError]()
    lease.revoke(REASON)
    lease.on_revoke(errors.append)
    assert errors == [REASON]
