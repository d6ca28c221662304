"""What goes into the next decode: the plan of a mixed step, the batch of a uniform one, and llama.cpp's batch itself.

A mixed step reads prompts and drafts beside the streams (`plan_batch`). A uniform step moves all jobs one token on
(`DecodeBatch`).
"""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from ctypes import POINTER, c_int32
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.logit_columns import Rows
from modelyard.engines.llama_cpp.sampler import BatchSampler

IntArray = npt.NDArray[np.int32]

SHORT_PROMPT = 64  # rows: fewer of them take as long on a CPU, and on a GPU hardly less
# Of a long prompt beside streams: llama.cpp computes the first one with the streams' tokens, and then 64.
_BLOCK = SHORT_PROMPT + 1
FAIR_S = 0.05  # a step with prompts beside another key's streams: shorter ones read at less than 0.8 of the speed


# --- a mixed step -----------------------------------------------------------------------------------------------------


class SequenceWork(Struct, frozen=True):
    """A sequence with `pending` tokens to read (1 while it generates). `arrival` orders the prompts of one `owner`, the
    cache and the API key. `drafted` tokens may be read after a stream's own; a prompt reads at most `limit` tokens
    before its next checkpoint."""

    sequence: int
    pending: int
    generating: bool
    arrival: int
    drafted: int = 0
    limit: int = 1 << 30
    owner: tuple[str, str] = ("", "")


class BatchSlice(Struct, frozen=True):
    """Read `count` of the sequence's pending tokens and `drafted` tokens after them; `last`: nothing stays pending."""

    sequence: int
    count: int
    last: bool
    drafted: int = 0


def next_in_turn(waiting: Iterable[Hashable], current: Hashable) -> Any:
    """The adapter set or sequence of the next step: the one after the current, in a ring ordered by the oldest job. New
    ones join at the end, so none waits forever."""
    order = list(dict.fromkeys(waiting))
    return order[(order.index(current) + 1) % len(order)] if current in order else order[0]


def plan_batch(work: Sequence[SequenceWork], budget: int) -> list[BatchSlice]:
    """Which rows of which sequences to decode, ordered by sequence.

    Streams come first, one row each: a stream never waits longer than one step. The rest of the micro-batch goes to
    prompts in the order of their arrival, so a long prompt is read in slices between tokens, and then to drafts.
    llama.cpp computes neighbouring sequences together, as many rows of each as all of them have, so drafts have one
    length.
    """
    streams = [each for each in work if each.generating]
    room = budget - sum(each.pending for each in streams)
    # At least one row: streams that fill the budget must not starve the prompts.
    slices = _plan_prompts([each for each in work if not each.generating], max(1, room))
    drafted = _equal_drafts([each.drafted for each in streams], room - sum(part.count for part in slices))
    slices += [BatchSlice(each.sequence, each.pending, True, rows) for each, rows in zip(streams, drafted, strict=True)]
    return sorted(slices, key=lambda part: part.sequence)


