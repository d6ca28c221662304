"""The dice of several jobs thrown together: what each does alone, in as many calls as one of them takes.

A cut leaves some dozens of tokens of a row, and numpy takes longer to be called than to look at them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from modelyard.engines.llama_cpp.dice import Dice, above


class Throw:
    """Of dice that all have a top_k: each then looks at a row of the same length."""

    def __init__(self, dice: Sequence[Dice]) -> None:
        self._dice = dice
        self._most = max(each.top_k for each in dice)
        self._columns, self._lines = np.arange(self._most), np.arange(len(dice))
        self._top_k = _column([each.top_k for each in dice])
        self._top_p = _column([each.top_p for each in dice])
        self._depth = _column([each.depth for each in dice])
        self._temperature = _column([each.temperature for each in dice])

    def pick(self, rows: npt.NDArray[np.float32]) -> list[int]:
        found = [above(row, self._most) for row in rows]
        if min(map(len, found)) < self._most:  # the vocabulary has no more, or not so many are possible
            return self._one_by_one(rows)
        counts = np.array([len(ids) for ids in found])
        ids, lines = np.concatenate(found), np.repeat(self._lines, counts)
        logits = rows[lines, ids]
        falling = np.lexsort((-logits, lines))
        places = falling[(counts.cumsum() - counts)[:, None] + self._columns]
        sorted_ = logits[places].astype(np.float64)
        if not np.isfinite(sorted_[:, 0]).all():
            return self._one_by_one(rows)
        picked = self._picked(sorted_)
        tokens: list[int] = ids[places[self._lines, picked]].tolist()
        return tokens

    def _one_by_one(self, rows: npt.NDArray[np.float32]) -> list[int]:
        return [each.pick(row) for each, row in zip(self._dice, rows, strict=True)]

    def _picked(self, logits: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
        """Which of each line, where they fall from left to right."""
        depths = logits - logits[:, :1]
        weights = np.where(self._columns < self._top_k, np.exp(depths), 0.0)
        sums = weights.cumsum(1)
        kept = (weights > 0) & (depths >= self._depth) & (sums - weights < self._top_p * sums[:, -1:])
        kept[:, 0] = True  # as where nothing is asked of the others
        sums = np.where(kept, np.exp(depths / self._temperature), 0.0).cumsum(1)
        chances = _column([each.random() for each in self._dice]) * sums[:, -1:]
        picked: npt.NDArray[np.intp] = np.minimum((sums <= chances).sum(1), kept.sum(1) - 1)
        return picked


def _column(values: Sequence[float]) -> npt.NDArray[np.float64]:
    return np.array(values, np.float64)[:, None]
