"""The sequences of a named cache: which one takes a job, which KV it keeps, copies or restores, and what is kept of it.

The decisions are pure functions in `sequences.py`; this module executes them. Caches of one layout share a context, so
that their jobs are computed together, and each has its own sequences: no other cache's KV is reused, unless
`share_across_caches` is set.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from modelyard.core.engine import Accepted, CacheInfo, CacheStats, SequenceStats
from modelyard.engines.llama_cpp import sequences
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.kv_memory import KvMemory, kv_layout
from modelyard.engines.llama_cpp.kv_snapshot import KvSnapshot, hash_session
from modelyard.engines.llama_cpp.media_tokens import whole_chunks
from modelyard.engines.llama_cpp.options import ContextLayout, Options
from modelyard.engines.llama_cpp.sequences import (
    AdapterSet,
    Checkpoint,
    CheckpointLimits,
    KvHolder,
    SequenceChoice,
    SequenceSlot,
    TokenIds,
)
from modelyard.telemetry.system import free_memory

_EMPTY: TokenIds = np.zeros(0, np.int32)


class KvOffload:
    """Snapshots of evicted conversations in RAM, up to `limit` bytes; the oldest are dropped first. Pure.

    A context has few sequences, and an agent has more conversations: its own, its sub-agents', and background work. An
    offloaded conversation comes back at memory speed instead of being read again.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self._snapshots: list[KvSnapshot] = []  # the oldest first

    def __len__(self) -> int:
        return len(self._snapshots)

    def add(self, snapshot: KvSnapshot) -> None:
        """Replaces earlier snapshots of the same conversation."""
        for older in [each for each in self._snapshots if _extends(snapshot, each)]:
            self.remove(older)
        while self._snapshots and self.size + snapshot.size > self.limit:
            self.remove(self._snapshots[0])
        if snapshot.size <= self.limit:
            self._snapshots.append(snapshot)
            self.size += snapshot.size

    def find(
        self, prompt: TokenIds, adapters: AdapterSet, scope: str = "", *, can_rewind: bool
    ) -> tuple[KvSnapshot, int] | None:
        """The snapshot that covers most of the prompt's tokens, and how many it covers."""
        covered = [
            (sequences.reusable_tokens(each, prompt, adapters, scope, can_rewind=can_rewind), each)
            for each in self._snapshots
        ]
        count, snapshot = max(covered, key=lambda each: each[0], default=(0, None))
        return (snapshot, count) if snapshot is not None and count else None

    def remove(self, snapshot: KvSnapshot) -> None:
        self._snapshots = [each for each in self._snapshots if each is not snapshot]
        self.size = sum(each.size for each in self._snapshots)

    def drop_adapter(self, adapter: str) -> None:
        """Another adapter may get the same name."""
        for snapshot in [each for each in self._snapshots if any(name == adapter for name, _ in each.adapters)]:
            self.remove(snapshot)

    def clear(self) -> None:
        self._snapshots, self.size = [], 0


def _extends(holder: KvHolder, older: KvSnapshot) -> bool:
    """Whether it is the same conversation, later."""
    if (holder.scope, holder.adapters) != (older.scope, older.adapters):
        return False
    return sequences.common_prefix(holder.tokens, older.tokens) == len(older.tokens)


