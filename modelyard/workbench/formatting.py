"""Numbers as text for people. Pure."""

from __future__ import annotations

MISSING = "–"


def size(count: float | None) -> str:
    if count is None:
        return MISSING
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    if seconds < 0.001:
        return "<1 ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


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
