"""The planner of one step: which rows of which sequences go into the next decode. Pure.

Sequences that generate come first, one row each: a stream never waits longer than one step. What is left of the
micro-batch goes to prompts, in the order they came, so that a long prompt is read in slices between tokens; and then to
guessed tokens, one row each behind the stream's own. Rows are ordered by sequence: the engine computes neighbouring
sequences together, and as many rows of each as all of them have, so guesses are of one length.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from msgspec import Struct


class Need(Struct, frozen=True):
    """A sequence with work: `pending` tokens to read (1 while it generates). `arrived` orders the prompts; `guessed`
    tokens may be read behind a stream's own."""

    sequence: int
    pending: int
    generating: bool
    arrived: int
    guessed: int = 0
    most: int = 1 << 30  # of a prompt, before it is to pause


class Slice(Struct, frozen=True):
    """Read `count` of the sequence's pending tokens, and `guessed` behind them; `last` when nothing stays pending."""

    sequence: int
    count: int
    last: bool
    guessed: int = 0


def turn(sets: Iterable[Hashable], last: Hashable) -> Any:
    """Whose turn it is of the adapter sets that jobs ask for, oldest job first: the one after the last, in a ring. New
    ones join at the end, so nobody is passed over for ever."""
    order = list(dict.fromkeys(sets))
    return order[(order.index(last) + 1) % len(order)] if last in order else order[0]


def plan(needs: Sequence[Need], budget: int) -> list[Slice]:
    streams = [need for need in needs if need.generating]
    room = budget - sum(need.pending for need in streams)
    # One row at least: streams as many as the budget must not keep prompts waiting until one of them ends.
    slices = _prompts([need for need in needs if not need.generating], max(1, room))
    guessed = _level([need.guessed for need in streams], room - sum(piece.count for piece in slices))
    slices += [Slice(need.sequence, need.pending, True, rows) for need, rows in zip(streams, guessed, strict=True)]
    return sorted(slices, key=lambda piece: piece.sequence)


def _prompts(needs: list[Need], rows: int) -> list[Slice]:
    slices = []
    for need in sorted(needs, key=lambda n: n.arrived):
        count = min(need.pending, need.most, rows)
        if count > 0:
            slices.append(Slice(need.sequence, count, count == need.pending))
            rows -= count
    return slices


def _level(wanted: Sequence[int], rows: int) -> list[int]:
    """Guesses of one length, the one that lets most tokens be tried; shorter ones are let go."""
    if not any(wanted):
        return [0] * len(wanted)
    _, least = max((length * sum(n >= length for n in wanted), length) for length in set(wanted))
    length = min(least, max(0, rows) // sum(n >= least for n in wanted))
    return [length if n >= least else 0 for n in wanted]
