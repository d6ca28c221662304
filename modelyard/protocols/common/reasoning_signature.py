"""Reasoning text packed into an opaque signature that the client returns on the next turn.

Clients return `signature` (Messages) and `encrypted_content` (Responses) unchanged even when they drop the text, so
most reasoning needs no server-side storage. The signature hides nothing: the client has seen the text.
"""

from __future__ import annotations

import base64
import binascii
import zlib

_PREFIX = "my1."
_MAX_UNPACKED = 8 << 20  # bytes; a small hostile body must not decompress without limit


def pack_reasoning(text: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(zlib.compress(text.encode("utf-8", "surrogatepass"), 1)).decode()


def unpack_reasoning(signature: str) -> str | None:
    """The packed text, or None for a foreign, broken or missing signature."""
    if not signature.startswith(_PREFIX):
        return None
    try:
        packed = base64.urlsafe_b64decode(signature[len(_PREFIX) :])
        decompressor = zlib.decompressobj()
        text = decompressor.decompress(packed, _MAX_UNPACKED)
        return text.decode("utf-8", "surrogatepass") if decompressor.eof else None
    except (binascii.Error, zlib.error, ValueError):
        return None
