"""Which sequence of a cache takes a prompt, and how much of its KV can stay. Pure.

In this order, among those that are idle:

    1. the sequence of the same session
    2. one that the prompt continues: all it holds is a prefix of the prompt; or, where nobody's session is lost by it,
       most of what it holds, or all but the answer to this very prompt
    3. an empty one (the lowest: neighbours are computed together)
    4. the least recently used one of background work
    5. the least recently used one

A prefix counts token by token, and only under the same adapters: KV is never shared on trust.

Where another sequence holds more of the prompt, its KV may be copied, which takes one of two ways:

    stream   inside a context: all that the sequence has room for, at memory speed, with the next decode
    state    between any two that are alike: what it holds, taken out and put in, each at memory speed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from modelyard.core.request import Priority

# Where a sequence that cannot go back can be taken up again: bounded copies of its state at chosen places. Pure.
#
# A recurrent model keeps one state, which stands at its newest token, and a sliding window throws away what lies behind
# it. So what such a sequence was is kept at
#
#     the end of what it held       when the next turn begins: an edited last message starts from there
#     a little before a prompt ends the next turn may tell the answer in other words, or the same prompt comes again
#     where two prompts part        that is where a shared system prompt ends

MIN_DISTANCE = 32  # tokens: reading fewer again costs less than a copy
_TAIL = 8  # what a template writes to open an answer, and does not write the same into the history


class Checkpoint(Struct, frozen=True):
    """A sequence after its first `tokens` tokens: `data` is what of its state cannot be got by cutting."""

    tokens: int
    data: Any  # a numpy array of bytes

    @property
    def size(self) -> int:
        return int(self.data.nbytes)


Checkpoints = tuple[Checkpoint, ...]  # of one sequence, in the order of their tokens


class CheckpointLimits(Struct, frozen=True):
    """What one sequence may keep."""

    count: int
    size: int


def latest_checkpoint(held: Checkpoints, keep: int) -> Checkpoint | None:
    """The last one that holds nothing beyond the first `keep` tokens."""
    return next((one for one in reversed(held) if one.tokens <= keep), None)


def checkpoints_within(held: Checkpoints, keep: int) -> Checkpoints:
    """What stays true of a sequence that is cut to `keep` tokens."""
    return tuple(one for one in held if one.tokens <= keep)


def is_checkpoint_useful(held: Checkpoints, tokens: int) -> bool:
    """Whether one more, after so many tokens, saves more than a few of them."""
    return tokens >= MIN_DISTANCE and all(abs(tokens - one.tokens) >= MIN_DISTANCE for one in held)


def add_checkpoint(held: Checkpoints, new: Checkpoint, bound: CheckpointLimits) -> Checkpoints:
    """With the new one, within the bound: of the others the one goes whose loss costs the fewest tokens."""
    if bound.count < 1 or new.size > bound.size:
        return held
    kept = [*checkpoints_within(held, new.tokens - 1), new]
    while len(kept) > bound.count or sum(one.size for one in kept) > bound.size:
        gaps = [later - earlier for earlier, later in pairwise([0, *(one.tokens for one in kept)])]
        kept.pop(gaps.index(min(gaps[:-1])))
    return tuple(kept)


def checkpoint_positions(length: int, start: int, partings: Iterable[int], held: Checkpoints) -> list[int]:
    """Where to pause while a prompt of `length` tokens is read from `start` on, in order. `partings` are where it
    leaves what other sequences hold."""
    found: list[int] = []
    taken = [start, *(one.tokens for one in held)]
    for place in sorted({length - _TAIL, *partings}):
        if (
            start < place < length
            and place >= MIN_DISTANCE
            and all(abs(place - other) >= MIN_DISTANCE for other in taken)
        ):
            found.append(place)
            taken.append(place)
    return found


Ids = npt.NDArray[np.int32]
AdapterSet = tuple[tuple[str, float], ...]
CopyMethod = Literal["stream", "state"]
_MOSTLY = 0.5
_WORTH = 256  # tokens: for fewer nobody's step is made longer by a copy


class SequenceSlot(Struct):
    """What one sequence holds. `tokens` is exactly what its KV was computed from."""

    index: int
    tokens: Ids
    asked: int = 0  # how long the prompt was that came last; what follows is the answer to it
    session: str | None = None
    adapters: AdapterSet = ()
    priority: Priority = "main"
    used: int = 0  # a counter, not a clock: the higher, the more recent
    busy: bool = False
    at: float | None = None  # unix time of its last step
    checkpoints: Checkpoints = ()
    file: str | None = None  # of the same conversation; it holds the first `saved` tokens, 0 where they have changed
    saved: int = 0


class KvHolder(Protocol):
    """What holds KV: a sequence, or a conversation that was taken out of one."""

    @property
    def tokens(self) -> Ids: ...
    @property
    def adapters(self) -> AdapterSet: ...
    @property
    def checkpoints(self) -> Checkpoints: ...


class SequenceChoice(Struct, frozen=True):
    """`keep` tokens stay; `evicted` says that somebody else's conversation is lost by it."""

    index: int
    keep: int
    evicted: bool = False


