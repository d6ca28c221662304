"""The sequences of a named cache: which one takes a job, which KV it keeps, copies or restores, and what is kept of it.

The decisions are pure functions in `sequences.py`; this module executes them. Caches of one layout share a context, so
that their jobs are computed together, and each has its own sequences: no other cache's KV is reused, unless
`share_across_caches` is set.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from math import inf
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.engine import Accepted, CacheInfo, CacheStats, MovedKv, PrefixStats, SequenceStats
from modelyard.core.errors import Conflict, NotFound
from modelyard.engines.llama_cpp import sequences
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.kv_memory import KvMemory, kv_layout
from modelyard.engines.llama_cpp.kv_snapshot import KvSnapshot, StoredKv, hash_session
from modelyard.engines.llama_cpp.loading import uses_gpu
from modelyard.engines.llama_cpp.media_tokens import whole_chunks
from modelyard.engines.llama_cpp.options import ContextLayout, Options
from modelyard.engines.llama_cpp.sequences import (
    ALL,
    AdapterSet,
    Checkpoint,
    CheckpointLimits,
    CopyMethod,
    KvHolder,
    SequenceChoice,
    SequenceSlot,
    TokenIds,
)
from modelyard.telemetry.system import free_memory

_EMPTY: TokenIds = np.zeros(0, np.int32)
_FILE_BYTE_S = 2e-9  # seconds to read one byte of a file and compare its checksum


class CopyTime:
    """How long prompts may wait for KV that is copied out to make room for them. Pure."""

    SHARE, AT_ONCE = 0.1, 0.25  # of all time; seconds

    def __init__(self) -> None:
        self._left, self._at = self.AT_ONCE, 0.0

    def allows(self, seconds: float, now: float) -> bool:
        self._left = min(self.AT_ONCE, self._left + self.SHARE * (now - self._at))
        self._at = now
        return seconds <= self._left

    def took(self, seconds: float) -> None:
        self._left -= seconds


class ParkedKv:
    """Snapshots of conversations in RAM, up to `limit` bytes and `MOST`; the oldest are dropped first. Pure.

    A context has few sequences, and an agent has more conversations: its own, its sub-agents', and background work. A
    parked conversation comes back at memory speed instead of being read again.
    """

    MOST = 256  # each prompt is compared with all of them

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self.dropped: list[StoredKv] = []  # to make room, of what is in files
        self.snapshots: list[KvSnapshot] = []  # the oldest first

    def __len__(self) -> int:
        return len(self.snapshots)

    def make_room(self, size: int, superseded_by: KvHolder) -> bool:
        """Before so many bytes are copied: drops earlier snapshots of the same conversation, then the oldest."""
        if size > self.limit:
            return False
        for older in [each for each in self.snapshots if _extends(superseded_by, each)]:
            self.remove(older)
        while self.snapshots and (self.size + size > self.limit or len(self) >= self.MOST):
            self.dropped += _in_file(self.snapshots[0], self.snapshots[0].size)
            self.remove(self.snapshots[0])
        return True

    def add(self, snapshot: KvSnapshot) -> None:
        if self.make_room(snapshot.size, snapshot):
            self.snapshots.append(snapshot)
            self.size += snapshot.size

    def find(
        self, prompt: TokenIds, adapters: AdapterSet, scope: str = "", session: str | None = None, *, can_rewind: bool
    ) -> tuple[KvSnapshot | None, int]:
        """The snapshot that covers most of the prompt's tokens, and how many it covers."""
        covered = [
            (sequences.reusable_tokens(each, prompt, adapters, scope, session, can_rewind=can_rewind), each)
            for each in self.snapshots
        ]
        count, snapshot = max(covered, key=lambda each: each[0], default=(0, None))
        return (snapshot, count) if count else (None, 0)

    def remove(self, snapshot: KvSnapshot) -> None:
        self.snapshots = [each for each in self.snapshots if each is not snapshot]
        self.size = sum(each.size for each in self.snapshots)

    def drop_adapter(self, adapter: str) -> None:
        """Another adapter may get the same name."""
        for snapshot in [each for each in self.snapshots if any(name == adapter for name, _ in each.adapters)]:
            self.remove(snapshot)

    def clear(self) -> None:
        self.snapshots, self.size = [], 0


