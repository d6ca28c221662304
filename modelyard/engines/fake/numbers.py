"""Numbers out of a hash: log probabilities and embedding vectors that are the same on every machine."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from functools import lru_cache

from modelyard.core.engine import IdLogprob


@lru_cache(maxsize=65536)
def logprob(token: int, alternatives: int, vocabulary: int) -> IdLogprob:
    """The chosen token has more than half; each alternative half of what is left, so that they never exceed 1."""
    share = 0.5 + (token * 2654435761 % 1000) / 2222
    chosen = math.log(share)
    top, left = [(token, chosen)], 1.0 - share
    for nth in range(1, alternatives):
        left /= 2
        top.append(((token + nth * 7) % vocabulary, math.log(left)))
    return IdLogprob(token, chosen, tuple(top[:alternatives]))


def unit_vector(ids: Sequence[int], size: int) -> list[float]:
    """Equal ids, equal vector; length 1."""
    seed = struct.pack(f"<{len(ids)}I", *ids)
    raw = struct.unpack(f"<{size}i", hashlib.shake_128(seed).digest(4 * size))
    length = math.sqrt(sum(x * x for x in raw)) or 1.0
    return [x / length for x in raw]
