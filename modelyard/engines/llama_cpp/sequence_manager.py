"""Conversations that had to make room, kept in memory until they come back: bounded, and the oldest go first. Pure.

A context has few sequences, and an agent more conversations: its own, its sub-agents', and errands in the background.
Whoever must wait for the next turn outside of the context comes back at memory speed instead of being read anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from modelyard.core.engine import Accepted, CacheInfo, SequenceStats
from modelyard.engines.llama_cpp import sequences
from modelyard.engines.llama_cpp import sequences as checkpoints
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.kv_memory import KvMemory, kv_layout
from modelyard.engines.llama_cpp.kv_snapshot import KvSnapshot, hash_session
from modelyard.engines.llama_cpp.options import Options
from modelyard.engines.llama_cpp.sequences import (
    AdapterSet,
    Checkpoint,
    CheckpointLimits,
    Ids,
    SequenceChoice,
    SequenceSlot,
)
from modelyard.telemetry.system import free_memory


class KvOffload:
    """All parked conversations of one cache. `limit` is in bytes, for all of them together; 0: none is kept."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self._parked: list[KvSnapshot] = []  # the oldest first

    def __len__(self) -> int:
        return len(self._parked)

    def has_room(self, size: int) -> bool:
        """Before the copy is made: it may be too large for all that there is."""
        return size <= self.limit

    def park(self, image: KvSnapshot) -> None:
        for older in [one for one in self._parked if _goes_on(image, one)]:
            self.remove(older)
        while self._parked and self.size + image.size > self.limit:
            self.remove(self._parked[0])
        if self.has_room(image.size):
            self._parked.append(image)
            self.size += image.size

    def best(self, wanted: Ids, adapters: AdapterSet, *, can_cut: bool) -> tuple[KvSnapshot, int] | None:
        """Which of them stands for most of the wanted tokens, and for how many."""
        found = [(sequences.reusable_tokens(one, wanted, adapters, can_cut=can_cut), one) for one in self._parked]
        most, image = max(found, key=lambda each: each[0], default=(0, None))
        return (image, most) if image is not None and most else None

    def remove(self, image: KvSnapshot) -> None:
        self._parked = [one for one in self._parked if one is not image]
        self.size = sum(one.size for one in self._parked)

    def forget(self, adapter: str) -> None:
        """It goes: KV of its time would be another's if its name came back."""
        for image in [one for one in self._parked if any(name == adapter for name, _ in one.adapters)]:
            self.remove(image)

    def clear(self) -> None:
        self._parked, self.size = [], 0


def _goes_on(image: KvSnapshot, older: KvSnapshot) -> bool:
    """It is the same conversation, later: all that the older one holds stands in it, too."""
    if image.adapters != older.adapters:
        return False
    return sequences.common_prefix(image.tokens, older.tokens) == len(older.tokens)


# A cache's sequences: which one takes a job, what of its KV stays, what is copied to it, and what is kept of it.
#
# The decisions are `sequences` and `checkpoints`, which are pure; here they are carried out.

_EMPTY: Ids = np.zeros(0, np.int32)


