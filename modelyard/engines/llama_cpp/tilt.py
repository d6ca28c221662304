"""What a request adds to the logits of single tokens or takes from them: biases, and penalties for what was just said.

llama.cpp looks each token of the vocabulary up in a table of those that were said. Here the few that are meant are
changed where they lie, for as long as a token is chosen, and put back: whoever looks next finds the row as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
Change = tuple[npt.NDArray[np.intp], Row]  # tokens, and logits for them

WINDOW = 64  # tokens that penalties look back at


class Penalties:
    """`recent`: what was said before, of which the last count."""

    def __init__(self, repetition: float, frequency: float, presence: float, recent: Sequence[int] | Any) -> None:
        self._repetition, self._frequency, self._presence = repetition, frequency, presence
        self._recent: deque[int] = deque((int(token) for token in recent[-WINDOW:]), WINDOW)

    def change(self, row: Row) -> Change:
        ids, counts = np.unique(np.array(self._recent, np.intp), return_counts=True)
        found = row[ids]
        # To divide a negative logit would make it likelier.
        found = np.where(found <= 0, found * self._repetition, found / self._repetition)
        return ids, (found - counts * self._frequency - self._presence).astype(np.float32)

    def accept(self, token: int) -> None:
        self._recent.append(token)


class Tilt:
    def __init__(self, biases: Mapping[int, float], penalties: Penalties | None) -> None:
        self._biased = np.fromiter(biases, np.intp, len(biases))
        self._biases = np.fromiter(biases.values(), np.float32, len(biases))
        self._penalties = penalties

    def pick(self, row: Row, choose: Callable[[Row], int]) -> int:
        before = row[self._biased]
        row[self._biased] = before + self._biases
        try:
            return choose(row) if self._penalties is None else self._penalised(self._penalties, row, choose)
        finally:
            row[self._biased] = before

    def _penalised(self, penalties: Penalties, row: Row, choose: Callable[[Row], int]) -> int:
        ids, logits = penalties.change(row)
        before = row[ids]
        row[ids] = logits
        try:
            token = choose(row)
        finally:
            row[ids] = before
        penalties.accept(token)
        return token
