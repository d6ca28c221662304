"""Spans of time as people write them: 90, 30s, 10m, 1h. Pure."""

from __future__ import annotations

import re

from modelyard.core.errors import InvalidRequest

_SPAN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h)?")
_UNITS = {None: 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    found = _SPAN.fullmatch(text.strip().lower())
    if found is None or float(found.group(1)) <= 0:
        raise InvalidRequest(f"{text!r} is no span of time such as 90, 30s, 10m or 1h")
    return float(found.group(1)) * _UNITS[found.group(2)]
