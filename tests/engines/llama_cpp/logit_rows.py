"""Rows of random logits, for the samplers."""

from __future__ import annotations

from math import inf

import numpy as np

from modelyard.engines.llama_cpp.logit_columns import Row

VOCAB = 9_001  # enough to be searched by columns, and no multiple of anything


def normal(spread: float, count: int = VOCAB, seed: int = 1) -> Row:
    return np.random.default_rng(seed).normal(0, spread, count).astype(np.float32)


ROWS = {
    "flat": normal(0.1),
    "usual": normal(2.0),
    "peaked": normal(6.0),
    "masked": np.where(np.arange(VOCAB) % 397 == 3, normal(2.0), -inf).astype(np.float32),
    "small": normal(2.0, 40),
}
