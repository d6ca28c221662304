"""Rows of logits: views of llama.cpp's memory, biases and penalties on them, and log probabilities of the raw ones."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from modelyard.core.request import Sampling
from modelyard.core.tokenizer import IdLogprob
from modelyard.engines.llama_cpp.binding import short
from modelyard.engines.llama_cpp.logit_columns import Row
from modelyard.engines.llama_cpp.sampler_chain import NO_PENALTIES, PENALTY_WINDOW, penalty_strengths, penalty_window

_ALL_TOKENS = 1 << 24  # no window is longer


def logits_row(context: Any, row: int, n_vocab: int) -> Row:
    """A writable view of the row's logits, valid until the next decode."""
    return _view(short.get_logits_ith(context, row), n_vocab)


@lru_cache(64)
def logits_rows(address: int, rows: int, n_vocab: int) -> Row:
    """A view of all logits of a decode in which every row has logits: they are contiguous."""
    return _view(address, rows * n_vocab).reshape(rows, n_vocab)


@lru_cache(1024)
def _view(address: int, count: int) -> Row:
    """Creating a view takes longer than finding its maximum, and a context's buffer rarely moves."""
    row: Any = (ctypes.c_float * count).from_address(address)
    return np.frombuffer(row, np.float32)


def token_logprob(logits: Row, token: int, top: int, *, ranked: bool = False) -> IdLogprob:
    """Of the model's own distribution, before any sampler or mask. `ranked`: with its rank among all tokens."""
    peak = float(logits.max())
    total = peak + float(np.log(np.exp(logits - peak).sum()))
    best: tuple[tuple[int, float], ...] = ()
    if top := min(top, len(logits)):
        ids = np.argpartition(logits, -top)[-top:]
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        best = tuple((int(i), float(logits[i]) - total) for i in ids)
    rank = int((logits > logits[token]).sum()) + 1 if ranked else None
    return IdLogprob(token, float(logits[token]) - total, best, rank)


# --- biases and penalties ---------------------------------------------------------------------------------------------


class Penalties:
    """Repetition, frequency and presence penalties for the last tokens."""

    def __init__(
        self,
        repetition: float,
        frequency: float,
        presence: float,
        recent: Sequence[int] | Any,
        window: int = PENALTY_WINDOW,
    ) -> None:
        self._repetition, self._frequency, self._presence = repetition, frequency, presence
        self.recent: deque[int] = deque((int(token) for token in recent[max(0, len(recent) - window) :]), window)

    def penalized(self, row: Row) -> tuple[npt.NDArray[np.intp], Row]:
        """The tokens that are penalized, and their new logits."""
        ids, counts = np.unique(np.array(self.recent, np.intp), return_counts=True)
        logits = row[ids]
        # Dividing a negative logit would make the token more likely.
        logits = np.where(logits <= 0, logits * self._repetition, logits / self._repetition)
        return ids, (logits - counts * self._frequency - self._presence).astype(np.float32)


class LogitProcessor:
    """Biases and penalties. It changes the few logits in place while a token is chosen, and restores them.

    llama.cpp looks up each token of the vocabulary in a table of recent ones instead.
    """

    def __init__(self, biases: Mapping[int, float], penalties: Penalties | None) -> None:
        self._biased = np.fromiter(biases, np.intp, len(biases))
        self._biases = np.fromiter(biases.values(), np.float32, len(biases))
        self._penalties = penalties

    def applied(self, row: Row) -> Row:
        """A copy with the logits that the next token is chosen from."""
        row = row.copy()
        self.change(row)
        return row

    def change(self, row: Row) -> None:
        """For good: the row is not read again."""
        row[self._biased] += self._biases
        if self._penalties is not None:
            ids, logits = self._penalties.penalized(row)
            row[ids] = logits

    def count(self, token: int) -> None:
        """It was chosen from such a row."""
        if self._penalties is not None:
            self._penalties.recent.append(token)

    def sample(self, row: Row, choose: Callable[[Row], int]) -> int:
        before = row[self._biased]
        row[self._biased] = before + self._biases
        try:
            return choose(row) if self._penalties is None else self._sample_penalized(self._penalties, row, choose)
        finally:
            row[self._biased] = before

    def _sample_penalized(self, penalties: Penalties, row: Row, choose: Callable[[Row], int]) -> int:
        ids, logits = penalties.penalized(row)
        before = row[ids]
        row[ids] = logits
        try:
            token = choose(row)
        finally:
            row[ids] = before
        penalties.recent.append(token)
        return token


def logit_processor(s: Sampling, n_vocab: int, prompt: Any) -> LogitProcessor | None:
    biases = {token: bias for token, bias in (s.logit_bias or {}).items() if 0 <= token < n_vocab}
    strengths = penalty_strengths(s)
    window = penalty_window(s, _ALL_TOKENS)
    penalties = None if strengths == NO_PENALTIES or not window else Penalties(*strengths, prompt, window)
    return LogitProcessor(biases, penalties) if biases or penalties is not None else None
