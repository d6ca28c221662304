"""Which sequence of a cache takes a prompt, how much of its KV stays, and which of its states are kept. Pure.

All KV of a cache is one tree of prefixes (`prefix_order`). Its roots are the scopes, an API key (`Prompt.scope`) and
adapters each: a client must not learn from its own reuse what another one has sent. Its leaves hold KV:

    live     a sequence of the context: a prompt goes on in it, or copies it
    parked   a copy in RAM of what a sequence lost, or of what a file held when the model was loaded (`kv_store`)
    stored   a file that had no room in RAM then; it is parked, on another thread, before a prompt goes on with it

A prompt reads what it does not share with the leaf that has its longest prefix, token by token (no part of an image,
`media_tokens.py`). It is computed in the idle sequence that costs least, in tokens:

    cost = what it must read again, or the time of a copy, if the longest prefix is elsewhere
         + the tail that the sequence loses, beyond what the prompt and other leaves hold

    no tail   empty; a state that another leaf continues; the answer to this prompt, or one that it spells differently
    a tail    weighs a quarter, because it may never come back; less the longer it was not used, if none is empty;
              and an eighth of that if it is of background work
    equal     the sequence of the same session (a header, `prompt_cache_key`, `user_id`), then the most recent, then
              the lowest. A session decides nothing else: clients give one name to several conversations

A lost tail that costs more to read again than to copy is parked first, within `parked_mb`, if that does not delay the
prompt for long (`CopyTime`). While nothing runs, what the next new conversation would overwrite is parked ahead.

A prompt of which another job is reading a prefix at the moment waits for it and goes on from a copy, if that costs less
than reading it, too: what arrives together is read once.

Behind the prefix a prompt may continue with a later part of what the sequence holds, if something between them was
removed. With `cache_reuse` such blocks move to their new positions (`moved_blocks`). They count like the prefix, but
for the same session only: they are not exactly what reading them gives.

KV is copied by one of two ways:

    stream   inside a context: the sequence's whole buffer, at memory speed, with the next decode
    state    between any two with the same layout: what it holds, read and written, each at memory speed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import pairwise
from math import inf
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from modelyard.core.request import Priority
from modelyard.engines.llama_cpp.media_tokens import whole_chunks

TokenIds = npt.NDArray[np.int32]
AdapterSet = tuple[tuple[str, float], ...]  # name and scale
CopyMethod = Literal["stream", "state"]

ALL = 1 << 30  # tokens
_WEIGHTS: dict[Priority, float] = {"main": 1 / 4, "background": 1 / 32}  # of a tail that is lost
MIN_COPY = 256  # tokens: a copy makes other jobs' next step longer
# Of reading fewer tokens, by so many decodes: on a CPU five keys on four sequences would read every short prompt again.
_MIN_SAVED_S, _MIN_DECODES = 0.05, 3


# --- checkpoints ------------------------------------------------------------------------------------------------------
#
# A recurrent model keeps one state, at its newest token, and a sliding window drops what is behind it. A sequence of
# such a model can only be rewound to a checkpoint. Checkpoints are taken
#
#     at the end of what it held       when the next turn begins: an edited last message starts from there
#     shortly before a prompt's end    the next turn may spell the answer differently, or the prompt may come again
#     where two prompts diverge        that is where a shared system prompt ends
#     inside a long prompt             at equal distances: an edit in the middle is read again from the last before it

MIN_DISTANCE = 32  # tokens: reading fewer again costs less than a copy
_INNER_DISTANCE = 128  # tokens between two checkpoints inside a prompt, at least
_MICRO_BATCH = 512  # the usual number of tokens that are computed at a time
_TEMPLATE_TAIL = 8  # tokens that a template writes to open an answer, and spells differently in the history


class Checkpoint(Struct, frozen=True):
    """The state of a sequence after its first `tokens` tokens, except for what removing tokens can restore."""

    tokens: int
    data: Any  # a numpy array of bytes

    @property
    def size(self) -> int:
        return int(self.data.nbytes)


Checkpoints = tuple[Checkpoint, ...]  # of one sequence, ordered by their tokens


class CheckpointLimits(Struct, frozen=True):
    """Of one sequence."""

    count: int
    size: int


def latest_checkpoint(checkpoints: Checkpoints, keep: int) -> Checkpoint | None:
    """The last one within the first `keep` tokens."""
    return next((each for each in reversed(checkpoints) if each.tokens <= keep), None)


def checkpoints_within(checkpoints: Checkpoints, keep: int) -> Checkpoints:
    """Those that stay valid when the sequence is cut to `keep` tokens."""
    return tuple(each for each in checkpoints if each.tokens <= keep)


def is_checkpoint_useful(checkpoints: Checkpoints, tokens: int) -> bool:
    """Whether another one after so many tokens would save more than a few tokens."""
    return tokens >= MIN_DISTANCE and all(abs(tokens - each.tokens) >= MIN_DISTANCE for each in checkpoints)


def add_checkpoint(checkpoints: Checkpoints, new: Checkpoint, limits: CheckpointLimits) -> Checkpoints:
    """Adds one within the limits; drops those whose loss costs the fewest tokens."""
    if limits.count < 1 or new.size > limits.size:
        return checkpoints
    kept = [*checkpoints_within(checkpoints, new.tokens - 1), new]
    while len(kept) > limits.count or sum(each.size for each in kept) > limits.size:
        gaps = [later - earlier for earlier, later in pairwise([0, *(each.tokens for each in kept)])]
        kept.pop(gaps.index(min(gaps[:-1])))
    return tuple(kept)


def checkpoint_positions(
    length: int, start: int, divergences: Iterable[int], checkpoints: Checkpoints, inner: int = 0
) -> list[int]:
    """Where to pause while a prompt of `length` tokens is read from `start`, in order. `divergences` are the positions
    at which it leaves what other sequences hold; up to `inner` others are spread over what is read."""
    positions: list[int] = []
    taken = [start, *(each.tokens for each in checkpoints)]
    wanted = [length - _TEMPLATE_TAIL, *divergences]
    for position in [*sorted(set(wanted)), *_spread(start, length, inner)]:
        if position < MIN_DISTANCE or not start < position < length:
            continue
        if all(abs(position - other) >= MIN_DISTANCE for other in taken):
            positions.append(position)
            taken.append(position)
    return sorted(positions)


def _spread(start: int, length: int, count: int) -> range:
    """At most `count` positions at equal distances, of whole micro-batches if that is not much."""
    if count < 1:
        return range(0)
    distance = max(_INNER_DISTANCE, -(-(length - start) // (count + 1)))
    if distance > _MICRO_BATCH:
        distance = -(-distance // _MICRO_BATCH) * _MICRO_BATCH
    return range(start + distance, length, distance)


# --- the choice -------------------------------------------------------------------------------------------------------


class SequenceSlot(Struct):
    """One sequence. `tokens` are exactly those that its KV was computed from."""

    index: int
    tokens: TokenIds
    prompt_length: int = 0  # of the last prompt; the tokens after it are the answer
    session: str | None = None
    adapters: AdapterSet = ()
    scope: str = ""
    priority: Priority = "main"
    use_order: int = 0  # a counter: the higher, the more recent
    busy: bool = False
    last_used: float | None = None  # Unix time of its last step
    checkpoints: Checkpoints = ()
    file: str | None = None  # a snapshot with the first `saved` tokens of the same conversation
    saved: int = 0  # 0 if those tokens have changed
    exact: int = ALL  # tokens whose KV reading gives: before the first block that was moved


class KvHolder(Protocol):
    """A sequence, or a snapshot of one."""

    @property
    def tokens(self) -> TokenIds: ...
    @property
    def adapters(self) -> AdapterSet: ...
    @property
    def scope(self) -> str: ...
    @property
    def checkpoints(self) -> Checkpoints: ...
    @property
    def exact(self) -> int: ...
    @property
    def session(self) -> str | None: ...


class SequenceChoice(Struct, frozen=True):
    """`keep` tokens stay. `lost` tokens are then nowhere else."""

    index: int
    keep: int
    lost: int = 0


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def shared_prefix(
    holder: KvHolder, prompt: TokenIds, adapters: AdapterSet, scope: str, session: str | None = None
) -> int:
    """How many tokens of this KV the prompt could use: no part of an image, and no moved blocks of another session."""
    if (holder.scope, holder.adapters) != (scope, adapters):
        return 0
    most = common_prefix(holder.tokens, prompt)
    if holder.session != session:
        most = min(most, holder.exact)
    return whole_chunks(prompt, most)


class MovedBlock(Struct, frozen=True):
    """`count` tokens of a sequence, from the position `source` on, that the prompt has at `target`."""

    source: int
    target: int
    count: int


def moved_blocks(held: TokenIds, prompt: TokenIds, start: int, least: int) -> list[MovedBlock]:
    """What of the held tokens the prompt goes on with behind its first `start`: blocks of at least `least` tokens, each
    directly behind the one before it in the prompt and further on in what is held. Their KV was computed behind other
    text, so it is not exactly what reading them again would give. An image never moves."""
    blocks: list[MovedBlock] = []
    if least < 1 or not start or (held < 0).any() or (prompt < 0).any():
        return blocks
    source, target = start, start
    while len(held) - source >= least and len(prompt) - target >= least:
        wanted = prompt[target : target + least]
        starts, ends = held[source : len(held) - least + 1], held[source + least - 1 :]
        places = source + np.flatnonzero((starts == wanted[0]) & (ends == wanted[-1]))  # few are left to compare
        found = next((int(at) for at in places if np.array_equal(held[at : at + least], wanted)), None)
        if found is None:
            break
        count = common_prefix(held[found:], prompt[target:])
        blocks.append(MovedBlock(found, target, count))
        source, target = found + count, target + count
    return blocks


def prefix_order(holders: Iterable[KvHolder]) -> list[tuple[KvHolder, int]]:
    """The tree, from left to right: each with the number of tokens that it shares with the one before it. What any
    other one shares with it is what its neighbours do."""
    ordered = sorted(holders, key=lambda each: (each.scope, each.adapters, each.tokens.tobytes()))
    before = [None, *ordered]
    return [(each, _shared(each, last) if last is not None else 0) for last, each in zip(before, ordered, strict=False)]


def _shared(a: KvHolder, b: KvHolder) -> int:
    return common_prefix(a.tokens, b.tokens) if (a.scope, a.adapters) == (b.scope, b.adapters) else 0


def choose_sequence(
    slots: Sequence[SequenceSlot],
    prompt: TokenIds,
    session: str | None,
    adapters: AdapterSet = (),
    scope: str = "",
    cache_reuse: int = 0,
    *,
    parked: Sequence[KvHolder] = (),
    longest: int = 0,
    copy_cost: float = inf,
    can_rewind: bool = True,
    wanted: int | None = None,
) -> SequenceChoice:
    """The cheapest idle sequence, or the one at the place `wanted` if that is idle. `longest` tokens of the prompt are
    in some leaf; to have them in another sequence costs as much as reading `copy_cost` tokens. At least one slot must
    be idle: the scheduler hands out no more leases than there are slots."""
    asked = slots[wanted : wanted + 1] if wanted is not None else ()
    idle = [slot for slot in asked if not slot.busy] or [slot for slot in slots if not slot.busy]
    kept = {slot.index: reusable_tokens(slot, prompt, adapters, scope, session, can_rewind=can_rewind) for slot in idle}
    for slot in idle:
        if cache_reuse and slot.session == session:
            kept[slot.index] += sum(it.count for it in moved_blocks(slot.tokens, prompt, kept[slot.index], cache_reuse))
    longest = max(longest, *kept.values())
    is_full = all(len(slot.tokens) for slot in idle)
    elsewhere = _held_elsewhere(slots, parked) if is_full else {}
    newest = max((slot.use_order for slot in slots), default=0)

    def lost(slot: SequenceSlot) -> int:
        tail = lost_tail(slot, prompt, kept[slot.index], session)
        return min(tail, len(slot.tokens) - elsewhere.get(slot.index, 0))

    def cost(slot: SequenceSlot) -> tuple[float, bool, int, int]:
        missing = longest - kept[slot.index]
        weight = _WEIGHTS[slot.priority] / (newest - slot.use_order + 1 if is_full else 1)
        total = min(missing, copy_cost) + lost(slot) * weight
        return total, session is None or slot.session != session, -slot.use_order, slot.index

    best = min(idle, key=cost)
    return SequenceChoice(best.index, kept[best.index], lost(best))


def lost_tail(slot: SequenceSlot, prompt: TokenIds, kept: int, session: str | None = None) -> int:
    """How many of its tokens a sequence loses if the prompt goes on behind the first `kept`. An answer is superseded if
    its prompt comes again, or if it comes back spelled differently, such as without its reasoning."""
    may_continue = session == slot.session or session is None or slot.session is None
    if may_continue and 0 < slot.prompt_length <= len(prompt) + 1 and kept >= slot.prompt_length - _TEMPLATE_TAIL:
        return 0
    return len(slot.tokens) - kept


def _held_elsewhere(slots: Sequence[SequenceSlot], parked: Sequence[KvHolder]) -> dict[int, int]:
    """How much of each sequence another leaf holds."""
    order = prefix_order([*slots, *parked])
    after = [shared for _, shared in order[1:]] + [0]
    return {
        each.index: max(shared, following)
        for (each, shared), following in zip(order, after, strict=True)
        if isinstance(each, SequenceSlot)
    }


def neighbouring_id(own: int, idle: Iterable[int], running: Set[int]) -> int:
    """Which idle id a job should have. llama.cpp computes only sequences with neighbouring ids together: eight that are
    scattered over 64 decode like eight of one each. So gaps between running ones come first, then their edges."""

    def joined(index: int) -> int:
        return (index - 1 in running) + (index + 1 in running)

    return max(idle, key=lambda index: (joined(index), index == own, -index))


# --- copies -----------------------------------------------------------------------------------------------------------


class CopyCosts(Struct):
    """Seconds to evaluate one token, to move one byte of KV to or from RAM, and to copy one inside of a context, as far
    as they were measured: that of a token by the fastest of so many `decodes`."""

    token: float = 1e-4
    byte: float = 5e-10
    stream: float = 5e-10
    decodes: int = 0


def reusable_tokens(
    holder: KvHolder,
    prompt: TokenIds,
    adapters: AdapterSet,
    scope: str = "",
    session: str | None = None,
    *,
    can_rewind: bool,
) -> int:
    """How many of the prompt's tokens this KV covers: the shared prefix, or the last checkpoint in it."""
    shared = shared_prefix(holder, prompt, adapters, scope, session)
    if can_rewind or shared == len(holder.tokens):
        return shared
    checkpoint = latest_checkpoint(holder.checkpoints, shared)
    return checkpoint.tokens if checkpoint is not None else 0