def _extends(holder: KvHolder, older: KvHolder) -> bool:
    """Whether it is the same conversation, later."""
    if (holder.scope, holder.adapters) != (older.scope, older.adapters):
        return False
    return sequences.common_prefix(holder.tokens, older.tokens) == len(older.tokens)


def _in_file(holder: SequenceSlot | KvSnapshot, size: int) -> list[StoredKv]:
    """What the file of this KV holds, if it has one."""
    if holder.file is None or not holder.saved:
        return []
    at = tuple(Checkpoint(one.tokens, _EMPTY) for one in holder.checkpoints if one.tokens <= holder.saved)
    rest = (at, holder.session, holder.adapters, holder.scope, holder.exact)
    return [StoredKv(holder.file, holder.tokens[: holder.saved].copy(), size, *rest)]


def _take_over(slot: SequenceSlot, holder: KvHolder) -> None:
    """The sequence holds a copy of this KV now."""
    slot.tokens, slot.checkpoints, slot.file = holder.tokens, holder.checkpoints, None
    slot.adapters, slot.scope, slot.exact = holder.adapters, holder.scope, holder.exact
    slot.session = holder.session


class Leaf(Struct, frozen=True):
    """`covered` tokens of a prompt are in a sequence of the cache `owner`, or parked; in neither if it is 0."""

    covered: int
    owner: SequenceManager
    slot: SequenceSlot | None = None
    snapshot: KvSnapshot | None = None

    @property
    def held(self) -> int:
        return len(self.slot.tokens) if self.slot is not None else 0


def _reusable_ids(job: LlamaCppJob) -> TokenIds:
    """The last token is always evaluated: the first new one is sampled from its logits."""
    ids: TokenIds = job.ids[: min(len(job.ids) - 1, job.logprobs_from)]
    return ids


