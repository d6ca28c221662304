"""How a JSON body is built, decided at C speed before anything parses it: how deep, and of how many values.

A parser makes an object of everything and lets nobody else run meanwhile: two bytes of a hostile body become sixty.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_CONTAINERS = 500_000  # ten thousand tools have about a tenth of them
MAX_VALUES = 2_000_000  # as many token ids as a batch of embeddings may need

_NOT_MARKS = bytes(i for i in range(256) if i not in b"[]{},")
_TO_ROUND = bytes.maketrans(b"[]{}", b"()()")
_SLICE = 1 << 18  # one C call holds the interpreter: a few milliseconds for so many bytes


def json_fault(body: bytes, limit: int) -> str | None:
    """What is wrong with the build, if anything. Whether brackets match is the parser's business."""
    few = len(body) <= MAX_VALUES or body.count(b",") <= MAX_VALUES  # no body has more commas than bytes
    if few and body.count(b"[") + body.count(b"{") <= limit:
        return None
    found: list[bytes] = []
    opened = values = 0
    for marks in _marks(body):
        opened, values = opened + marks.count(b"("), values + marks.count(b",")
        if opened > MAX_CONTAINERS:
            return f"the JSON body has more than {MAX_CONTAINERS} arrays and objects"
        if values > MAX_VALUES:
            return f"the JSON body has more than {MAX_VALUES} values"
        found.append(marks.replace(b",", b""))
    return f"the JSON body is nested more than {limit} levels deep" if _too_deep(b"".join(found), limit) else None


def _marks(body: bytes) -> Iterator[bytes]:
    """The commas and brackets outside strings, round ones all, slice by slice.

    Escapes go first; then a quote is a quote. Outside strings a backslash is an error, where the parser stops.
    """
    carried = b""  # an open string's quote, and half an escape
    for at in range(0, len(body), _SLICE):
        piece = carried + body[at : at + _SLICE]
        half = b"\\" if (len(piece) - len(piece.rstrip(b"\\"))) % 2 else b""
        piece = piece.removesuffix(half).replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        carried = half if len(parts) % 2 else b'"' + half
        yield b"".join(parts[::2]).translate(_TO_ROUND, _NOT_MARKS)


def _too_deep(brackets: bytes, limit: int) -> bool:
    """Every round takes the innermost level away, until nothing opens any more or nothing closes."""
    for done in range(limit):
        rest = brackets.replace(b"()", b"")
        if len(rest) == len(brackets):
            return rest.count(b"(") > limit - done
        brackets = rest
    return b"(" in brackets