def choose_copy_method(
    saved: int, size: int, held: int, window: int, costs: CopyCosts, methods: Sequence[CopyMethod]
) -> CopyMethod | None:
    """How to copy a sequence of `held` tokens in `size` bytes; None if evaluating the `saved` tokens is cheaper."""
    best = min(methods, key=lambda method: copy_seconds(method, size, held, window, costs), default=None)
    if best is None:
        return None
    moved = copy_seconds(best, size, held, window, costs) / costs.byte
    return best if is_copy_worthwhile(saved, moved, costs) else None


def copy_seconds(method: CopyMethod, size: int, held: int, window: int, costs: CopyCosts) -> float:
    return size * window / max(1, held) * costs.stream if method == "stream" else 2 * size * costs.byte


def is_copy_worthwhile(saved: int, moved: float, costs: CopyCosts) -> bool:
    seconds = saved * costs.token
    is_slow = seconds >= _MIN_SAVED_S and costs.decodes >= _MIN_DECODES
    return (saved >= MIN_COPY or is_slow) and moved * costs.byte < seconds


def is_intact(oldest: int, newest: int, keep: int, *, n_swa: int, only_forward: bool) -> bool:
    """Whether a sequence that was cut to `keep` tokens has all KV that the next token attends to. `oldest` and `newest`
    are its positions, -1 if it has none.

    A sliding window of `n_swa` has dropped what is behind it; a recurrent or hybrid model (`only_forward`) keeps one
    state, at its newest token.
    """
    if newest != keep - 1:
        return False
    if only_forward and not n_swa:
        return True
    return 0 <= oldest <= (max(0, keep - n_swa) if n_swa else 0)
