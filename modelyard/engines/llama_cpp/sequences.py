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

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from modelyard.core.request import Priority
from modelyard.engines.llama_cpp import checkpoints

Ids = npt.NDArray[np.int32]
Adapters = tuple[tuple[str, float], ...]
Way = Literal["stream", "state"]
_MOSTLY = 0.5
_WORTH = 256  # tokens: for fewer nobody's step is made longer by a copy


class Slot(Struct):
    """What one sequence holds. `tokens` is exactly what its KV was computed from."""

    index: int
    tokens: Ids
    asked: int = 0  # how long the prompt was that came last; what follows is the answer to it
    session: str | None = None
    adapters: Adapters = ()
    priority: Priority = "main"
    used: int = 0  # a counter, not a clock: the higher, the more recent
    busy: bool = False
    at: float | None = None  # unix time of its last step
    checkpoints: checkpoints.Held = ()
    file: str | None = None  # of the same conversation; it holds the first `saved` tokens, 0 where they have changed
    saved: int = 0


class Holder(Protocol):
    """What holds KV: a sequence, or a conversation that was taken out of one."""

    @property
    def tokens(self) -> Ids: ...
    @property
    def adapters(self) -> Adapters: ...
    @property
    def checkpoints(self) -> checkpoints.Held: ...


class Choice(Struct, frozen=True):
    """`keep` tokens stay; `evicted` says that somebody else's conversation is lost by it."""

    index: int
    keep: int
    evicted: bool = False


def common(a: Ids, b: Ids) -> int:
    """How many tokens two runs share from the start."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def choose(slots: Sequence[Slot], prompt: Ids, session: str | None, adapters: Adapters = ()) -> Choice:
    """At least one slot must be idle: the scheduler hands out no more leases than there are slots."""
    idle = [slot for slot in slots if not slot.busy]
    shared = {slot.index: common(slot.tokens, prompt) if slot.adapters == adapters else 0 for slot in idle}
    if session is not None:
        own = [slot for slot in idle if slot.session == session]
        if own:
            best = max(own, key=lambda slot: shared[slot.index])
            return Choice(best.index, shared[best.index])
    near = [slot for slot in idle if len(slot.tokens) and _continues(slot, prompt, shared[slot.index], session)]
    if near:
        best = max(near, key=lambda slot: (shared[slot.index], slot.used))
        return Choice(best.index, shared[best.index])
    return _other(idle, shared)


def _continues(slot: Slot, prompt: Ids, shared: int, session: str | None) -> bool:
    """Agents share long system prompts: having most of one in common does not make it the same conversation."""
    if shared == len(slot.tokens):
        return True
    if slot.session is not None or session is not None:
        return False
    return shared >= _MOSTLY * len(slot.tokens) or shared == slot.asked == len(prompt)


def _other(idle: list[Slot], shared: dict[int, int]) -> Choice:
    empty = [slot for slot in idle if not len(slot.tokens)]
    if empty:
        return Choice(min(slot.index for slot in empty), 0)
    oldest = min(idle, key=lambda slot: (slot.priority != "background", slot.used))
    return Choice(oldest.index, shared[oldest.index], evicted=True)


# --- copies -----------------------------------------------------------------------------------------------------------


class Costs(Struct):
    """Seconds, as far as they were measured: of reading one token, and of moving one byte of KV."""

    token: float = 1e-4
    byte: float = 5e-10


def reach(held: Holder, prompt: Ids, adapters: Adapters, *, can_cut: bool) -> int:
    """For how many of the prompt's tokens this KV can stand: all that it shares, or where it cannot be cut there, up to
    the last place where it can be taken up again."""
    if held.adapters != adapters:
        return 0
    shared = common(held.tokens, prompt)
    if can_cut or shared == len(held.tokens):
        return shared
    found = checkpoints.before(held.checkpoints, shared)
    return found.tokens if found is not None else 0


def way(saved: int, size: int, held: int, window: int, costs: Costs, ways: Sequence[Way]) -> Way | None:
    """How to copy a sequence of `held` tokens in `size` bytes, where that is cheaper than reading the `saved` ones."""
    moved = {"stream": size * window / max(1, held), "state": 2.0 * size}
    best = min(ways, key=lambda one: moved[one], default=None)
    return best if best is not None and pays(saved, moved[best], costs) else None


def pays(saved: int, moved: float, costs: Costs) -> bool:
    return saved >= _WORTH and moved * costs.byte < saved * costs.token


def intact(oldest: int, newest: int, keep: int, *, n_swa: int, only_forward: bool) -> bool:
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
