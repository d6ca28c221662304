"""Numbers as people read them. Pure."""

from __future__ import annotations

NOTHING = "–"


def size(count: float | None) -> str:
    if count is None:
        return NOTHING
    for unit in ("B", "KB", "MB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GB"


def seconds(value: float | None) -> str:
    if value is None:
        return NOTHING
    if value < 0.001:
        return "<1 ms"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 120:
        return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"


def count(value: float | None) -> str:
    """Thousands apart, by a thin space: commas and points mean different things to different people."""
    return NOTHING if value is None else f"{value:,.0f}".replace(",", "\u202f")


def rate(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:.1f}" if value < 100 else count(value)


def share(part: float | None) -> str:
    return NOTHING if part is None else f"{part * 100:.0f} %"


def ago(then: float | None, now: float) -> str:
    if then is None:
        return "never"
    passed = max(0.0, now - then)
    return "just now" if passed < 2 else f"{seconds(passed)} ago"
