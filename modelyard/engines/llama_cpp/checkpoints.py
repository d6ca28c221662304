"""Where a sequence that cannot go back can be taken up again: bounded copies of its state at chosen places. Pure.

A recurrent model keeps one state, which stands at its newest token, and a sliding window throws away what lies behind
it. So what such a sequence was is kept at

    the end of what it held       when the next turn begins: an edited last message starts from there
    a little before a prompt ends the next turn may tell the answer in other words, or the same prompt comes again
    where two prompts part        that is where a shared system prompt ends
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from msgspec import Struct

APART = 32  # tokens: reading fewer again costs less than a copy
_TAIL = 8  # what a template writes to open an answer, and does not write the same into the history


class Checkpoint(Struct, frozen=True):
    """A sequence after its first `tokens` tokens: `data` is what of its state cannot be got by cutting."""

    tokens: int
    data: Any  # a numpy array of bytes

    @property
    def size(self) -> int:
        return int(self.data.nbytes)


Held = tuple[Checkpoint, ...]  # of one sequence, in the order of their tokens


class Bound(Struct, frozen=True):
    """What one sequence may keep."""

    count: int
    size: int


def before(held: Held, keep: int) -> Checkpoint | None:
    """The last one that holds nothing beyond the first `keep` tokens."""
    return next((one for one in reversed(held) if one.tokens <= keep), None)


def within(held: Held, keep: int) -> Held:
    """What stays true of a sequence that is cut to `keep` tokens."""
    return tuple(one for one in held if one.tokens <= keep)


def is_worth(held: Held, tokens: int) -> bool:
    """Whether one more, after so many tokens, saves more than a few of them."""
    return tokens >= APART and all(abs(tokens - one.tokens) >= APART for one in held)


def added(held: Held, new: Checkpoint, bound: Bound) -> Held:
    """With the new one, within the bound: of the others the one goes whose loss costs the fewest tokens."""
    if bound.count < 1 or new.size > bound.size:
        return held
    kept = [*within(held, new.tokens - 1), new]
    while len(kept) > bound.count or sum(one.size for one in kept) > bound.size:
        gaps = [later - earlier for earlier, later in pairwise([0, *(one.tokens for one in kept)])]
        kept.pop(gaps.index(min(gaps[:-1])))
    return tuple(kept)


def places(length: int, start: int, partings: Iterable[int], held: Held) -> list[int]:
    """Where to pause while a prompt of `length` tokens is read from `start` on, in order. `partings` are where it
    leaves what other sequences hold."""
    found: list[int] = []
    taken = [start, *(one.tokens for one in held)]
    for place in sorted({length - _TAIL, *partings}):
        if start < place < length and place >= APART and all(abs(place - other) >= APART for other in taken):
            found.append(place)
            taken.append(place)
    return found
