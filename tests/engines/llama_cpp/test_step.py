"""The planner of a step: a table, and what holds for any set of needs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.engines.llama_cpp.batch import BatchSlice, SequenceWork, plan_batch


@pytest.mark.parametrize(
    ("needs", "budget", "expected"),
    [
        pytest.param([], 8, [], id="nothing to do"),
        pytest.param([SequenceWork(0, 5, False, 1)], 8, [BatchSlice(0, 5, True)], id="a short prompt at once"),
        pytest.param([SequenceWork(0, 20, False, 1)], 8, [BatchSlice(0, 8, False)], id="a long one in slices"),
        pytest.param(
            [SequenceWork(0, 20, False, 1), SequenceWork(1, 1, True, 0)],
            8,
            [BatchSlice(0, 7, False), BatchSlice(1, 1, True)],
            id="a stream comes before a prompt",
        ),
        pytest.param(
            [SequenceWork(0, 9, False, 2), SequenceWork(1, 5, False, 1)],
            8,
            [BatchSlice(0, 3, False), BatchSlice(1, 5, True)],
            id="the earlier prompt comes first, rows stay ordered by sequence",
        ),
        pytest.param(
            [SequenceWork(0, 1, True, 1), SequenceWork(1, 1, True, 2), SequenceWork(2, 9, False, 3)],
            2,
            [BatchSlice(0, 1, True), BatchSlice(1, 1, True), BatchSlice(2, 1, False)],
            id="streams that fill the budget do not starve a prompt",
        ),
        pytest.param(
            [SequenceWork(0, 1, True, 1, guessed=4)],
            8,
            [BatchSlice(0, 1, True, 4)],
            id="what is guessed is read behind the stream",
        ),
        pytest.param(
            [SequenceWork(0, 1, True, 1, guessed=4)], 3, [BatchSlice(0, 1, True, 2)], id="as far as there is room"
        ),
        pytest.param(
            [SequenceWork(0, 1, True, 1, guessed=4), SequenceWork(1, 9, False, 2)],
            8,
            [BatchSlice(0, 1, True), BatchSlice(1, 7, False)],
            id="what is certain comes first",
        ),
        pytest.param(
            [
                SequenceWork(0, 1, True, 1, guessed=4),
                SequenceWork(1, 1, True, 2, guessed=3),
                SequenceWork(2, 1, True, 3),
            ],
            16,
            [BatchSlice(0, 1, True, 3), BatchSlice(1, 1, True, 3), BatchSlice(2, 1, True)],
            id="guesses are of one length",
        ),
        pytest.param(
            [SequenceWork(0, 1, True, 1, guessed=8), SequenceWork(1, 1, True, 2, guessed=1)],
            16,
            [BatchSlice(0, 1, True, 8), BatchSlice(1, 1, True)],
            id="a short guess does not cut a long one",
        ),
    ],
)
def test_plan(needs: list[SequenceWork], budget: int, expected: list[BatchSlice]) -> None:
    assert plan_batch(needs, budget) == expected


NEEDS = st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(0, 8)), max_size=8).map(
    lambda rows: [
        SequenceWork(i, 1 if streams else n, streams, i, g * streams) for i, (n, streams, g) in enumerate(rows)
    ]
)


@given(NEEDS, st.integers(1, 32))
def test_every_stream_moves_the_budget_is_kept_and_somebody_is_read(needs: list[SequenceWork], budget: int) -> None:
    slices = plan_batch(needs, budget)
    by_sequence = {piece.sequence: piece for piece in slices}
    streams = [need for need in needs if need.generating]
    prompts = [need for need in needs if not need.generating]
    assert all(by_sequence[need.sequence].count == 1 and by_sequence[need.sequence].last for need in streams)
    assert sum(piece.count + piece.guessed for piece in slices) <= max(budget, len(streams) + 1)
    assert all(piece.guessed <= needs[piece.sequence].guessed for piece in slices)
    assert len({piece.guessed for piece in slices if piece.guessed}) <= 1
    assert not prompts or min(prompts, key=lambda need: need.arrived).sequence in by_sequence
    assert [piece.sequence for piece in slices] == sorted(by_sequence)
    for piece in slices:
        assert 0 < piece.count <= needs[piece.sequence].pending
        assert piece.last == (piece.count == needs[piece.sequence].pending)


@given(NEEDS, st.integers(1, 32))
def test_prompts_are_all_read_in_the_end(needs: list[SequenceWork], budget: int) -> None:
    pending = {need.sequence: need.pending for need in needs if not need.generating}
    steps = 0
    while pending:
        left = [
            SequenceWork(n.sequence, pending.get(n.sequence, 1), n.sequence not in pending, n.arrived) for n in needs
        ]
        for piece in plan_batch(left, budget):
            if piece.sequence in pending:
                pending[piece.sequence] -= piece.count
        pending = {sequence: count for sequence, count in pending.items() if count}
        steps += 1
        assert steps <= sum(need.pending for need in needs)


def test_a_prompt_pauses_where_it_is_told_and_is_not_done_then() -> None:
    needs = [SequenceWork(0, 40, False, 1, most=10), SequenceWork(1, 40, False, 2)]
    assert plan_batch(needs, 32) == [BatchSlice(0, 10, False), BatchSlice(1, 22, False)]
    assert plan_batch([SequenceWork(0, 10, False, 1, most=10)], 32) == [BatchSlice(0, 10, True)]