class SequenceManager:
    """One named cache: `parallel` of the context's sequences, from `first` on. Belongs to the engine's thread, like the
    context, which other caches may share."""

    def __init__(
        self,
        name: str,
        info: CacheInfo,
        kv: KvMemory,
        first: int,
        limits: CheckpointLimits,
        parked_limit: int = 0,
        cache_reuse: int = 0,
    ) -> None:
        self.name, self.info = name, info
        self._cache_reuse = cache_reuse if kv.can_shift else 0
        self.kv, self._limits, self.parked = kv, limits, ParkedKv(parked_limit)
        self._copy_time = CopyTime()
        self.slots = [SequenceSlot(first + index, _EMPTY) for index in range(info.parallel)]
        self.neighbours: list[SequenceManager] = [self]  # all caches of the context
        self.donors: list[SequenceManager] = []  # other caches whose KV may be reused
        self.stored: list[StoredKv] = []  # what is in files only
        self._uses = self._adoptions = 0
        self.reused = self.copied = self.restored = self.fetched = self.evicted = 0  # tokens; evictions
        self.evaluated = 0  # prompt tokens
        self.guessed = self.accepted = 0  # drafted tokens
        self._checkpoint_size = 0  # of the last one
        self._tree: tuple[PrefixStats, ...] = ()
        self._tree_at = -inf
        self.held = 0  # jobs without a sequence: they wait for a prefix that another one reads

    def __repr__(self) -> str:
        return f"<SequenceManager {self.name}: {self.running}/{self.info.parallel} running>"

    @property
    def running(self) -> int:
        return sum(slot.busy for slot in self.slots) + self.held

    # --- a job is admitted --------------------------------------------------------------------------------------------

    def assign(self, job: LlamaCppJob) -> tuple[SequenceSlot, Accepted]:
        """The job's sequence, which then holds exactly the KV that it shares with the job."""
        adapters, scope, session = job.prompt.adapters, job.prompt.scope, hash_session(job.prompt.session)
        leaf = self._find_leaf(job, session)
        choice = sequences.choose_sequence(
            self.slots,
            _reusable_ids(job),
            session,
            adapters,
            scope,
            self._cache_reuse,
            parked=self.parked.snapshots,
            longest=leaf.covered,
            copy_cost=self._copy_cost(leaf),
            can_rewind=self.kv.can_rewind,
            wanted=job.prompt.slot,
        )
        slot = self._slot(choice)
        divergences: list[int] = []
        if not self.kv.can_rewind:
            same = (other for other in self.slots if other.scope == scope)
            divergences = [sequences.common_prefix(other.tokens, job.ids) for other in same]
        is_other = choice.lost > choice.keep  # another conversation, not an earlier state of this one
        lost = bool(choice.lost) and not self._park(slot, choice.lost) and is_other
        self._note_dropped(slot if lost else None)
        slot.file = None if is_other else slot.file  # an evicted conversation keeps its file
        if not choice.keep:
            self.clear(slot)
        self._place(slot)
        keep = self._prepare(slot, job, leaf, session)
        slot.saved = slot.saved if keep >= slot.saved else 0
        slot.tokens, slot.prompt_length, slot.adapters = job.ids[:keep], len(job.ids), adapters
        slot.exact = slot.exact if keep > slot.exact else ALL
        slot.scope, slot.session, slot.priority, slot.busy = scope, session, job.prompt.priority, True
        self._uses += 1
        slot.use_order = self._uses
        if not self.kv.can_rewind and self._limits.count:
            job.checkpoint_positions = sequences.checkpoint_positions(
                len(job.ids), keep, divergences, slot.checkpoints, self._inner_checkpoints()
            )
            if job.chunks:
                between = {whole_chunks(job.ids, position) for position in job.checkpoint_positions}
                job.checkpoint_positions = sorted(position for position in between if position > keep)
        self.reused += keep
        self.evicted += lost
        divergence = keep if keep < len(job.ids) else None
        return slot, Accepted(keep, divergence, lost, leaf.covered if leaf.covered > keep else 0)

    def _find_leaf(self, job: LlamaCppJob, session: str | None) -> Leaf:
        """What holds most of the prompt: a sequence, also a running one, or what is parked."""
        wanted, adapters, scope = _reusable_ids(job), job.prompt.adapters, job.prompt.scope
        best, rewinds = Leaf(0, self), self.kv.can_rewind
        for manager in (self, *self.donors):
            for slot in manager.slots:
                covered = sequences.reusable_tokens(slot, wanted, adapters, scope, session, can_rewind=rewinds)
                if covered > best.covered:
                    best = Leaf(covered, manager, slot)
        rewinds = self.kv.can_rewind_copies
        snapshot, covered = self.parked.find(wanted, adapters, scope, session, can_rewind=rewinds)
        if snapshot is None or not self._is_worthwhile(covered - best.covered, snapshot.size):
            return best
        return Leaf(covered, self, snapshot=snapshot)

    def stored_leaf(self, job: LlamaCppJob) -> StoredKv | None:
        """What is in a file only and holds so much more of the prompt that reading the file takes less time than
        reading the prompt. Called on the event loop while the thread runs: the leaf may be gone when it is read."""
        if not self.stored or not self.parked.limit or job.prompt.has_media:
            return None
        wanted, prompt, session = _reusable_ids(job), job.prompt, hash_session(job.prompt.session)

        def covered(leaf: StoredKv) -> int:
            given = (wanted, prompt.adapters, prompt.scope, session)
            return sequences.reusable_tokens(leaf, *given, can_rewind=self.kv.can_rewind_copies)

        best = max(self.stored, key=covered)
        if (most := covered(best)) < sequences.MIN_COPY or best.size > self.parked.limit:
            return None
        saved, costs = most - self._find_leaf(job, session).covered, self.kv.costs
        moved = best.size * (1 + _FILE_BYTE_S / costs.byte)
        return best if sequences.is_copy_worthwhile(saved, moved, costs) else None

    def fetch_stored(self, leaf: StoredKv, snapshot: KvSnapshot | None) -> None:
        """The file was read: its KV is parked from here on. Another job may have fetched it, too."""
        if not any(each is leaf for each in self.stored):
            return
        self.stored = [each for each in self.stored if each is not leaf]
        if snapshot is not None:
            self.parked.add(replace(snapshot, file=leaf.file, saved=len(leaf.tokens)))
            self._note_dropped(None)
            self.restored += len(leaf.tokens)

    def note_stored(self, leaf: StoredKv, lost: SequenceSlot | None = None, *, is_newest: bool = False) -> None:
        """A file whose KV has no room in memory; nothing if memory has it."""
        others: tuple[KvHolder, ...] = (*self.slots, *self.parked.snapshots, *self.stored)
        if not any(_extends(other, leaf) for other in others if other is not lost):
            self.stored = ([leaf, *self.stored] if is_newest else [*self.stored, leaf])[: ParkedKv.MOST]

    def _note_dropped(self, lost: SequenceSlot | None) -> None:
        """What memory has dropped is still in a file, if it has one."""
        dropped, self.parked.dropped = self.parked.dropped, []
        for leaf in (*dropped, *(_in_file(lost, self.kv.size(lost.index)) if lost is not None else ())):
            self.note_stored(leaf, lost, is_newest=True)

    def _copy_cost(self, leaf: Leaf) -> float:
        """Of the leaf's KV in another sequence, in tokens: as much as a copy takes, or all of them."""
        costs = self.kv.costs
        if leaf.snapshot is not None:
            return leaf.snapshot.size * costs.byte / costs.token
        method = self._copy_method(leaf, -1, leaf.covered)
        if leaf.slot is None or method is None:
            return leaf.covered
        size = leaf.owner.kv.size(leaf.slot.index)
        return sequences.copy_seconds(method, size, leaf.held, self.kv.window, costs) / costs.token

    def _copy_method(self, leaf: Leaf, target: int, saved: int) -> CopyMethod | None:
        """None if it costs more than to read the tokens that it saves, or if the copy has no room."""
        if leaf.slot is None or leaf.held > self.kv.window:
            return None
        methods = self.kv.copy_methods(leaf.owner.kv, leaf.slot.index, target)
        held = max(leaf.held, leaf.covered)  # it may still be reading them
        size = leaf.owner.kv.size(leaf.slot.index) * held // max(1, leaf.held)
        return sequences.choose_copy_method(saved, size, held, self.kv.window, self.kv.costs, methods)

    def awaited(self, job: LlamaCppJob, running: Iterable[LlamaCppJob]) -> tuple[LlamaCppJob, int] | None:
        """The running job that is about to read most of this one's prompt, and how much of it; None if reading it here
        costs less than a copy of that."""
        ids, own, most = _reusable_ids(job), (job.cache, job.prompt.scope, job.prompt.adapters), 0
        leader: LlamaCppJob | None = None
        for other in running:
            if (
                not other.generating
                and not other.chunks
                and (other.cache, other.prompt.scope, other.prompt.adapters) == own
            ):
                shared = sequences.common_prefix(other.ids, ids)
                if shared > max(most, other.n_past):
                    leader, most = other, shared
        if leader is None:
            return None
        saved = most - self._find_leaf(job, hash_session(job.prompt.session)).covered
        if self._copy_method(Leaf(most, self, leader.slot), -1, saved) is None:
            return None
        if not self.kv.can_rewind and self._limits.count:  # it goes on from a checkpoint
            leader.checkpoint_positions = sorted({*leader.checkpoint_positions, most})
        return leader, most

    def _is_worthwhile(self, saved: int, moved: float) -> bool:
        return sequences.is_copy_worthwhile(saved, moved, self.kv.costs)

    def _slot(self, choice: SequenceChoice) -> SequenceSlot:
        return next(slot for slot in self.slots if slot.index == choice.index)

    def _place(self, slot: SequenceSlot) -> None:
        """Gives the sequence an id beside the running ones, whichever cache had it. An empty one costs nothing; two
        that hold KV exchange it, if that does not delay the prompt for long."""
        slots = [each for cache in self.neighbours for each in cache.slots]
        running, idle = {each.index for each in slots if each.busy}, [each for each in slots if not each.busy]
        for candidates in ([each for each in idle if each is slot or not len(each.tokens)], idle):
            index = sequences.neighbouring_id(slot.index, (each.index for each in candidates), running)
            other = next(each for each in idle if each.index == index)
            is_free = not len(slot.tokens) and not len(other.tokens)
            if other is not slot and (is_free or (running and self._exchange(slot, other))):
                slot.index, other.index = other.index, slot.index

    def _exchange(self, slot: SequenceSlot, other: SequenceSlot) -> bool:
        started = time.monotonic()
        moved = 2 * sum(self.kv.size(each.index) for each in (slot, other) if len(each.tokens))
        if not self._copy_time.allows(moved * self.kv.costs.byte, started):
            return False
        done = self.kv.exchange(slot.index, other.index)
        self._copy_time.took(time.monotonic() - started)
        return done

    def _prepare(self, slot: SequenceSlot, job: LlamaCppJob, leaf: Leaf, session: str | None) -> int:
        """Makes the chosen sequence hold the shared prefix, and returns its length."""
        wanted, adapters, scope = _reusable_ids(job), job.prompt.adapters, job.prompt.scope
        own = sequences.reusable_tokens(slot, wanted, adapters, scope, session, can_rewind=self.kv.can_rewind)
        if self._cache_reuse and slot.session == session:
            own = self._move_blocks(slot, wanted, own)
        copied = False
        if leaf.covered > own and leaf.snapshot is not None:
            self._fetch(slot, leaf.snapshot, leaf.covered, own)
        elif leaf.covered > own and leaf.slot is not slot:
            copied = self._copy(slot, leaf, leaf.covered - own)
        keep = self._rewind(slot, sequences.shared_prefix(slot, wanted, adapters, scope, session))
        self.copied += max(0, keep - own) if copied else 0
        return keep

    def _move_blocks(self, slot: SequenceSlot, wanted: TokenIds, shared: int) -> int:
        """Moves what the prompt has further on to its new position. Returns how much of the prompt is held then."""
        blocks = sequences.moved_blocks(slot.tokens, wanted, shared, self._cache_reuse)
        if not blocks or not self.kv.move(slot.index, blocks):
            return shared
        end = blocks[-1].target + blocks[-1].count
        self.kv.cut(slot.index, wanted, end)  # what is left behind the last block
        slot.tokens, slot.saved = wanted[:end], slot.saved if shared >= slot.saved else 0
        slot.exact = min(slot.exact, shared)
        return end

    def park_ahead(self) -> bool:
        """While nothing runs: parks what the next new conversation would overwrite. False: there is nothing to do."""
        if self.empty_slot is not None or not self.parked.limit or self.running:
            return False
        choice = sequences.choose_sequence(self.slots, _EMPTY, None, parked=self.parked.snapshots)
        slot = next(slot for slot in self.slots if slot.index == choice.index)
        return bool(choice.lost) and self._park(slot, choice.lost, is_idle=True)

    def _park(self, slot: SequenceSlot, lost: int, *, is_idle: bool = False) -> bool:
        """Copies a conversation to RAM that loses so many tokens; False if that is not worth it, or would delay the
        next prompt for long. Background work does not come back."""
        if slot.priority == "background" or not self.parked.limit:
            return False
        size, seconds = self.kv.size(slot.index), self.kv.size(slot.index) * self.kv.costs.byte
        if not self._is_worthwhile(lost, 2 * size) or size > free_memory(with_gpus=False).ram_free // 2:
            return False
        if not is_idle and not self._copy_time.allows(seconds, time.monotonic()):
            return False
        started = time.monotonic()
        snapshot = self.snapshot(slot) if self.parked.make_room(size, slot) else None
        if snapshot is not None:
            self.parked.add(snapshot)
        if not is_idle:
            self._copy_time.took(time.monotonic() - started)
        return snapshot is not None

    def _fetch(self, slot: SequenceSlot, snapshot: KvSnapshot, covered: int, own: int) -> None:
        """Restores a parked conversation."""
        if not self.kv.restore(slot.index, snapshot.state):
            self.clear(slot)
            return
        _take_over(slot, snapshot)
        if covered == len(snapshot.tokens):
            slot.file, slot.saved = snapshot.file, snapshot.saved
            self.parked.remove(snapshot)  # the prompt continues all of it; otherwise it stays for its own next turn
        self.fetched += covered - own

    def _copy(self, slot: SequenceSlot, leaf: Leaf, saved: int) -> bool:
        """Copies the leaf's KV if that is cheaper than evaluating the tokens that it saves."""
        method = self._copy_method(leaf, slot.index, saved)
        if method is None or leaf.slot is None:
            return False
        if not self.kv.copy(leaf.owner.kv, leaf.slot.index, slot.index, method):
            self.clear(slot)
            return False
        _take_over(slot, leaf.slot)
        return True

    def _rewind(self, slot: SequenceSlot, keep: int) -> int:
        """Cuts the sequence to `keep` tokens, else to the last checkpoint before them, else to none."""
        held = len(slot.tokens)
        if self.kv.cut(slot.index, slot.tokens, keep):
            slot.checkpoints = sequences.checkpoints_within(slot.checkpoints, keep)
            if keep == held:
                self._take_checkpoint(slot)
            return keep
        checkpoint = sequences.latest_checkpoint(slot.checkpoints, keep)
        # First the state, then the cut: a model with a single state refuses a cut before that state.
        if (
            checkpoint is not None
            and self.kv.restore(slot.index, checkpoint.data, partial=True)
            and self.kv.cut(slot.index, slot.tokens[: checkpoint.tokens], checkpoint.tokens)
        ):
            slot.checkpoints = sequences.checkpoints_within(slot.checkpoints, checkpoint.tokens)
            return checkpoint.tokens
        self.clear(slot)
        return 0

    # --- while it runs ------------------------------------------------------------------------------------------------

    def update(self, slot: SequenceSlot, job: LlamaCppJob) -> None:
        """After a step: the sequence holds all tokens that the job has evaluated."""
        slot.tokens, slot.last_used = job.evaluated_ids, time.time()
        if job.checkpoint_positions and job.n_past >= job.checkpoint_positions[0]:
            job.checkpoint_positions.pop(0)
            self._take_checkpoint(slot)

    def _inner_checkpoints(self) -> int:
        """How many to take inside a prompt: half of those that are kept, as far as their size allows."""
        fitting = self._limits.size // self._checkpoint_size if self._checkpoint_size else self._limits.count
        return min(self._limits.count, fitting) // 2

    def _take_checkpoint(self, slot: SequenceSlot) -> None:
        if self.kv.can_rewind or not sequences.is_checkpoint_useful(slot.checkpoints, len(slot.tokens)):
            return
        data = self.kv.export(slot.index, partial=True) if self._limits.count else None
        if data is not None:
            checkpoint = Checkpoint(len(slot.tokens), data)
            self._checkpoint_size = checkpoint.size
            slot.checkpoints = sequences.add_checkpoint(slot.checkpoints, checkpoint, self._limits)

    def clear(self, slot: SequenceSlot) -> None:
        self.kv.clear(slot.index)
        slot.tokens, slot.session, slot.adapters, slot.checkpoints, slot.file = _EMPTY, None, (), (), None
        slot.prompt_length, slot.scope, slot.exact = 0, "", ALL

    def evict(self) -> None:
        for slot in self.slots:
            if not slot.busy:
                self.clear(slot)
        self.parked.clear()
        self.stored = []

    def drop_adapter(self, adapter: str) -> None:
        """Its KV must not be used if another adapter gets the same name."""
        for slot in self.slots:
            if any(name == adapter for name, _ in slot.adapters):
                self.clear(slot)
        self.parked.drop_adapter(adapter)

    def stats(self) -> CacheStats:
        """Read on the event loop while the thread runs: numbers may be one step apart."""
        rows = (
            SequenceStats(number, len(s.tokens), s.busy, s.session, s.last_used) for number, s in enumerate(self.slots)
        )
        guesses = self.guessed, self.accepted
        return CacheStats(self.reused, self.evaluated, self.evicted, tuple(rows), self._prefixes(), *guesses)

    def _prefixes(self) -> tuple[PrefixStats, ...]:
        """At most once a second: many ask for the other numbers."""
        if (now := time.monotonic()) - self._tree_at >= 1:
            number = {id(slot): at for at, slot in enumerate(self.slots)}
            holders: tuple[KvHolder, ...] = (*self.slots, *self.parked.snapshots, *self.stored)
            leaves = [leaf for leaf in holders if len(leaf.tokens)]
            self._tree_at, self._tree = (
                now,
                tuple(
                    PrefixStats(
                        len(leaf.tokens), shared, number.get(id(leaf)), leaf.session, isinstance(leaf, StoredKv)
                    )
                    for leaf, shared in sequences.prefix_order(leaves)
                ),
            )
        return self._tree

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def snapshot(self, slot: SequenceSlot) -> KvSnapshot | None:
        """None if the sequence is empty, or its copy is still pending."""
        state = self.kv.export(slot.index) if len(slot.tokens) else None
        if state is None:
            return None
        return KvSnapshot(
            slot.tokens.copy(),
            state,
            slot.checkpoints,
            slot.session,
            slot.adapters,
            slot.priority,
            scope=slot.scope,
            exact=slot.exact,
            file=slot.file,
            saved=slot.saved,
        )

    @property
    def parked_only(self) -> list[KvSnapshot]:
        """What no sequence holds, too; the oldest first."""
        return [each for each in self.parked.snapshots if not any(_extends(slot, each) for slot in self.slots)]

    def mark_saved(self, slot: SequenceSlot, snapshot: KvSnapshot, file: str) -> str | None:
        """The snapshot is in that file. Returns the older file that it replaces. The sequence may hold another
        conversation by now."""
        if not _extends(slot, snapshot):
            return None
        older, slot.file, slot.saved = slot.file, file, len(snapshot.tokens)
        return older

    def idle_slot(self, number: int, scope: str) -> SequenceSlot:
        """The sequence at this place, if its KV is of this scope or it has none."""
        if not 0 <= number < len(self.slots):
            raise NotFound(f"there is no slot {number}: {self.name!r} has {len(self.slots)}", code="no_such_slot")
        slot = self.slots[number]
        if slot.scope != scope and (slot.busy or len(slot.tokens)):
            raise NotFound(f"slot {number} has nothing of this key", code="slot_of_another_key")
        if slot.busy:
            raise Conflict(f"slot {number} is in use: try again when its answer has ended", code="slot_in_use")
        return slot

    def erase(self, number: int, scope: str) -> MovedKv:
        slot = self.idle_slot(number, scope)
        moved = MovedKv(len(slot.tokens), self.kv.size(slot.index) if len(slot.tokens) else 0)
        self.clear(slot)
        return moved

    @property
    def empty_slots(self) -> list[SequenceSlot]:
        return [slot for slot in self.slots if not slot.busy and not len(slot.tokens)]

    @property
    def empty_slot(self) -> SequenceSlot | None:
        return next(iter(self.empty_slots), None)

    @property
    def has_room(self) -> bool:
        """For another snapshot, in a sequence or parked."""
        return self.empty_slot is not None or self.parked.size < self.parked.limit

    def adopt_parked(self, snapshot: KvSnapshot, file: str) -> bool:
        """Keeps a snapshot in RAM, before those that were parked here; False if it has no room or is here already."""
        parked = self.parked
        others: tuple[KvHolder, ...] = (*self.slots, *parked.snapshots)
        if parked.size + snapshot.size > parked.limit or any(_extends(other, snapshot) for other in others):
            return False
        parked.snapshots.insert(0, replace(snapshot, file=file, saved=len(snapshot.tokens)))
        parked.size += snapshot.size
        self.restored += len(snapshot.tokens)
        return True

    def adopt(self, snapshot: KvSnapshot, file: str) -> bool:
        """Restores a snapshot into an empty sequence; False if there is none, or if its tokens are here already. The
        newest come first, and all of them are older than what ran here."""
        slot = self.empty_slot
        if slot is None or any(_extends(other, snapshot) for other in self.slots):
            return False
        if not self.fill(slot, snapshot):
            return False
        slot.file, slot.saved = file, len(snapshot.tokens)
        self._adoptions += 1
        slot.use_order = -self._adoptions
        return True

    def fill(self, slot: SequenceSlot, snapshot: KvSnapshot) -> bool:
        """Replaces what an idle sequence holds; after False it is empty."""
        count = len(snapshot.tokens)
        if not (self.kv.restore(slot.index, snapshot.state) and self.kv.cut(slot.index, snapshot.tokens, count)):
            self.clear(slot)
            return False
        slot.tokens, slot.checkpoints, slot.file, slot.saved = snapshot.tokens, snapshot.checkpoints, None, 0
        slot.session, slot.adapters, slot.priority = snapshot.session, snapshot.adapters, snapshot.priority
        slot.scope, slot.exact = snapshot.scope, snapshot.exact
        slot.prompt_length = 0  # not stored
        self._uses += 1
        slot.use_order = self._uses
        self.restored += count
        return True


def create_sequence_managers(context: Any, layout: ContextLayout, options: Options) -> dict[str, SequenceManager]:
    """The caches of one context, by name."""
    kv = KvMemory(context, layout.info.window, kv_layout(layout.info, options))
    if uses_gpu(options):
        kv.costs.stream = 1e-11  # inside of its own memory a GPU copies much faster than over the bus
    if kv.layout.unified:
        kv.costs.stream = 0.0  # no byte moves
    limits = CheckpointLimits(options.checkpoints, options.checkpoint_mb << 20)
    managers: dict[str, SequenceManager] = {}
    first = 0
    for name, info in layout.caches.items():
        parked_limit = options.parked_mb << 20
        managers[name] = SequenceManager(name, info, kv, first, limits, parked_limit, options.cache_reuse)
        first += info.parallel
    for manager in managers.values():
        manager.neighbours = list(managers.values())
    return managers


def share_caches(managers: Sequence[SequenceManager]) -> None:
    """Caches of one model with the same KV layout reuse each other's KV."""
    for manager in managers:
        manager.donors = [other for other in managers if other is not manager and other.kv.layout == manager.kv.layout]
