"""A place that is taken away ends the work in it, once, whoever comes first."""

from __future__ import annotations

from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.core.lease import RevocableLease

WHY = Unavailable("unloaded")


def test_everybody_who_asked_is_told_why_and_only_once() -> None:
    place, heard = RevocableLease(), list[ModelyardError]()
    place.on_revoke(heard.append)
    place.on_revoke(heard.append)
    place.revoke(WHY)
    place.revoke(Unavailable("again"))
    assert heard == [WHY, WHY]


def test_who_comes_too_late_is_told_at_once() -> None:
    place, heard = RevocableLease(), list[ModelyardError]()
    place.revoke(WHY)
    place.on_revoke(heard.append)
    assert heard == [WHY]