def common_prefix(a: Ids, b: Ids) -> int:
    """How many tokens two runs share from the start."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def choose_sequence(
    slots: Sequence[SequenceSlot], prompt: Ids, session: str | None, adapters: AdapterSet = ()
) -> SequenceChoice:
    """At least one slot must be idle: the scheduler hands out no more leases than there are slots."""
    idle = [slot for slot in slots if not slot.busy]
    shared = {slot.index: common_prefix(slot.tokens, prompt) if slot.adapters == adapters else 0 for slot in idle}
    if session is not None:
        own = [slot for slot in idle if slot.session == session]
        if own:
            best = max(own, key=lambda slot: shared[slot.index])
            return SequenceChoice(best.index, shared[best.index])
    near = [slot for slot in idle if len(slot.tokens) and _continues(slot, prompt, shared[slot.index], session)]
    if near:
        best = max(near, key=lambda slot: (shared[slot.index], slot.used))
        return SequenceChoice(best.index, shared[best.index])
    return _other(idle, shared)


def _continues(slot: SequenceSlot, prompt: Ids, shared: int, session: str | None) -> bool:
    """Agents share long system prompts: having most of one in common does not make it the same conversation."""
    if shared == len(slot.tokens):
        return True
    if slot.session is not None or session is not None:
        return False
    return shared >= _MOSTLY * len(slot.tokens) or shared == slot.asked == len(prompt)


def _other(idle: list[SequenceSlot], shared: dict[int, int]) -> SequenceChoice:
    empty = [slot for slot in idle if not len(slot.tokens)]
    if empty:
        return SequenceChoice(min(slot.index for slot in empty), 0)
    oldest = min(idle, key=lambda slot: (slot.priority != "background", slot.used))
    return SequenceChoice(oldest.index, shared[oldest.index], evicted=True)


# --- copies -----------------------------------------------------------------------------------------------------------


class CopyCosts(Struct):
    """Seconds, as far as they were measured: of reading one token, and of moving one byte of KV."""

    token: float = 1e-4
    byte: float = 5e-10


def reusable_tokens(held: KvHolder, prompt: Ids, adapters: AdapterSet, *, can_cut: bool) -> int:
    """For how many of the prompt's tokens this KV can stand: all that it shares, or where it cannot be cut there, up to
    the last place where it can be taken up again."""
    if held.adapters != adapters:
        return 0
    shared = common_prefix(held.tokens, prompt)
    if can_cut or shared == len(held.tokens):
        return shared
    found = latest_checkpoint(held.checkpoints, shared)
    return found.tokens if found is not None else 0


def choose_copy_method(
    saved: int, size: int, held: int, window: int, costs: CopyCosts, ways: Sequence[CopyMethod]
) -> CopyMethod | None:
    """How to copy a sequence of `held` tokens in `size` bytes, where that is cheaper than reading the `saved` ones."""
    moved = {"stream": size * window / max(1, held), "state": 2.0 * size}
    best = min(ways, key=lambda one: moved[one], default=None)
    return best if best is not None and is_copy_worthwhile(saved, moved[best], costs) else None


def is_copy_worthwhile(saved: int, moved: float, costs: CopyCosts) -> bool:
    return saved >= _WORTH and moved * costs.byte < saved * costs.token


def is_intact(oldest: int, newest: int, keep: int, *, n_swa: int, only_forward: bool) -> bool:
    """Does a sequence that was cut to `keep` tokens hold all that the next token looks at? `oldest` and `newest` are
    the positions it has, -1 where it has none.

    A sliding window of `n_swa` has thrown away what lies behind it; a model that only goes forward (recurrent, hybrid)
    keeps one state, which stands at its newest token.
    """
    if newest != keep - 1:
        return False
    if only_forward and not n_swa:
        return True
    return 0 <= oldest <= (max(0, keep - n_swa) if n_swa else 0)