class SequenceManager:
    """Belongs to the engine's thread, as the context does."""

    def __init__(self, info: CacheInfo, kv: KvMemory, bound: CheckpointLimits, parked: int = 0) -> None:
        self.kv, self._bound, self.lot = kv, bound, KvOffload(parked)
        self.slots = [SequenceSlot(index, _EMPTY) for index in range(info.parallel)]
        self.kin: list[SequenceManager] = []  # of other caches, whose KV would mean the same here
        self._clock = 0
        self._adopted = 0
        self.reused = self.copied = self.restored = self.fetched = self.evicted = 0

    # --- a job comes ------------------------------------------------------------------------------------------------

    def take(self, job: LlamaCppJob) -> tuple[SequenceSlot, Accepted]:
        """The sequence for a job, holding just what the job shares with it."""
        adapters, session = job.prompt.adapters, hash_session(job.prompt.session)
        choice = sequences.choose_sequence(self.slots, job.ids, session, adapters)
        slot = self.slots[choice.index]
        partings = [] if self.kv.can_cut else [sequences.common_prefix(other.tokens, job.ids) for other in self.slots]
        lost = choice.evicted and not self._park(slot)
        keep, most = self._prepare(choice, job)
        slot.file = None if choice.evicted else slot.file  # that is another conversation's
        slot.saved = slot.saved if keep >= slot.saved else 0
        slot.tokens, slot.asked, slot.adapters = job.ids[:keep], len(job.ids), adapters
        slot.session, slot.priority, slot.busy = session, job.prompt.priority, True
        self._use(slot)
        if not self.kv.can_cut and self._bound.count:
            job.pauses = checkpoints.checkpoint_positions(len(job.ids), keep, partings, slot.checkpoints)
        self.reused += keep
        self.evicted += lost
        return slot, Accepted(keep, keep if keep < len(job.ids) else None, lost, most if most > keep else 0)

    def _use(self, slot: SequenceSlot) -> None:
        self._clock += 1
        slot.used = self._clock

    def _prepare(self, choice: SequenceChoice, job: LlamaCppJob) -> tuple[int, int]:
        """Make the chosen sequence hold exactly the shared prefix; how long it is, and how much any sequence has. One
        token is always read anew: its logits are what the first new token is sampled from."""
        slot, most = self.slots[choice.index], len(job.ids) - 1
        wanted = job.ids[:most]
        own = sequences.reusable_tokens(slot, wanted, job.prompt.adapters, can_cut=self.kv.can_cut)
        own = self._fetch(slot, wanted, job, own)
        most, source, donor = self._donor(slot, wanted, job.prompt.adapters, own)
        copied = donor is not slot and self._copy(slot, source, donor, most - own)
        keep = self._rewind(
            slot, sequences.common_prefix(slot.tokens, wanted) if slot.adapters == job.prompt.adapters else 0
        )
        self.copied += max(0, keep - own) if copied else 0
        return keep, most

    def _park(self, slot: SequenceSlot) -> bool:
        """Out of the context, to come back; False where it is not worth it. Errands are over when they are answered."""
        if slot.priority == "background" or not self.lot.limit:
            return False
        size = self.kv.size(slot.index)
        if not self.lot.has_room(size) or size > free_memory(with_gpus=False).ram_free // 2:
            return False
        image = self.image(slot) if sequences.is_copy_worthwhile(len(slot.tokens), 2 * size, self.kv.costs) else None
        if image is not None:
            self.lot.park(image)
        return image is not None

    def _fetch(self, slot: SequenceSlot, wanted: Ids, job: LlamaCppJob, own: int) -> int:
        """A parked conversation into the sequence, where it has more of what is wanted; how much the sequence has."""
        found = self.lot.best(wanted, job.prompt.adapters, can_cut=self.kv.can_cut_copies)
        if found is None or not sequences.is_copy_worthwhile(found[1] - own, found[0].size, self.kv.costs):
            return own
        image, reach = found
        if not self.kv.put(slot.index, image.state):
            self.clear(slot)
            return 0
        slot.tokens, slot.checkpoints, slot.adapters, slot.file = image.tokens, image.checkpoints, image.adapters, None
        if image.session == hash_session(job.prompt.session):
            self.lot.remove(image)  # it is back; the others go on waiting for their own turn
        self.fetched += reach - own
        return reach

    def _donor(
        self, slot: SequenceSlot, wanted: Ids, adapters: sequences.AdapterSet, own: int
    ) -> tuple[int, SequenceManager, SequenceSlot]:
        """Who holds most of what is wanted, and how much: the sequence itself, where nobody has more."""
        best, source, donor = own, self, slot
        for home, other in self._others(slot):
            found = sequences.reusable_tokens(other, wanted, adapters, can_cut=self.kv.can_cut)
            if found > best:
                best, source, donor = found, home, other
        return best, source, donor

    def _copy(self, slot: SequenceSlot, source: SequenceManager, donor: SequenceSlot, more: int) -> bool:
        """The donor's KV, where that is cheaper than reading those tokens that it has more."""
        size, ways = source.kv.size(donor.index), self.kv.ways(source.kv, donor.index, slot.index)
        way = sequences.choose_copy_method(more, size, len(donor.tokens), self.kv.window, self.kv.costs, ways)
        if way is None or len(donor.tokens) > self.kv.window:
            return False
        if not self.kv.copy(source.kv, donor.index, slot.index, way):
            self.clear(slot)
            return False
        slot.tokens, slot.checkpoints, slot.adapters, slot.file = donor.tokens, donor.checkpoints, donor.adapters, None
        return True

    def _others(self, slot: SequenceSlot) -> Iterator[tuple[SequenceManager, SequenceSlot]]:
        for home in (self, *self.kin):
            yield from ((home, other) for other in home.slots if other is not slot)

    def _rewind(self, slot: SequenceSlot, keep: int) -> int:
        """Cut the sequence to `keep` tokens, or to the last place before where it can be taken up, or to none."""
        held = len(slot.tokens)
        if self.kv.cut(slot.index, keep, held):
            slot.checkpoints = checkpoints.checkpoints_within(slot.checkpoints, keep)
            if keep == held:
                self._remember(slot)
            return keep
        found = checkpoints.latest_checkpoint(slot.checkpoints, keep)
        if found is not None and self._take_up(slot, found):
            slot.checkpoints = checkpoints.checkpoints_within(slot.checkpoints, found.tokens)
            return found.tokens
        self.clear(slot)
        return 0

    def _take_up(self, slot: SequenceSlot, found: Checkpoint) -> bool:
        # First the state, then the cut: one that keeps a single state refuses to be cut before it stands there.
        return self.kv.put(slot.index, found.data, partial=True) and self.kv.cut(
            slot.index, found.tokens, held=found.tokens
        )

    # --- while it is read -------------------------------------------------------------------------------------------

    def read(self, slot: SequenceSlot, job: LlamaCppJob) -> None:
        """The sequence holds all that the job has done."""
        slot.tokens, slot.at = job.ids[: job.done], time.time()
        if job.pauses and job.done >= job.pauses[0]:
            job.pauses.pop(0)
            self._remember(slot)

    def _remember(self, slot: SequenceSlot) -> None:
        """Keep what the sequence is now, where it could not be got by going back."""
        if self.kv.can_cut or not checkpoints.is_checkpoint_useful(slot.checkpoints, len(slot.tokens)):
            return
        data = self.kv.take(slot.index, partial=True) if self._bound.count else None
        if data is not None:
            slot.checkpoints = checkpoints.add_checkpoint(
                slot.checkpoints, Checkpoint(len(slot.tokens), data), self._bound
            )

    # --- a job goes -------------------------------------------------------------------------------------------------

    def clear(self, slot: SequenceSlot) -> None:
        self.kv.clear(slot.index)
        slot.tokens, slot.session, slot.adapters, slot.checkpoints, slot.file = _EMPTY, None, (), (), None
        slot.asked = 0

    def stats(self) -> tuple[SequenceStats, ...]:
        return tuple(SequenceStats(s.index, len(s.tokens), s.busy, s.session, s.at) for s in self.slots)

    # --- saved and restored -----------------------------------------------------------------------------------------

    def image(self, slot: SequenceSlot) -> KvSnapshot | None:
        """None where there is nothing, or nothing yet."""
        state = self.kv.take(slot.index) if len(slot.tokens) else None
        if state is None:
            return None
        tokens = slot.tokens.copy()
        return KvSnapshot(tokens, state, slot.checkpoints, slot.session, slot.adapters, slot.priority)

    def note(self, slot: SequenceSlot, image: KvSnapshot, file: str) -> str | None:
        """The image is in that file; the file that it takes the place of. By now the sequence may hold something
        else."""
        if slot.adapters != image.adapters or sequences.common_prefix(slot.tokens, image.tokens) < len(image.tokens):
            return None
        older, slot.file, slot.saved = slot.file, file, len(image.tokens)
        return older

    @property
    def empty(self) -> SequenceSlot | None:
        return next((slot for slot in self.slots if not slot.busy and not len(slot.tokens)), None)

    def adopt(self, image: KvSnapshot, file: str) -> bool:
        """Into an empty sequence; False where there is none, or where all of it is here already. The newest come
        first, and all of them are older than whatever ran here."""
        slot, count = self.empty, len(image.tokens)
        if slot is None or self._holds(image):
            return False
        if not (self.kv.put(slot.index, image.state) and self.kv.cut(slot.index, count, held=count)):
            self.clear(slot)
            return False
        slot.tokens, slot.checkpoints, slot.file, slot.saved = image.tokens, image.checkpoints, file, count
        slot.session, slot.adapters, slot.priority = image.session, image.adapters, image.priority
        slot.asked = 0  # nobody wrote down where its answer began
        self._adopted += 1
        slot.used = -self._adopted
        self.restored += count
        return True

    def _holds(self, image: KvSnapshot) -> bool:
        return any(
            slot.adapters == image.adapters and sequences.common_prefix(slot.tokens, image.tokens) == len(image.tokens)
            for slot in self.slots
        )


def create_sequence_manager(raw: Any, info: CacheInfo, options: Options) -> SequenceManager:
    kv = KvMemory(raw, info.window, kv_layout(info, options))
    return SequenceManager(
        info, kv, CheckpointLimits(options.checkpoints, options.checkpoint_mb << 20), options.parked_mb << 20
    )


def link_compatible(all_: Sequence[SequenceManager]) -> None:
    """Those of one model whose KV is alike may copy from each other."""
    for one in all_:
        one.kin = [other for other in all_ if other is not one and other.kv.layout == one.kv.layout]
