"""Images and audio in an array of token ids. Pure.

KV is found, cut, copied and saved by the ids that it was computed from. Media have no ids, so each of their tokens gets
a negative number, made from a hash of its content and of the projector: the same picture has the same numbers wherever
it appears, and another picture has others.

    bit 0    the position advances by one with this token. Under M-RoPE a picture has fewer positions than tokens
    bit 1    a chunk begins: its KV is kept as a whole or not at all
    bit 2 …  29 bits of the hash, other bits for every token of a chunk

Positions are those of llama.cpp; tokens are cells of the KV cache.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

_ADVANCES, _BEGINS = 1, 2
_HASH = np.uint32(0x7FFF_FFFC)


def media_ids(key: bytes, tokens: int, positions: int) -> IntArray:
    """The ids of a chunk with so many tokens and positions. `key` is all that its embeddings depend on."""
    values = np.frombuffer(hashlib.shake_128(key).digest(4 * tokens), np.uint32) & _HASH
    values[tokens - positions :] |= _ADVANCES
    values[:1] |= _BEGINS
    return ~values.view(np.int32)


def count_positions(ids: IntArray) -> int:
    """The position that follows these tokens. Text and most media have one for each."""
    is_media = ids < 0
    if not is_media.any():
        return len(ids)
    return len(ids) - int(np.count_nonzero(is_media & (~ids & _ADVANCES == 0)))


def whole_chunks(ids: IntArray, count: int) -> int:
    """The first `count` ids without a chunk that continues after them."""
    if count >= len(ids) or ids[count] >= 0 or ~ids[count] & _BEGINS:
        return count
    begins = np.flatnonzero((ids[:count] < 0) & (~ids[:count] & _BEGINS != 0))
    return int(begins[-1]) if len(begins) else 0


def text_ids(ids: IntArray) -> IntArray:
    """Without media, for what counts or repeats words."""
    return ids if not len(ids) or ids.min() >= 0 else ids[ids >= 0]
