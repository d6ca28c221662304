"""A small picture that every agent's image reader accepts."""

from __future__ import annotations

import struct
import zlib


def png(size: int = 16) -> bytes:
    """Red, `size` by `size`."""
    rows = b"".join(b"\x00" + b"\xff\x00\x00" * size for _ in range(size))
    head = struct.pack(">IIBBBBB", size, size, 8, 2, 0, 0, 0)
    chunks = _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(rows)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