def _plan_prompts(work: list[SequenceWork], rows: int) -> list[BatchSlice]:
    """In the order of their arrival. The rows are divided among the owners of prompts: a long one of one key or cache
    does not stop the others. Short ones are read first; what an owner does not need goes to the next."""
    slices = []
    waiting: dict[tuple[str, str], list[SequenceWork]] = {}
    for each in sorted(work, key=lambda w: w.arrival):
        waiting.setdefault(each.owner, []).append(each)
    wanted = {owner: sum(min(each.pending, each.limit) for each in held) for owner, held in waiting.items()}
    for place, owner in enumerate(sorted(waiting, key=lambda owner: wanted[owner])):
        share = -(-rows // (len(waiting) - place))
        if wanted[owner] <= SHORT_PROMPT:
            share = min(rows, wanted[owner])
        for each in waiting[owner]:
            count = min(each.pending, each.limit, share)
            if count == _BLOCK:  # what is left over is read first, where few rows cost least
                count = each.pending % _BLOCK or _BLOCK
            if count > 0:
                slices.append(BatchSlice(each.sequence, count, count == each.pending))
                rows, share = rows - count, share - count
    return slices


def _equal_drafts(lengths: Sequence[int], rows: int) -> list[int]:
    """Drafts of one length, the one that tries the most tokens; shorter drafts are dropped."""
    if not any(lengths):
        return [0] * len(lengths)
    _, least = max((length * sum(n >= length for n in lengths), length) for length in set(lengths))
    length = min(least, max(0, rows) // sum(n >= least for n in lengths))
    return [length if n >= least else 0 for n in lengths]


def step_target_s(jobs: Sequence[SequenceWork], bare_s: float, max_gap_s: float, *, shared: bool) -> float:
    """How long the next step may take: every stream waits for it, and so does every prompt that arrives meanwhile.

    Nothing streams: as long as it wants; while several API keys share the context, the gap's length. One key streams
    and reads: the gap, or twice the time of its streams alone (`bare_s`) where that is longer, for then small slices
    would make prompts wait and streams not faster. Several keys: each that reads gets as much of the time as each that
    streams, so a key's prompts slow the others' streams down no more than its streams would.
    """
    streaming, reading = set[str](), set[str]()
    for each in jobs:
        (streaming if each.generating else reading).add(each.owner[1])
    if not streaming:
        return max_gap_s if shared else inf
    most = max(max_gap_s, 2 * bare_s)
    if len(streaming | reading) == 1:
        return most
    return min(most, max(FAIR_S, bare_s * (1 + len(reading) / len(streaming))))


class PromptRows:
    """How many rows of prompts a step has: as many as `step_target_s` gives time for, by the measured steps.

    A whole micro-batch of SmolLM2 takes 1.8 s on one core, for which every stream and every new prompt stands still. In
    slices of 64 rows a prompt is read as fast. With fewer, llama.cpp's flash attention on CPUs takes twice as long per
    row behind 2,000 tokens, so a slice has 64 unless they take more than `STRETCH` of the target. How long they take is
    not told by smaller ones, which would never become 64 again. Short prompts are read at once. A context that only
    reads, for one key, has whole micro-batches.
    """

    LEAST, STRETCH = 8, 3.0
    CLIFF, FORGET = 2.5, 0.995  # a row of a smaller slice costs at most so much more; per small slice
    SHARED_S = 5.0  # after the last step with several keys

    def __init__(self, most: int, max_gap_s: float) -> None:
        self._most, self._max_gap_s, self._until = most, max_gap_s or inf, 0.0
        self._bare_s = 0.0  # a step of streams alone
        # Per row of a step with prompts: what it takes at most. The first slice has 64.
        self._row_s = (max_gap_s or FAIR_S) / SHORT_PROMPT
        self._block_row_s = 0.0  # per row of a step with 64 and more
        self._target_s = inf  # of the last step

    def budget(self, jobs: Sequence[SequenceWork], now: float, turns: int = 1) -> int:
        """The rows of the next step, streams included. `jobs` are all of the context, of which `turns` groups step one
        after the other."""
        if any(each.owner[1] != jobs[0].owner[1] for each in jobs):
            self._until = now + self.SHARED_S
        target = step_target_s(jobs, self._bare_s, self._max_gap_s, shared=now < self._until) / turns
        self._target_s = target
        prompts = Counter[tuple[str, str]]()
        for each in jobs:
            if not each.generating:
                prompts[each.owner] += each.pending
        if target == inf or not prompts:
            return self._most
        short = sum(count for count in prompts.values() if count <= SHORT_PROMPT)
        streams = sum(each.generating for each in jobs)
        rows = target / self._row_s
        if rows < SHORT_PROMPT and SHORT_PROMPT * self._block_row_s <= self.STRETCH * target:
            rows = _BLOCK
        return int(min(self._most, max(rows, short + self.LEAST) + streams))

    def took(self, rows: int, seconds: float) -> None:
        """A step with prompts and so many rows in all. Each step has a cost that does not depend on them: a small one
        says how long a row takes at most, not at least."""
        row_s = seconds / max(1, rows)
        if rows >= SHORT_PROMPT:
            self._block_row_s += (row_s - self._block_row_s) * (0.5 if self._block_row_s else 1.0)
        else:
            self._block_row_s = min(max(self.FORGET * self._block_row_s, row_s / self.CLIFF), row_s)
        is_large = self._target_s == inf or 2 * rows * self._row_s >= self._target_s
        if row_s < self._row_s or is_large or seconds > self._target_s:
            self._row_s += (row_s - self._row_s) * (0.5 if row_s < self._row_s else 0.25)  # others may have interrupted

    def took_bare(self, seconds: float) -> None:
        """A step of streams alone. One that others' programs have interrupted counts little."""
        before = self._bare_s or seconds
        self._bare_s = before + 0.1 * (min(seconds, 4 * before) - before)


# --- a uniform step ---------------------------------------------------------------------------------------------------


class DecodeBatch:
    """The jobs of a context while each generates one token per step. It is valid until a job joins or leaves.

    On a fast GPU a step takes less than a millisecond, and the GPU idles from the moment a token is known until the
    next decode is launched. So everything that stays the same between steps is computed here, once.
    """

    def __init__(self, jobs: Mapping[int, LlamaCppJob]) -> None:
        self.by_sequence = jobs  # in order
        self.jobs = tuple(jobs.values())
        # No job has a mask, a script or logprobs: its sampler's tokens are its output. Few logits of some rows change
        # before: biases, penalties, and end tokens that must not come yet.
        self.is_simple = all(job.is_simple for job in self.jobs)
        self.is_greedy = all(job.is_greedy for job in self.jobs)
        self.graph_sampler = next((job.graph_sampler for job in self.jobs), None)  # of all or none
        is_batched = self.is_simple and self.graph_sampler is None and all(job.sampler.is_batched for job in self.jobs)
        is_batched = is_batched and not self.is_greedy and bool(self.jobs)
        self.sampler = BatchSampler([job.sampler for job in self.jobs]) if is_batched else None
        self._changed = [
            (row, job, job.sampler.processor)
            for row, job in enumerate(self.jobs)
            if job.must_go_on or job.sampler.processor is not None
        ]
        self._stop_ids = frozenset[int]().union(*(job.stop_ids for job in self.jobs))
        self._deadline = min((job.prompt.deadline or inf for job in self.jobs), default=inf)
        self.check_limits()

    def __len__(self) -> int:
        return len(self.jobs)

    def change(self, rows: Rows) -> None:
        """The logits of a step, before all of them are sampled together."""
        for row, job, processor in self._changed:
            if job.must_go_on:
                job.forbid_ends(rows[row])
            if processor is not None:
                processor.change(rows[row])

    def count(self, tokens: Sequence[int]) -> None:
        """What was chosen: penalties look back at it."""
        for row, _, processor in self._changed:
            if processor is not None:
                processor.count(tokens[row])

    def finishes_with(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens, one per job, end a job."""
        return self._reaches_limit or not self._stop_ids.isdisjoint(tokens)

    @property
    def must_stop(self) -> bool:
        """A job was cancelled or timed out; rebuild the batch."""
        for job in self.jobs:  # a generator would cost as much as the rest of the step
            if job.cancelled:
                return True
        return self._deadline is not inf and time.monotonic() >= self._deadline

    def append(self, tokens: Sequence[int]) -> None:
        """One token per job; the token before it is in the KV by now."""
        for job, token in zip(self.jobs, tokens, strict=True):
            job.append_decoded(token)
        self.check_limits()

    def check_limits(self) -> None:
        """Whether the next token is some job's last. Call it when tokens were appended."""
        self._reaches_limit = any(job.length + 1 >= job.limit for job in self.jobs)

    def update_slots(self) -> None:
        now = time.time()
        for job in self.jobs:
            job.slot.tokens, job.slot.last_used = job.evaluated_ids, now


# --- llama_batch ------------------------------------------------------------------------------------------------------


class LlamaBatch:
    """A `llama_batch` whose arrays are numpy's: filled by slices, not row by row."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.token: IntArray = np.zeros(capacity, np.int32)
        self.pos: IntArray = np.zeros(capacity, np.int32)
        self.seq: IntArray = np.zeros(capacity, np.int32)
        self.output: npt.NDArray[np.int8] = np.zeros(capacity, np.int8)
        self._ones: IntArray = np.ones(capacity, np.int32)
        address = self.seq.ctypes.data
        self._pointers = np.arange(address, address + 4 * capacity, 4, dtype=np.uint64)
        self.raw = lib.llama_batch()
        self.raw.token = self.token.ctypes.data_as(POINTER(c_int32))
        self.raw.pos = self.pos.ctypes.data_as(POINTER(c_int32))
        self.raw.n_seq_id = self._ones.ctypes.data_as(POINTER(c_int32))
        self.raw.seq_id = self._pointers.ctypes.data_as(POINTER(POINTER(c_int32)))
        self.raw.logits = self.output.ctypes.data_as(POINTER(ctypes.c_int8))

        self._uniform: object = None  # the DecodeBatch whose rows are in it
        self._last_tokens: Any = None  # ctypes assigns a short list in a fifth of numpy's time
        self._positions = self.pos[:0]

    @property
    def size(self) -> int:
        return int(self.raw.n_tokens)

    def clear(self) -> None:
        self.raw.n_tokens = 0
        self._uniform = None

    def fill_uniform(self, batch: DecodeBatch) -> None:
        """One row per job. For the same batch as before only tokens and positions are written."""
        if batch is not self._uniform:
            count = len(batch)
            self.seq[:count], self.output[:count] = list(batch.by_sequence), 1
            self.raw.n_tokens, self._uniform = count, batch
            self._last_tokens = (c_int32 * count).from_address(self.token.ctypes.data)
            self._positions = self.pos[:count]
        self._last_tokens[:] = [job.last_token for job in batch.jobs]
        self._positions[:] = [job.n_past - job.shift for job in batch.jobs]

    def set_tokens(self, tokens: Sequence[int]) -> None:
        """The next tokens of the uniform batch, at the positions that `advance` has set."""
        self._last_tokens[:] = tokens

    def advance(self) -> None:
        """After a uniform decode: the next one is one position further. That is known before its tokens are."""
        self._positions += 1

    def add_token(self, token: int, position: int, sequence: int) -> int:
        """A stream's row: `add` without slices, which cost ten times as much as single numbers."""
        at = self.raw.n_tokens
        self.token[at], self.pos[at], self.seq[at], self.output[at] = token, position, sequence, 1
        self.raw.n_tokens = at + 1
        return int(at)

    def add(self, ids: IntArray, start: int, sequence: int, *, last: bool, drafted: int = 0) -> int:
        """Rows of one sequence. `last` requests logits for the last row and for the `drafted` rows before it. Returns
        the first row that has logits."""
        at, end = self.size, self.size + len(ids)
        self.token[at:end] = ids
        self.pos[at:end] = np.arange(start, start + len(ids), dtype=np.int32)
        self.seq[at:end] = sequence
        self.output[at:end] = 0
        first = end - 1 - drafted
        self.output[first:end] = last
        self.raw.n_tokens = end
        return first


class VectorBatch:
    """A `llama_batch` of rows that an encoder computed, for one sequence. No row has logits: text follows."""

    def __init__(self, vectors: npt.NDArray[np.float32], positions: IntArray, sequence: int) -> None:
        count = len(vectors)
        self._vectors, self._positions = np.ascontiguousarray(vectors), np.ascontiguousarray(positions)
        self._sequence = np.full(1, sequence, np.int32)
        self._pointers = np.full(count, self._sequence.ctypes.data, np.uint64)
        self._ones, self._output = np.ones(count, np.int32), np.zeros(count, np.int8)
        self.raw = lib.llama_batch()
        self.raw.n_tokens = count
        self.raw.embd = self._vectors.ctypes.data_as(POINTER(ctypes.c_float))
        self.raw.pos = self._positions.ctypes.data_as(POINTER(c_int32))
        self.raw.n_seq_id = self._ones.ctypes.data_as(POINTER(c_int32))
        self.raw.seq_id = self._pointers.ctypes.data_as(POINTER(POINTER(c_int32)))
        self.raw.logits = self._output.ctypes.data_as(POINTER(ctypes.c_int8))