def _take_over(slot: SequenceSlot, holder: KvHolder) -> None:
    """The sequence holds a copy of this KV now."""
    slot.tokens, slot.checkpoints, slot.file = holder.tokens, holder.checkpoints, None
    slot.adapters, slot.scope = holder.adapters, holder.scope


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
        offload_limit: int = 0,
        cache_reuse: int = 0,
    ) -> None:
        self.name, self.info = name, info
        self._cache_reuse = cache_reuse if kv.can_shift else 0
        self.kv, self._limits, self.offload = kv, limits, KvOffload(offload_limit)
        self.slots = [SequenceSlot(first + index, _EMPTY) for index in range(info.parallel)]
        self.neighbours: list[SequenceManager] = [self]  # all caches of the context
        self.donors: list[SequenceManager] = []  # other caches whose KV may be reused
        self._uses = self._adoptions = 0
        self.reused = self.copied = self.restored = self.fetched = self.evicted = 0  # tokens; evictions
        self.evaluated = 0  # prompt tokens
        self._checkpoint_size = 0  # of the last one

    def __repr__(self) -> str:
        return f"<SequenceManager {self.name}: {self.running}/{self.info.parallel} running>"

    @property
    def running(self) -> int:
        return sum(slot.busy for slot in self.slots)

    # --- a job is admitted --------------------------------------------------------------------------------------------

    def assign(self, job: LlamaCppJob) -> tuple[SequenceSlot, Accepted]:
        """The job's sequence, which then holds exactly the KV that it shares with the job."""
        adapters, scope, session = job.prompt.adapters, job.prompt.scope, hash_session(job.prompt.session)
        choice = sequences.choose_sequence(self.slots, job.ids, session, adapters, scope, self._cache_reuse)
        slot = self._slot(choice)
        divergences: list[int] = []
        if not self.kv.can_rewind:
            same = (other for other in self.slots if other.scope == scope)
            divergences = [sequences.common_prefix(other.tokens, job.ids) for other in same]
        lost = choice.evicted and not self._offload(slot)
        keep, available = self._prepare(slot, job)
        slot.file = None if choice.evicted else slot.file  # an evicted conversation keeps its file
        slot.saved = slot.saved if keep >= slot.saved else 0
        slot.tokens, slot.prompt_length, slot.adapters = job.ids[:keep], len(job.ids), adapters
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
        return slot, Accepted(keep, divergence, lost, available if available > keep else 0)

    def _slot(self, choice: SequenceChoice) -> SequenceSlot:
        """Empty sequences have no owner: the lowest one of the context is taken, whichever cache had it. llama.cpp
        computes only neighbouring sequences together."""
        slot = next(slot for slot in self.slots if slot.index == choice.index)
        if not len(slot.tokens):
            lowest = min((empty for cache in self.neighbours for empty in cache.empty_slots), key=lambda it: it.index)
            slot.index, lowest.index = lowest.index, slot.index
        return slot

    def _prepare(self, slot: SequenceSlot, job: LlamaCppJob) -> tuple[int, int]:
        """Makes the chosen sequence hold the shared prefix. Returns its length and the longest that any sequence has.
        The last token is always evaluated: the first new token is sampled from its logits."""
        adapters, scope = job.prompt.adapters, job.prompt.scope
        wanted = job.ids[: len(job.ids) - 1 if job.prompt.prompt_logprobs is None else 0]
        own = sequences.reusable_tokens(slot, wanted, adapters, scope, can_rewind=self.kv.can_rewind)
        if self._cache_reuse:
            own = self._move_blocks(slot, wanted, own)
        own = self._fetch(slot, wanted, job, own)
        available, owner, donor = self._find_donor(slot, wanted, job, own)
        copied = donor is not slot and self._copy(slot, owner, donor, available - own)
        keep = self._rewind(slot, sequences.shared_prefix(slot, wanted, adapters, scope))
        self.copied += max(0, keep - own) if copied else 0
        return keep, available

    def _move_blocks(self, slot: SequenceSlot, wanted: TokenIds, shared: int) -> int:
        """Moves what the prompt has further on to its new position. Returns how much of the prompt is held then."""
        blocks = sequences.moved_blocks(slot.tokens, wanted, shared, self._cache_reuse)
        if not blocks or not self.kv.move(slot.index, blocks):
            return shared
        end = blocks[-1].target + blocks[-1].count
        self.kv.cut(slot.index, wanted, end)  # what is left behind the last block
        slot.tokens, slot.saved = wanted[:end], slot.saved if shared >= slot.saved else 0
        return end

    def _offload(self, slot: SequenceSlot) -> bool:
        """Copies an evicted conversation to RAM; False if it is not worth it. Background work does not come back."""
        if slot.priority == "background" or not self.offload.limit:
            return False
        size = self.kv.size(slot.index)
        if size > self.offload.limit or size > free_memory(with_gpus=False).ram_free // 2:
            return False
        if not sequences.is_copy_worthwhile(len(slot.tokens), 2 * size, self.kv.costs):
            return False
        snapshot = self.snapshot(slot)
        if snapshot is not None:
            self.offload.add(snapshot)
        return snapshot is not None

    def _fetch(self, slot: SequenceSlot, wanted: TokenIds, job: LlamaCppJob, own: int) -> int:
        """Restores an offloaded conversation if it covers more of the prompt. Returns how much the sequence covers."""
        adapters, scope = job.prompt.adapters, job.prompt.scope
        found = self.offload.find(wanted, adapters, scope, can_rewind=self.kv.can_rewind_copies)
        if found is None or not sequences.is_copy_worthwhile(found[1] - own, found[0].size, self.kv.costs):
            return own
        snapshot, covered = found
        if not self.kv.restore(slot.index, snapshot.state):
            self.clear(slot)
            return 0
        _take_over(slot, snapshot)
        if snapshot.session == hash_session(job.prompt.session):
            self.offload.remove(snapshot)  # another session's snapshot stays for that session
        self.fetched += covered - own
        return covered

    def _find_donor(
        self, slot: SequenceSlot, wanted: TokenIds, job: LlamaCppJob, own: int
    ) -> tuple[int, SequenceManager, SequenceSlot]:
        """The sequence that covers most of the prompt: how much, its manager, and its slot."""
        best, owner, donor = own, self, slot
        adapters, scope = job.prompt.adapters, job.prompt.scope
        for manager in (self, *self.donors):
            for other in manager.slots:
                if other is slot:
                    continue
                covered = sequences.reusable_tokens(other, wanted, adapters, scope, can_rewind=self.kv.can_rewind)
                if covered > best:
                    best, owner, donor = covered, manager, other
        return best, owner, donor

    def _copy(self, slot: SequenceSlot, owner: SequenceManager, donor: SequenceSlot, saved: int) -> bool:
        """Copies the donor's KV if that is cheaper than evaluating the tokens that it saves."""
        size, methods = owner.kv.size(donor.index), self.kv.copy_methods(owner.kv, donor.index, slot.index)
        method = sequences.choose_copy_method(saved, size, len(donor.tokens), self.kv.window, self.kv.costs, methods)
        if method is None or len(donor.tokens) > self.kv.window:
            return False
        if not self.kv.copy(owner.kv, donor.index, slot.index, method):
            self.clear(slot)
            return False
        _take_over(slot, donor)
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
        slot.prompt_length, slot.scope = 0, ""

    def evict(self) -> None:
        for slot in self.slots:
            if not slot.busy:
                self.clear(slot)
        self.offload.clear()

    def drop_adapter(self, adapter: str) -> None:
        """Its KV must not be used if another adapter gets the same name."""
        for slot in self.slots:
            if any(name == adapter for name, _ in slot.adapters):
                self.clear(slot)
        self.offload.drop_adapter(adapter)

    def stats(self) -> CacheStats:
        """Read on the event loop while the thread runs: numbers may be one step apart."""
        sequences = (
            SequenceStats(number, len(s.tokens), s.busy, s.session, s.last_used) for number, s in enumerate(self.slots)
        )
        return CacheStats(self.reused, self.evaluated, self.evicted, tuple(sequences))

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
        )

    def mark_saved(self, slot: SequenceSlot, snapshot: KvSnapshot, file: str) -> str | None:
        """The snapshot is in that file. Returns the older file that it replaces. The sequence may hold another
        conversation by now."""
        if not _extends(slot, snapshot):
            return None
        older, slot.file, slot.saved = slot.file, file, len(snapshot.tokens)
        return older

    @property
    def empty_slots(self) -> list[SequenceSlot]:
        return [slot for slot in self.slots if not slot.busy and not len(slot.tokens)]

    @property
    def empty_slot(self) -> SequenceSlot | None:
        return next(iter(self.empty_slots), None)

    def adopt(self, snapshot: KvSnapshot, file: str) -> bool:
        """Restores a snapshot into an empty sequence; False if there is none, or if its tokens are here already. The
        newest come first, and all of them are older than what ran here."""
        slot, count = self.empty_slot, len(snapshot.tokens)
        if slot is None or any(_extends(other, snapshot) for other in self.slots):
            return False
        if not (self.kv.restore(slot.index, snapshot.state) and self.kv.cut(slot.index, snapshot.tokens, count)):
            self.clear(slot)
            return False
        slot.tokens, slot.checkpoints, slot.file, slot.saved = snapshot.tokens, snapshot.checkpoints, file, count
        slot.session, slot.adapters, slot.priority = snapshot.session, snapshot.adapters, snapshot.priority
        slot.scope = snapshot.scope
        slot.prompt_length = 0  # not stored
        self._adoptions += 1
        slot.use_order = -self._adoptions
        self.restored += count
        return True


def create_sequence_managers(context: Any, layout: ContextLayout, options: Options) -> dict[str, SequenceManager]:
    """The caches of one context, by name."""
    kv = KvMemory(context, layout.info.window, kv_layout(layout.info, options))
    limits = CheckpointLimits(options.checkpoints, options.checkpoint_mb << 20)
    managers: dict[str, SequenceManager] = {}
    first = 0
    for name, info in layout.caches.items():
        offload_limit = options.parked_mb << 20
        managers[name] = SequenceManager(name, info, kv, first, limits, offload_limit, options.cache_reuse)
        first += info.parallel
    for manager in managers.values():
        manager.neighbours = list(managers.values())
    return managers


def share_caches(managers: Sequence[SequenceManager]) -> None:
    """Caches of one model with the same KV layout reuse each other's KV."""
    for manager in managers:
        manager.donors = [other for other in managers if other is not manager and other.kv.layout == manager.kv.layout]
