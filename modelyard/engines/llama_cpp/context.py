"""One named cache: a llama_context with its sequences, and the step that moves all its jobs one token on."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from modelyard.core.engine import Accepted, CacheInfo, Chunk, End, Progress, Tokens
from modelyard.core.errors import ContextOverflow, Internal, ModelyardError, Overloaded, Timeout, Unavailable
from modelyard.core.events import Timings, Usage
from modelyard.engines.llama_cpp import sequences
from modelyard.engines.llama_cpp.adapters import Wardrobe
from modelyard.engines.llama_cpp.binding import Batch, lib, short
from modelyard.engines.llama_cpp.job import Job
from modelyard.engines.llama_cpp.sample import logits_of, logprob_of
from modelyard.engines.llama_cpp.sequences import Adapters, Slot
from modelyard.engines.llama_cpp.step import Need, Slice, plan, turn

Emit = Callable[[Job, list[Chunk], bool], None]

_EMPTY = np.zeros(0, np.int32)
_COPY_FROM = 256  # shared tokens from which copying KV beats reading them again


class Cache:
    """Belongs to the engine's thread: nobody else may touch it."""

    def __init__(
        self, name: str, info: CacheInfo, raw: Any, n_vocab: int, ubatch: int, emit: Emit, wardrobe: Wardrobe
    ) -> None:
        self.name, self.info = name, info
        self._raw, self._n_vocab, self._ubatch, self._emit = raw, n_vocab, ubatch, emit
        self._memory = lib.llama_get_memory(raw)
        model = lib.llama_get_model(raw)
        self._n_swa: int = lib.llama_model_n_swa(model)
        self._only_forward: bool = lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)
        self._batch = Batch(max(ubatch, info.parallel))
        self.slots = [Slot(index, _EMPTY) for index in range(info.parallel)]
        self.jobs: dict[int, Job] = {}  # by sequence
        self._wardrobe = wardrobe
        self._worn: Adapters = ()  # by the context, since the last step
        self._clock = 0
        self.reused = self.evaluated = 0

    def __repr__(self) -> str:
        return f"<Cache {self.name}: {len(self.jobs)}/{self.info.parallel} running>"

    # --- a job comes ------------------------------------------------------------------------------------------------

    def check(self, job: Job) -> None:
        """Raises what keeps the job from being admitted."""
        if job.prompt_tokens >= self.info.window:
            raise ContextOverflow(job.prompt_tokens, self.info.window)
        if len(self.jobs) >= self.info.parallel:
            raise Overloaded(f"the cache {self.name!r} has no free sequence")

    def admit(self, job: Job) -> None:
        adapters = job.prompt.adapters
        choice = sequences.choose(self.slots, job.ids, job.prompt.session, adapters)
        keep = self._prepare(choice, job)
        slot = self.slots[choice.index]
        slot.tokens, slot.adapters = job.ids[:keep], adapters
        slot.session, slot.priority, slot.busy = job.prompt.session, job.prompt.priority, True
        self._clock += 1
        slot.used = self._clock
        self.jobs[choice.index] = job
        job.begin(keep)
        self.reused += keep
        self._emit(job, [Accepted(keep, keep if keep < len(job.ids) else None, choice.evicted)], False)

    def _prepare(self, choice: sequences.Choice, job: Job) -> int:
        """Make the chosen sequence hold exactly the shared prefix; how long it is. One token is always read anew:
        its logits are what the first new token is sampled from."""
        source, shared = sequences.donor(self.slots, job.ids, choice, job.prompt.adapters)
        keep = min(choice.keep, len(job.ids) - 1)
        if shared - keep >= _COPY_FROM:
            keep = self._copy(source, choice.index, min(shared, len(job.ids) - 1))
        return self._rewind(choice.index, keep)

    def _copy(self, source: int, target: int, keep: int) -> int:
        # A partial copy between streams is an assertion in llama.cpp: copy all, then cut.
        short.memory_seq_rm(self._memory, target, -1, -1)
        short.memory_seq_cp(self._memory, source, target, -1, -1)
        return keep

    def _rewind(self, index: int, keep: int) -> int:
        """Cut the sequence to `keep` tokens, or to none where the model cannot go back."""
        if keep > 0 and short.memory_seq_rm(self._memory, index, keep, -1) and self._holds(index, keep):
            return keep
        short.memory_seq_rm(self._memory, index, -1, -1)
        return 0

    def _holds(self, index: int, keep: int) -> bool:
        """llama.cpp says yes to a cut although what a sliding window needs is gone: look at what is really there."""
        oldest = short.memory_seq_pos_min(self._memory, index)
        newest = short.memory_seq_pos_max(self._memory, index)
        return sequences.intact(oldest, newest, keep, n_swa=self._n_swa, only_forward=self._only_forward)

    # --- all jobs move on -------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.jobs)

    def step(self) -> None:
        self._drop_cancelled()
        if not self.jobs:
            return
        self._wear(turn((job.prompt.adapters for job in self.jobs.values()), self._worn))
        needs = [
            Need(index, job.pending, job.generating, job.arrived)
            for index, job in self.jobs.items()
            if job.prompt.adapters == self._worn
        ]
        slices = plan(needs, self._ubatch)
        rows = self._fill(slices)
        code = lib.llama_decode(self._raw, self._batch.raw)
        if code != 0:
            self._failed(slices, code)
            return
        for piece in slices:
            self._advance(piece, rows[piece.sequence])

    def _wear(self, adapters: Adapters) -> None:
        if adapters != self._worn:
            self._wardrobe.put_on(self._raw, adapters)
            self._worn = adapters

    def _fill(self, slices: list[Slice]) -> dict[int, int]:
        self._batch.clear()
        rows = {}
        for piece in slices:
            job = self.jobs[piece.sequence]
            ids = job.ids[job.done : job.done + piece.count]
            rows[piece.sequence] = self._batch.add(ids, job.done, piece.sequence, last=piece.last)
        return rows

    def _advance(self, piece: Slice, row: int) -> None:
        job, slot = self.jobs[piece.sequence], self.slots[piece.sequence]
        job.done += piece.count
        slot.tokens = job.ids[: job.done]
        if not job.generating:
            self.evaluated += piece.count
        if not piece.last:
            self._emit(job, [Progress(job.done, job.prompt_tokens)], False)
            return
        self._sample(job, piece.sequence, row)

    def _sample(self, job: Job, index: int, row: int) -> None:
        job.prefilled()
        wanted = job.prompt.logprobs
        raw = logits_of(self._raw, row, self._n_vocab).copy() if wanted is not None else None
        try:
            token = self._pick(job, row)
        except ModelyardError as error:
            self._finish(index, "error", error)
            return
        if token in job.stops:
            self._finish(index, "stop")
            return
        job.append(token)
        logprobs = [logprob_of(raw, token, wanted or 0)] if raw is not None else None
        self._emit(job, [Tokens([token], logprobs)], False)
        if job.mask is not None and job.mask.is_complete:
            self._finish(index, "stop")
        elif job.output >= job.prompt.max_tokens:
            self._finish(index, "length")
        elif len(job.ids) >= self.info.window:
            self._finish(index, "window")

    def _pick(self, job: Job, row: int) -> int:
        choose = partial(job.chain.pick, self._raw, row)
        return choose() if job.mask is None else job.mask.pick(logits_of(self._raw, row, self._n_vocab), choose)

    # --- a job goes -------------------------------------------------------------------------------------------------

    def _drop_cancelled(self) -> None:
        now = time.time()
        for index, job in list(self.jobs.items()):
            if job.cancelled:
                self._finish(index, "cancelled")
            elif job.is_late(now):
                self._finish(index, "error", Timeout("the job's deadline passed"))

    def _finish(self, index: int, reason: Any, error: ModelyardError | None = None) -> None:
        job, slot = self.jobs.pop(index), self.slots[index]
        slot.busy = False
        job.close()
        self._emit(job, [End(reason, _usage(job), _timings(job), error)], True)

    def _failed(self, slices: list[Slice], code: int) -> None:
        """Nobody dies for another: only the sequences of this very batch fail, and their KV is thrown away."""
        fault = Internal(f"llama_decode answered {code}") if code < 0 else Unavailable("the KV cache is out of cells")
        for piece in slices:
            short.memory_seq_rm(self._memory, piece.sequence, -1, -1)
            self.slots[piece.sequence].tokens = _EMPTY
            self._finish(piece.sequence, "error", fault)

    def fail_all(self, error: ModelyardError) -> None:
        for index in list(self.jobs):
            self._finish(index, "error", error)

    def evict(self) -> None:
        for slot in self.slots:
            if not slot.busy:
                self._clear(slot)

    def uses(self, adapter: str) -> bool:
        """Whether a running job wears it."""
        return any(name == adapter for job in self.jobs.values() for name, _ in job.prompt.adapters)

    def forget(self, adapter: str) -> None:
        """It goes: nobody wears it, and KV of its time would be another's if its name came back."""
        if any(name == adapter for name, _ in self._worn):
            self._wear(())
        for slot in self.slots:
            if any(name == adapter for name, _ in slot.adapters):
                self._clear(slot)

    def _clear(self, slot: Slot) -> None:
        short.memory_seq_rm(self._memory, slot.index, -1, -1)
        slot.tokens, slot.session, slot.adapters = _EMPTY, None, ()

    def close(self) -> None:
        lib.llama_free(self._raw)


def _usage(job: Job) -> Usage:
    return Usage(job.prompt_tokens, job.cached, job.output)


def _timings(job: Job) -> Timings:
    now, first = time.perf_counter(), job.first_at
    return Timings(
        prefill=first - job.began if first else None,
        first_token=first - job.began if first else None,
        decode=now - first if first else None,
        backend=now - job.began,
        total=now - job.began,
    )
