"""How deep a JSON body is nested, decided at C speed before anything parses it."""

from __future__ import annotations

import re

_STRINGS = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_BRACKETS = b"[]{}"
_NOT_BRACKETS = bytes(i for i in range(256) if i not in _BRACKETS)
_TO_ROUND = bytes.maketrans(b"[]{}", b"()()")


def too_deep(body: bytes, limit: int) -> bool:
    """True where brackets outside strings nest more than `limit` deep. Whether they match is the parser's business."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    brackets = _STRINGS.sub(b"", body).translate(_TO_ROUND, _NOT_BRACKETS)
    for _ in range(limit):
        if b"(" not in brackets:
            return False
        brackets = _peel(brackets)
    return b"(" in brackets


def _peel(brackets: bytes) -> bytes:
    """Without its innermost level: every `()` leaves, and what was around them becomes innermost."""
    return brackets.replace(b"()", b"")
