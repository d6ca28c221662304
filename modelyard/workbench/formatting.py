"""Numbers as text for people. Pure."""

from __future__ import annotations

from modelyard.core import units

MISSING = "–"


def size(count: float | None) -> str:
    return MISSING if count is None else units.format_size(count)


def duration(seconds: float | None) -> str:
    return MISSING if seconds is None else units.format_duration(seconds)


def count(value: float | None) -> str:
    """Thousands are separated by a thin space: commas and points mean different things in different countries."""
    return MISSING if value is None else f"{value:,.0f}".replace(",", "\u202f")


def plural(number: int, noun: str) -> str:
    return f"{count(number)} {noun}" + ("" if number == 1 else "s")


def rate(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:.1f}" if value < 100 else count(value)


def percent(share: float | None) -> str:
    return MISSING if share is None else f"{share * 100:.0f} %"


def ago(then: float | None, now: float) -> str:
    if then is None:
        return "never"
    passed = max(0.0, now - then)
    return "just now" if passed < 2 else f"{duration(passed)} ago"
