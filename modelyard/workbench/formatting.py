"""Numbers as text for people. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

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


def cost(value: float, currency: str) -> str:
    """Small amounts with as many digits as they need to be seen."""
    digits = 2 if value == 0 or value >= 0.1 else 4
    return f"{value:,.{digits}f}".replace(",", "\u202f") + f" {currency}"


# Times are those of the browser's clock; `utc_offset_s` is its distance from UTC.


def clock(at: float, utc_offset_s: float) -> str:
    return f"{_shifted(at, utc_offset_s):%H:%M:%S}"


def moment(at: float, utc_offset_s: float) -> str:
    return f"{_shifted(at, utc_offset_s):%Y-%m-%d %H:%M}"


def day(at: float | None) -> str:
    """The day in UTC; empty for none."""
    return "" if at is None else f"{_shifted(at, 0):%Y-%m-%d}"


def _shifted(at: float, utc_offset_s: float) -> datetime:
    return datetime.fromtimestamp(at + utc_offset_s, UTC)
