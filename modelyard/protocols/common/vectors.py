"""Embeddings of fewer dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from modelyard.core.errors import InvalidRequest


def shortened(vector: Sequence[float], dimensions: int, param: str = "dimensions") -> Sequence[float]:
    """The first dimensions, normalized to length 1, as Matryoshka models require."""
    if dimensions > len(vector):
        raise InvalidRequest(
            f"{param} is {dimensions}, but this model's embeddings have {len(vector)}: send that number or less",
            param=param,
        )
    head = vector[:dimensions]
    length = math.sqrt(sum(x * x for x in head))
    return [x / length for x in head] if length else head
