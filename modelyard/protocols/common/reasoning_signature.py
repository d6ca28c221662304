"""Reasoning that travels with the client: sealed into an opaque string going out, found again when it comes back.

Clients return `signature` (Messages) and `encrypted_content` (Responses) untouched even where they drop or omit the
text itself, so most reasoning needs no memory on our side. It is not a secret from the client: it was shown to them.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_MARK = "my1."
_LIMIT = 8 << 20  # what an unsealed text may grow to: a hostile client must not inflate a small body without end


def pack_reasoning(text: str) -> str:
    return _MARK + base64.urlsafe_b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"), 1)).decode()


def unpack_reasoning(sealed: str) -> str | None:
    """The text that was sealed, or None for a foreign, broken or missing seal."""
    if not sealed.startswith(_MARK):
        return None
    try:
        packed = base64.urlsafe_b64decode(sealed[len(_MARK) :])
        inflater = zlib.decompressobj()
        text = inflater.decompress(packed, _LIMIT)
        return text.decode("utf-8", "surrogatepass") if inflater.eof else None
    except (binascii.Error, zlib.error, ValueError):
        return None
