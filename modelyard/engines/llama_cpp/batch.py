"""The planner of one step: which rows of which sequences go into the next decode. Pure.

Sequences that generate come first, one row each: a stream never waits longer than one step. What is left of the
micro-batch goes to prompts, in the order they came, so that a long prompt is read in slices between tokens; and then to
guessed tokens, one row each behind the stream's own. Rows are ordered by sequence: the engine computes neighbouring
sequences together, and as many rows of each as all of them have, so guesses are of one length.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from math import inf
from typing import Any

from msgspec import Struct

from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.numpy_sampler import BatchSampler
from modelyard.engines.llama_cpp.sequences import SequenceSlot


class SequenceWork(Struct, frozen=True):
    """A sequence with work: `pending` tokens to read (1 while it generates). `arrived` orders the prompts; `guessed`
    tokens may be read behind a stream's own."""

    sequence: int
    pending: int
    generating: bool
    arrived: int
    guessed: int = 0
    most: int = 1 << 30  # of a prompt, before it is to pause


class BatchSlice(Struct, frozen=True):
    """Read `count` of the sequence's pending tokens, and `guessed` behind them; `last` when nothing stays pending."""

    sequence: int
    count: int
    last: bool
    guessed: int = 0


def next_adapters(sets: Iterable[Hashable], last: Hashable) -> Any:
    """Whose turn it is of the adapter sets that jobs ask for, oldest job first: the one after the last, in a ring. New
    ones join at the end, so nobody is passed over for ever."""
    order = list(dict.fromkeys(sets))
    return order[(order.index(last) + 1) % len(order)] if last in order else order[0]


def plan_batch(needs: Sequence[SequenceWork], budget: int) -> list[BatchSlice]:
    streams = [need for need in needs if need.generating]
    room = budget - sum(need.pending for need in streams)
    # One row at least: streams as many as the budget must not keep prompts waiting until one of them ends.
    slices = _prompts([need for need in needs if not need.generating], max(1, room))
    guessed = _level([need.guessed for need in streams], room - sum(piece.count for piece in slices))
    slices += [BatchSlice(need.sequence, need.pending, True, rows) for need, rows in zip(streams, guessed, strict=True)]
    return sorted(slices, key=lambda piece: piece.sequence)


def _prompts(needs: list[SequenceWork], rows: int) -> list[BatchSlice]:
    slices = []
    for need in sorted(needs, key=lambda n: n.arrived):
        count = min(need.pending, need.most, rows)
        if count > 0:
            slices.append(BatchSlice(need.sequence, count, count == need.pending))
            rows -= count
    return slices


def _level(wanted: Sequence[int], rows: int) -> list[int]:
    """Guesses of one length, the one that lets most tokens be tried; shorter ones are let go."""
    if not any(wanted):
        return [0] * len(wanted)
    _, least = max((length * sum(n >= length for n in wanted), length) for length in set(wanted))
    length = min(least, max(0, rows) // sum(n >= least for n in wanted))
    return [length if n >= least else 0 for n in wanted]


# The jobs of a cache while all of them speak, one token each a step: what stays the same from one step to the next.
#
# On a fast GPU a step takes less than a millisecond, and the GPU stands still from the moment a token is known until the
# next step is given to it. So whatever can be known before is known here: what would end one of them, and when to stop.


class DecodeBatch:
    """Belongs to the engine's thread. It holds for as long as nobody comes or goes, and each says one token a step.

    `is_plain`: each says just what is drawn, and nobody asks for more; `takes_the_best`: and that is the likeliest;
    `throw`: or it can be drawn for all of them together.
    """

    def __init__(self, jobs: Mapping[int, LlamaCppJob], slots: Sequence[SequenceSlot]) -> None:
        self.jobs = jobs  # by sequence, in order
        self.singers = tuple(jobs.values())
        self._held = [(slots[index], job) for index, job in jobs.items()]
        self.is_plain = all(job.is_plain for job in self.singers)
        self.takes_the_best = all(job.takes_the_best for job in self.singers)
        self.throw = _throw(self.singers) if self.is_plain else None
        self._stops = frozenset[int]().union(*(job.stops for job in self.singers))
        self.look_ahead()
        self._deadline = min((job.prompt.deadline or inf for job in self.singers), default=inf)

    def __len__(self) -> int:
        return len(self.singers)

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Whether one of them ends when each has said its token."""
        return self._is_last or not self._stops.isdisjoint(tokens)

    @property
    def is_disturbed(self) -> bool:
        """Somebody was cancelled or is late: the next step is not as this one."""
        for job in self.singers:  # a generator costs as much as all the rest
            if job.cancelled:
                return True
        return self._deadline is not inf and time.time() >= self._deadline

    def say(self, tokens: Sequence[int]) -> None:
        """Write down what was said; what was said before it is in the KV by now."""
        for job, token in zip(self.singers, tokens, strict=True):
            job.say(token)
        self.look_ahead()

    def look_ahead(self) -> None:
        """Whether one of them may say one token more only: to be asked whenever they have said something."""
        self._is_last = any(job.length + 1 >= job.limit for job in self.singers)

    def hold(self) -> None:
        """Each sequence holds all that its job has done."""
        now = time.time()
        for slot, job in self._held:
            slot.tokens, slot.at = job.held, now


def _throw(jobs: Sequence[LlamaCppJob]) -> BatchSampler | None:
    dice = [job.chain.dice for job in jobs if job.chain.dice is not None and job.chain.dice.top_k]
    return BatchSampler(dice) if len(dice) == len(jobs) > 1 else None
