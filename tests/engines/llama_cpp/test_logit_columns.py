"""The most likely tokens of several rows, found through the maxima of columns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from modelyard.engines.llama_cpp import logit_columns
from modelyard.engines.llama_cpp.logit_columns import ColumnSearch, Rows, columns_of


def logits(vocab: int, rows: int = 5, seed: int = 1) -> Rows:
    return np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32)


@pytest.mark.parametrize("vocab", [50, 8_191, 8_192, 9_001, 32_000, 50_257, 128_256])
def test_the_top_of_several_rows_is_that_of_each(vocab: int) -> None:
    rows = logits(vocab)
    rows[1, : vocab // 2] = -np.inf
    rows[2, 7::16] = rows[2].max()  # ties
    top = ColumnSearch().find(rows, 40)
    assert len(set(zip(top.lines.tolist(), top.ids.tolist(), strict=True))) == len(top.ids), "no token twice"
    assert (rows[top.lines, top.ids] == top.logits).all()
    assert top.borders.tolist() == [int((top.lines < line).sum()) for line in range(len(rows) + 1)]
    for line, row in enumerate(rows):
        found = top.ids[top.lines == line]
        assert set(found) == set(np.flatnonzero(row >= top.bounds[line])), "all that reach the bound"
        assert len(found) >= min(40, int(np.isfinite(row).sum()))


@pytest.mark.parametrize("count", [1, 100, 2_000, 5_000, 10_000])
def test_any_number_of_tokens_is_found(count: int) -> None:
    rows = logits(9_001, rows=2)
    top = ColumnSearch().find(rows, count)
    for line, row in enumerate(rows):
        best = np.argsort(-row)[:count]
        assert set(best) <= set(top.ids[top.lines == line])


def test_hardly_more_tokens_are_found_than_are_asked_for() -> None:
    top = ColumnSearch().find(logits(128_256), 48)
    assert max(np.diff(top.borders)) < 80


@pytest.mark.parametrize("vocab", [9_001, 32_000])
def test_the_maximum_of_a_group_is_that_of_its_tokens(vocab: int) -> None:
    rows, layout = logits(vocab), columns_of(vocab)
    top = ColumnSearch().find(rows, 40)
    assert top.groups is not None
    assert (top.groups.max(1) == rows.max(1)).all()
    columns = np.full((layout.width * 32,), -np.inf, np.float32)
    columns[:vocab] = rows[0]
    lines = [columns[at : at + layout.width] for at in range(0, 31 * layout.width, layout.width)]
    last = np.full(layout.width, -np.inf, np.float32)
    last[layout.short :] = rows[0, 31 * layout.width :]
    maxima = np.max([*lines, last], axis=0)
    assert (top.groups[0] == maxima.reshape(8, -1).max(0)).all()


def test_memory_is_used_again_for_other_rows() -> None:
    search = ColumnSearch()
    for rows in (logits(32_000), logits(32_000, seed=2), logits(32_000, rows=2), logits(128_256)):
        top = search.find(rows, 10)
        assert all(set(np.argsort(-row)[:10]) <= set(top.ids[top.lines == line]) for line, row in enumerate(rows))


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_does_not_affect_others(broken: float) -> None:
    rows = logits(9_001)
    rows[2] = broken
    top = ColumnSearch().find(rows, 40)
    for line in (0, 1, 3, 4):
        assert set(np.argsort(-rows[line])[:40]) <= set(top.ids[top.lines == line])


def test_threads_that_share_the_rows_find_what_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = logits(9_001, rows=40)
    alone = ColumnSearch().find(rows, 40)
    with ThreadPoolExecutor(3) as pool:
        monkeypatch.setattr(logit_columns, "_SHARE", 9_001)
        monkeypatch.setattr(logit_columns, "_threads", lambda: (4, pool))
        shared = ColumnSearch().find(rows, 40)
        assert logit_columns.best_tokens(rows) == rows.argmax(1).tolist()
        parts: list[slice] = []
        logit_columns.for_rows(40, rows.size, parts.append)
    assert (shared.ids == alone.ids).all()
    assert (shared.lines == alone.lines).all()
    assert sorted(range(40)) == sorted(row for part in parts for row in range(40)[part])
    assert len(parts) == 4
