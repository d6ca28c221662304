"""Which sequence of a cache takes a prompt, how much of its KV stays, and which of its states are kept. Pure.

The first match among the idle sequences:

    1. the sequence of the same session
    2. one that the prompt continues: all its tokens are a prefix of the prompt; or, if no session is involved, most of
       them are, or all but the answer to this very prompt
    3. an empty one (the lowest: neighbouring sequences are computed together)
    4. the least recently used one of background work
    5. the least recently used one

A prefix counts token by token (images: `media_tokens.py`), and only with the same adapters in the same scope
(`Prompt.scope`): a client must not learn from its own reuse what another one has sent.

Behind the prefix a prompt may continue with a later part of what the sequence holds, if something between them was
removed. With `cache_reuse` such blocks move to their new positions (`moved_blocks`); they count like the prefix.

If another sequence holds more of the prompt, its KV may be copied:

    stream   inside a context: the sequence's whole buffer, at memory speed, with the next decode
    state    between any two with the same layout: what it holds, read and written, each at memory speed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from modelyard.core.request import Priority
from modelyard.engines.llama_cpp.media_tokens import whole_chunks

TokenIds = npt.NDArray[np.int32]
AdapterSet = tuple[tuple[str, float], ...]  # name and scale
CopyMethod = Literal["stream", "state"]

_MOSTLY = 0.5
_MIN_COPY = 256  # tokens: a copy makes other jobs' next step longer


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


class SequenceChoice(Struct, frozen=True):
    """`keep` tokens stay; with `evicted` another conversation is lost."""

    index: int
    keep: int
    evicted: bool = False


def common_prefix(a: TokenIds, b: TokenIds) -> int:
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def shared_prefix(holder: KvHolder, prompt: TokenIds, adapters: AdapterSet, scope: str) -> int:
    """How many tokens of this KV the prompt could use: no part of an image."""
    if (holder.scope, holder.adapters) != (scope, adapters):
        return 0
    return whole_chunks(prompt, common_prefix(holder.tokens, prompt))


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


def covered_tokens(
    slot: SequenceSlot, prompt: TokenIds, adapters: AdapterSet, scope: str = "", cache_reuse: int = 0
) -> int:
    """The shared prefix, and the blocks behind it that can be moved."""
    shared = shared_prefix(slot, prompt, adapters, scope)
    return shared + sum(block.count for block in moved_blocks(slot.tokens, prompt, shared, cache_reuse))


def choose_sequence(
    slots: Sequence[SequenceSlot],
    prompt: TokenIds,
    session: str | None,
    adapters: AdapterSet = (),
    scope: str = "",
    cache_reuse: int = 0,
) -> SequenceChoice:
    """At least one slot must be idle: the scheduler hands out no more leases than there are slots."""
    idle = [slot for slot in slots if not slot.busy]
    shared = {slot.index: covered_tokens(slot, prompt, adapters, scope, cache_reuse) for slot in idle}
    if session is not None:
        own = [slot for slot in idle if slot.session == session]
        if own:
            best = max(own, key=lambda slot: shared[slot.index])
            return SequenceChoice(best.index, shared[best.index])
    continued = [slot for slot in idle if len(slot.tokens) and _continues(slot, prompt, shared[slot.index], session)]
    if continued:
        best = max(continued, key=lambda slot: (shared[slot.index], slot.use_order))
        return SequenceChoice(best.index, shared[best.index])
    empty = [slot for slot in idle if not len(slot.tokens)]
    if empty:
        return SequenceChoice(min(slot.index for slot in empty), 0)
    oldest = min(idle, key=lambda slot: (slot.priority != "background", slot.use_order))
    return SequenceChoice(oldest.index, shared[oldest.index], evicted=True)


def _continues(slot: SequenceSlot, prompt: TokenIds, shared: int, session: str | None) -> bool:
    """Agents share long system prompts: a long common prefix does not make it the same conversation."""
    if shared == len(slot.tokens):
        return True
    if slot.session is not None or session is not None:
        return False
    return shared >= _MOSTLY * len(slot.tokens) or shared == slot.prompt_length == len(prompt)


# --- copies -----------------------------------------------------------------------------------------------------------


class CopyCosts(Struct):
    """Seconds to evaluate one token and to move one byte of KV, as far as they were measured."""

    token: float = 1e-4
    byte: float = 5e-10


def reusable_tokens(
    holder: KvHolder, prompt: TokenIds, adapters: AdapterSet, scope: str = "", *, can_rewind: bool
) -> int:
    """How many of the prompt's tokens this KV covers: the shared prefix, or the last checkpoint in it."""
    shared = shared_prefix(holder, prompt, adapters, scope)
    if can_rewind or shared == len(holder.tokens):
        return shared
    checkpoint = latest_checkpoint(holder.checkpoints, shared)
    return checkpoint.tokens if checkpoint is not None else 0


def choose_copy_method(
    saved: int, size: int, held: int, window: int, costs: CopyCosts, methods: Sequence[CopyMethod]
) -> CopyMethod | None:
    """How to copy a sequence of `held` tokens in `size` bytes; None if evaluating the `saved` tokens is cheaper."""
    moved = {"stream": size * window / max(1, held), "state": 2.0 * size}
    best = min(methods, key=lambda method: moved[method], default=None)
    return best if best is not None and is_copy_worthwhile(saved, moved[best], costs) else None


def is_copy_worthwhile(saved: int, moved: float, costs: CopyCosts) -> bool:
    return saved >= _MIN_COPY and moved * costs.byte < saved * costs.token


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
