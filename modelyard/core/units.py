"""Numbers with units as people read them. Sizes are binary (1 MiB = 1,048,576 bytes); times below a second are in
milliseconds."""

from __future__ import annotations


def format_size(count: float) -> str:
    """Bytes: 17 B, 2 KiB, 5.0 MiB, 94 MiB, 22.5 GiB."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB"):
        count /= 1024
        if abs(round(count)) < 1024:
            return f"{count:.1f} {unit}" if unit == "MiB" and abs(count) < 9.95 else f"{count:.0f} {unit}"
    return f"{count / 1024:.1f} GiB" if abs(count) < 1024**2 else f"{count / 1024**2:.1f} TiB"


def format_duration(seconds: float) -> str:
    """<1 ms, 250 ms, 1.5 s, 40 s, 3 min, 2 h, 3 days."""
    if seconds < 0.001:
        return "<1 ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"
