"""The planner of a step: a table, and what holds for any set of needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.engines.llama_cpp.step import Need, Slice, plan


@pytest.mark.parametrize(
    ("needs", "budget", "expected"),
    [
        pytest.param([], 8, [], id="nothing to do"),
        pytest.param([Need(0, 5, False, 1)], 8, [Slice(0, 5, True)], id="a short prompt at once"),
        pytest.param([Need(0, 20, False, 1)], 8, [Slice(0, 8, False)], id="a long one in slices"),
        pytest.param(
            [Need(0, 20, False, 1), Need(1, 1, True, 0)],
            8,
            [Slice(0, 7, False), Slice(1, 1, True)],
            id="a stream comes before a prompt",
        ),
        pytest.param(
            [Need(0, 9, False, 2), Need(1, 5, False, 1)],
            8,
            [Slice(0, 3, False), Slice(1, 5, True)],
            id="the earlier prompt comes first, rows stay ordered by sequence",
        ),
        pytest.param(
            [Need(0, 1, True, 1), Need(1, 1, True, 2), Need(2, 9, False, 3)],
            2,
            [Slice(0, 1, True), Slice(1, 1, True), Slice(2, 1, False)],
            id="streams that fill the budget do not starve a prompt",
        ),
    ],
)
def test_plan(needs: list[Need], budget: int, expected: list[Slice]) -> None:
    assert plan(needs, budget) == expected


NEEDS = st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=8).map(
    lambda rows: [Need(i, 1 if streams else n, streams, i) for i, (n, streams) in enumerate(rows)]
)


@given(NEEDS, st.integers(1, 32))
def test_every_stream_moves_the_budget_is_kept_and_somebody_is_read(needs: list[Need], budget: int) -> None:
    slices = plan(needs, budget)
    by_sequence = {piece.sequence: piece for piece in slices}
    streams = [need for need in needs if need.generating]
    prompts = [need for need in needs if not need.generating]
    assert all(by_sequence[need.sequence] == Slice(need.sequence, 1, True) for need in streams)
    assert sum(piece.count for piece in slices) <= max(budget, len(streams) + 1)
    assert not prompts or min(prompts, key=lambda need: need.arrived).sequence in by_sequence
    assert [piece.sequence for piece in slices] == sorted(by_sequence)
    for piece in slices:
        assert 0 < piece.count <= needs[piece.sequence].pending
        assert piece.last == (piece.count == needs[piece.sequence].pending)


@given(NEEDS, st.integers(1, 32))
def test_prompts_are_all_read_in_the_end(needs: list[Need], budget: int) -> None:
    pending = {need.sequence: need.pending for need in needs if not need.generating}
    steps = 0
    while pending:
        left = [Need(n.sequence, pending.get(n.sequence, 1), n.sequence not in pending, n.arrived) for n in needs]
        for piece in plan(left, budget):
            if piece.sequence in pending:
                pending[piece.sequence] -= piece.count
        pending = {sequence: count for sequence, count in pending.items() if count}
        steps += 1
        assert steps <= sum(need.pending for need in needs)
