"""Sampling steps: those that tests check are computed, the others do nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Row = Any


class Step:
    def __init__(self, name: str, run: Callable[..., Row], called: dict[str, Any]) -> None:
        self.name, self._run, self.called = name, run, called

    def run(self, row: Row, past: list[int], chance: Any) -> Row:
        return self._run(row, past, chance, **self.called)


class CustomSampler:
    def __init__(self, steps: list[Step]) -> None:
        assert steps[-1].name in ("SS_Argmax", "SS_Sample"), "a sampler ends in a choice"
        assert not any(step.name in ("SS_Argmax", "SS_Sample") for step in steps[:-1])
        self.steps = steps

    def forward(self, row: Row, past: list[int], chance: Any) -> int:
        for step in self.steps:
            row = step.run(row, past, chance)
        return int(row)


def _biased(row: Row, past: list[int], chance: Any, *, logit_bias: dict[int, float]) -> Row:
    for token, bias in logit_bias.items():
        row[token] += bias
    return row


def _repeated(row: Row, past: list[int], chance: Any, *, rep_p: float) -> Row:
    seen = np.unique(past)
    row[seen] = np.where(row[seen] > 0, row[seen] / rep_p, row[seen] * rep_p)
    return row


def _present(row: Row, past: list[int], chance: Any, *, pres_p: float, freq_p: float) -> Row:
    seen, counts = np.unique(past, return_counts=True)
    row[seen] -= pres_p + freq_p * counts
    return row


def _probable(row: Row, past: list[int], chance: Any, *, min_p: float) -> Row:
    return np.where(row >= row.max() + np.log(min_p), row, -np.inf)


def _best(row: Row, past: list[int], chance: Any, *, top_k: int) -> Row:
    return np.where(row >= np.sort(row)[-top_k], row, -np.inf)


def _most(row: Row, past: list[int], chance: Any, *, top_p: float) -> Row:
    order = np.argsort(-row)
    probs = np.exp(row[order] - row.max())
    probs /= probs.sum()
    row[order[1:][(np.cumsum(probs) - probs)[1:] >= top_p]] = -np.inf
    return row


def _cooled(row: Row, past: list[int], chance: Any, *, temperature: float) -> Row:
    return row / temperature


def _drawn(row: Row, past: list[int], chance: Any) -> Row:
    return np.argmax(row + chance.gumbel(size=len(row)))


def _only_made(row: Row, past: list[int], chance: Any, **called: Any) -> Row:
    return row


_RUNS: dict[str, Callable[..., Row]] = {
    "SS_LogitBias": _biased,
    "SS_RepP": _repeated,
    "SS_PresFreqP": _present,
    "SS_DRY": _only_made,
    "SS_MinP": _probable,
    "SS_TopK": _best,
    "SS_TopP": _most,
    "SS_XTC": _only_made,
    "SS_Temperature": _cooled,
    "SS_Sample": _drawn,
    "SS_Argmax": lambda row, past, chance: np.argmax(row),
}


def _maker(name: str, run: Callable[..., Row]) -> Callable[..., Step]:
    return lambda **called: Step(name, run, called)


STEPS = {name: _maker(name, run) for name, run in _RUNS.items()}
