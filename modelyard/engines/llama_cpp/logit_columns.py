"""Finds the most likely tokens of several rows of logits in one pass over them. Pure.

A row is laid out in `_LINES` lines: tokens at the same place of all lines are a column. numpy finds the maxima of the
columns nearly as fast as it reads the logits, and only the columns with the highest maxima are searched. Likely tokens
are often neighbours, and neighbours are in different columns. Longer columns make the search slow, because each token
of a column is in another cache line; shorter ones the pass, because it writes more maxima. Threads share the rows only
where they are so many that waking the threads takes less time than they save (`for_rows`): with eight rows it does not.

numpy takes longer to be called than for most of the work here, so there are few calls, and methods of arrays and
ufuncs rather than functions that are written in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from modelyard.library import cores

Row = npt.NDArray[np.float32]
Rows = npt.NDArray[np.float32]  # two dimensions
TokenIds = npt.NDArray[np.intp]

LINES, GROUP = 32, 8
_MIN_VOCAB = 8192  # below it the last line would not fit
_LOWEST = np.float32(-1e30)  # logits below it are of impossible tokens, which never count
_SHARE = 1 << 20  # logits for which waking a thread pays: 2 to 3 ms of searching among all rows
_MOST_THREADS = 8


@cache
def _threads() -> tuple[int, ThreadPoolExecutor]:
    """How many share the rows: half of the cores, because other contexts, the gateway and llama.cpp use some, too."""
    count = max(1, min(_MOST_THREADS, cores.physical() // 2))
    return count, ThreadPoolExecutor(max(1, count - 1), "logits")


def for_rows(rows: int, logits: int, function: Callable[[slice], None]) -> None:
    """Calls the function with parts of so many rows, which have so many logits in all: at once, in several threads, if
    that pays. numpy does not hold the GIL in a pass over many numbers."""
    parts = min(rows, logits // _SHARE)
    if parts > 2:
        count, pool = _threads()
        parts = min(parts, count)
    if parts <= 2:
        function(slice(0, rows))
        return
    borders = [rows * at // parts for at in range(parts + 1)]
    first, *others = map(slice, borders[:-1], borders[1:])
    waiting = [pool.submit(function, other) for other in others]
    function(first)
    for each in waiting:
        each.result()


def best_tokens(rows: Rows) -> list[int]:
    """The most likely token of each row."""
    best = np.empty(len(rows), np.intp)

    def find(part: slice) -> None:
        rows[part].argmax(1, out=best[part])

    for_rows(len(rows), rows.size, find)
    found: list[int] = best.tolist()
    return found


class Columns(Struct, frozen=True):
    """How a row of so many logits is laid out: in columns, and in groups of eight columns. If the vocabulary does not
    fill the lines, the first `short` columns have no token in the last line."""

    vocab: int
    width: int  # columns
    groups: int
    offsets: TokenIds  # of the tokens of a column
    short: int

    def maxima(self, rows: Rows, out: Rows) -> None:
        """Of each column."""

        def find(part: slice) -> None:
            np.maximum.reduce(self._whole_lines(rows[part]), axis=1, out=out[part])
            if self.short:
                last = out[part, self.short :]
                np.maximum(last, rows[part, self.vocab - last.shape[1] :], out=last)

        for_rows(len(rows), rows.size, find)

    def logits(self, rows: Rows, owners: TokenIds, columns: TokenIds) -> Rows:
        """Of columns of rows: column × line. Without an array of all their places, which is so large that memory for it
        would be returned to the system and fetched again at each step."""
        found: Rows = self._whole_lines(rows)[owners, :, columns]
        if self.short:
            last = rows[owners, columns + self.offsets[-1]]
            last[columns < self.short] = -np.inf
            found = np.concatenate((found, last[:, None]), axis=1)
        return found

    def _whole_lines(self, rows: Rows) -> npt.NDArray[np.float32]:
        lines = LINES - 1 if self.short else LINES
        return rows[:, : lines * self.width].reshape(len(rows), lines, self.width)


@lru_cache(16)
def columns_of(vocab: int) -> Columns:
    groups = -(-vocab // (LINES * GROUP))
    width = groups * GROUP
    offsets = np.arange(LINES) * width
    offsets[-1] = vocab - width
    return Columns(vocab, width, groups, offsets, LINES * width - vocab)


class TopTokens(Struct, frozen=True):
    """All tokens of several rows that reach their row's bound, in the order of the rows."""

    lines: TokenIds  # the row of each
    ids: TokenIds
    logits: Row
    borders: TokenIds  # where each row begins, and the end
    bounds: Row  # of each row
    groups: Rows | None  # of each row: the maximum of each group, if it was laid out in columns


class ColumnSearch:
    """Finds top tokens in memory of its own: new memory costs as much as the search."""

    def __init__(self) -> None:
        self._maxima: Rows | None = None
        self._is_found = np.empty((0, 0), np.bool_)

    def find(self, rows: Rows, count: int) -> TopTokens:
        """At least the `count` most likely tokens of each row, if so many are possible, and hardly more."""
        n_rows, vocab = rows.shape
        layout = columns_of(vocab)
        if vocab < _MIN_VOCAB or 2 * count > layout.width:
            return _find_in_whole_rows(rows, min(count, vocab))
        maxima = self._maxima
        if maxima is None or maxima.shape != (n_rows, layout.width):
            maxima = self._maxima = np.empty((n_rows, layout.width), np.float32)
            self._is_found = np.empty((n_rows, layout.width), np.bool_)
        layout.maxima(rows, maxima)
        groups = np.maximum.reduce(maxima.reshape(n_rows, GROUP, layout.groups), axis=1, initial=_LOWEST)
        highest = groups.copy() if 2 * count <= layout.groups else np.maximum(maxima, _LOWEST)
        place = highest.shape[1] - count
        highest.partition(place, 1)
        bounds = highest[:, place]
        np.greater_equal(maxima, bounds[:, None], out=self._is_found)
        found = self._is_found.ravel().nonzero()[0]
        owners = found // layout.width
        columns = found - owners * layout.width
        logits = layout.logits(rows, owners, columns)
        at = (logits >= bounds[owners][:, None]).ravel().nonzero()[0]
        column = at // LINES
        lines = owners[column]
        ids = columns[column] + layout.offsets[at - column * LINES]
        return TopTokens(lines, ids, logits.ravel()[at], lines.searchsorted(_numbers(n_rows + 1)), bounds, groups)


def _find_in_whole_rows(rows: Rows, count: int) -> TopTokens:
    place = rows.shape[1] - count
    bounds = np.maximum(np.partition(rows, place, axis=1)[:, place], _LOWEST)
    lines, ids = (rows >= bounds[:, None]).nonzero()
    return TopTokens(lines, ids, rows[lines, ids], lines.searchsorted(_numbers(len(rows) + 1)), bounds, None)


@lru_cache(64)
def _numbers(count: int) -> TokenIds:
    return np.arange(count)
