"""The planner of one step: which rows of which sequences go into the next decode. Pure.

Sequences that generate come first, one row each: a stream never waits longer than one step. What is left of the
micro-batch goes to prompts, in the order they came, so that a long prompt is read in slices between tokens. Rows are
ordered by sequence: the engine computes neighbouring sequences together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from msgspec import Struct


class Need(Struct, frozen=True):
    """A sequence with work: `pending` tokens to read (1 while it generates). `arrived` orders the prompts."""

    sequence: int
    pending: int
    generating: bool
    arrived: int


class Slice(Struct, frozen=True):
    """Read `count` of the sequence's pending tokens; `last` when nothing stays pending after it."""

    sequence: int
    count: int
    last: bool


def turn(sets: Iterable[Hashable], last: Hashable) -> Any:
    """Whose turn it is of the adapter sets that jobs ask for, oldest job first: the one after the last, in a ring. New
    ones join at the end, so nobody is passed over for ever."""
    order = list(dict.fromkeys(sets))
    return order[(order.index(last) + 1) % len(order)] if last in order else order[0]


def plan(needs: Sequence[Need], budget: int) -> list[Slice]:
    slices = [Slice(need.sequence, need.pending, True) for need in needs if need.generating]
    # One row at least: streams as many as the budget must not keep prompts waiting until one of them ends.
    left = max(1, budget - sum(piece.count for piece in slices))
    for need in sorted((n for n in needs if not n.generating), key=lambda n: n.arrived):
        count = min(need.pending, left)
        if count > 0:
            slices.append(Slice(need.sequence, count, count == need.pending))
            left -= count
    return sorted(slices, key=lambda piece: piece.sequence)
