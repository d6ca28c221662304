"""One named cache: a llama_context with its sequences, and the step that moves all its jobs one token on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct

from modelyard.core.engine import CacheInfo, CacheStats, Chunk, End, IdLogprob, Progress, Tokens
from modelyard.core.errors import ContextOverflow, Internal, ModelyardError, Overloaded, Timeout, Unavailable
from modelyard.core.events import Timings, Usage
from modelyard.engines.llama_cpp.adapters import Wardrobe
from modelyard.engines.llama_cpp.binding import Batch, lib, short
from modelyard.engines.llama_cpp.job import Job
from modelyard.engines.llama_cpp.places import Places
from modelyard.engines.llama_cpp.sample import best_of, logits_of, logprob_of
from modelyard.engines.llama_cpp.sequences import Adapters
from modelyard.engines.llama_cpp.speculate import Guesses, Speculator
from modelyard.engines.llama_cpp.step import Need, Slice, plan, turn

Emit = Callable[[Job, list[Chunk], bool], None]
Ending = tuple[str, ModelyardError | None]  # as an End has it


class Said(Struct):
    """What a job says in one step."""

    ids: list[int]
    logprobs: list[IdLogprob] | None


Heard = tuple[int, Job, Said, Ending | None]  # of which sequence's job; what it says, and why it is the last


class Cache:
    """Belongs to the engine's thread: nobody else may touch it."""

    def __init__(
        self,
        name: str,
        info: CacheInfo,
        raw: Any,
        n_vocab: int,
        ubatch: int,
        emit: Emit,
        wardrobe: Wardrobe,
        places: Places,
    ) -> None:
        self.name, self.info = name, info
        self._raw, self._n_vocab, self._ubatch, self._emit = raw, n_vocab, ubatch, emit
        self._memory = lib.llama_get_memory(raw)
        self._batch = Batch(max(ubatch, info.parallel))
        self.places, self.slots = places, places.slots
        self.jobs: dict[int, Job] = {}  # by sequence
        # A GPU is still at it when decode returns. Whoever then asks for logits waits, and that call keeps the GIL.
        self._may_wait = bool(lib.llama_supports_gpu_offload())
        self._wardrobe = wardrobe
        self._worn: Adapters = ()  # by the context, since the last step
        self.speculator: Speculator | None = None
        self._choir: Mapping[int, Job] | None = None  # all jobs, by sequence in order, while all of them speak
        self._alike = False  # all of the choir take the likeliest token
        self._aloft: Mapping[int, Job] | None = None  # the choir whose next step a GPU has been given already
        self._sent = 0.0  # when it was given
        self._ahead: Guesses = {}  # guessed for the next step of the choir
        self.evaluated = 0

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
        self._choir, self._ahead = None, {}
        slot, accepted = self.places.take(job)
        self.jobs[slot.index] = job
        job.begin(accepted.cached_tokens)
        if self.speculator is not None:
            self.speculator.begin(slot.index, job)
        self._emit(job, [accepted], False)

    # --- all jobs move on -------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.jobs)

    def step(self) -> None:
        if self._aloft is not None:
            self._step_on(self._aloft)
            return
        self._drop_cancelled()
        if not self.jobs:
            return
        began = time.perf_counter()
        jobs, speaking = self._turn()
        speculator = self.speculator if speaking else None
        guesses = self._guesses(speculator, jobs) if speculator is not None else {}
        guessed = self._speak_all(jobs) if speaking and not guesses else self._read(jobs, guesses)
        if speculator is not None and guessed is not None:
            speculator.took(len(jobs), guessed, time.perf_counter() - began)

    def _turn(self) -> tuple[Mapping[int, Job], bool]:
        """The jobs whose turn it is, and whether all of them only speak. Where all jobs do, the next step is like this
        one, until somebody comes or goes."""
        if self._choir is not None:
            return self._choir, True
        self._wear(turn((job.prompt.adapters for job in self.jobs.values()), self._worn))
        jobs = {index: job for index, job in sorted(self.jobs.items()) if job.prompt.adapters == self._worn}
        speaking = all(job.generating for job in jobs.values())
        if speaking and len(jobs) == len(self.jobs):
            self._choir, self._alike = jobs, all(job.takes_the_best for job in jobs.values())
        return jobs, speaking

    def _read(self, jobs: Mapping[int, Job], guesses: Guesses) -> int | None:
        """Prompts, guesses and streams in one decode. How many rows were guesses; None where it failed."""
        needs = [
            Need(index, job.pending, job.generating, job.arrived, len(guesses.get(index, ())), job.until_pause)
            for index, job in jobs.items()
        ]
        slices = plan(needs, self._ubatch)
        rows = self._fill(slices, guesses)
        asked = time.perf_counter()
        if not self._decoded(piece.sequence for piece in slices):
            return None
        self.places.kv.decoded(0 if any(job.generating for job in jobs.values()) else self._batch.size, asked)
        for piece in slices:
            self._advance(piece, rows[piece.sequence], guesses.get(piece.sequence, [])[: piece.guessed])
        return sum(piece.guessed for piece in slices)

    def _speak_all(self, jobs: Mapping[int, Job]) -> int | None:
        """What `_read` does where there is nothing to plan: every job one token further. On a fast GPU a step takes
        half a millisecond, so each microsecond here shows."""
        self._batch.speak(jobs)
        if not self._decoded(jobs):
            return None
        self._hear(jobs, onward=self._may_wait)
        return 0

    def _hear(self, jobs: Mapping[int, Job], *, onward: bool) -> None:
        """What all of them say after a decode. `onward`: where the next step is like this one the GPU gets it before
        anything is told, and what is told costs no time."""
        self.places.kv.decoded(0, 0.0)
        heard = self._best(jobs) if self._choir is jobs and self._alike else self._drawn(jobs)
        if self.speculator is not None:
            for index, _, said, _ in heard:
                self.speculator.heard(index, 0, 0, said.ids[0] if said.ids else -1)
        if onward and self._goes_on(jobs, heard):
            self._send(jobs)
        for index, job, said, ending in heard:
            self._tell(job, said)
            self.places.read(self.slots[index], job)
            if ending is not None:
                self._finish(index, *ending)

    def _best(self, jobs: Mapping[int, Job]) -> list[Heard]:
        """Tokens that no grammar binds and nobody asks the odds of."""
        heard: list[Heard] = []
        for (index, job), token in zip(jobs.items(), best_of(self._raw, len(jobs), self._n_vocab), strict=True):
            job.done += 1
            if token in job.stops:
                heard.append((index, job, Said([], None), ("stop", None)))
                continue
            job.append(token)
            heard.append((index, job, Said([token], None), self._ending(job)))
        return heard

    def _drawn(self, jobs: Mapping[int, Job]) -> list[Heard]:
        heard: list[Heard] = []
        for row, (index, job) in enumerate(jobs.items()):
            job.done += 1
            said = Said([], [] if job.prompt.logprobs is not None else None)
            heard.append((index, job, said, self._draw(job, row, said)))
        return heard

    def _goes_on(self, jobs: Mapping[int, Job], heard: list[Heard]) -> bool:
        """Whether the next step is as this one: nobody comes or goes, and nothing is guessed."""
        if self._choir is not jobs or any(ending is not None for *_, ending in heard):
            return False
        now = time.time()
        if any(job.cancelled or job.is_late(now) for job in jobs.values()):
            return False
        self._ahead = self.speculator.guess(jobs) if self.speculator is not None else {}
        return not self._ahead

    def _send(self, jobs: Mapping[int, Job]) -> None:
        self._sent = time.perf_counter()
        self._batch.speak(jobs)
        # One that fails is no step: the next one tries again, and fails its jobs.
        self._aloft = jobs if lib.llama_decode(self._raw, self._batch.raw) == 0 else None

    def _step_on(self, jobs: Mapping[int, Job]) -> None:
        sent = self._sent
        self._hear(self._down(jobs), onward=True)
        if self.speculator is not None:
            self.speculator.took(len(jobs), 0, time.perf_counter() - sent)

    def _guesses(self, speculator: Speculator, jobs: Mapping[int, Job]) -> Guesses:
        ahead, self._ahead = self._ahead, {}
        return ahead or speculator.guess(jobs)

    def land(self) -> None:
        """What the GPU works at ahead of time comes down: to be called before anybody comes, goes or looks at KV."""
        if self._aloft is not None:
            self._hear(self._down(self._aloft), onward=False)

    def _down(self, jobs: Mapping[int, Job]) -> Mapping[int, Job]:
        self._aloft = None
        lib.llama_synchronize(self._raw)
        return jobs

    def _decoded(self, sequences: Iterable[int]) -> bool:
        code = lib.llama_decode(self._raw, self._batch.raw)
        if code != 0:
            self._failed(list(sequences), code)
        elif self._may_wait:
            lib.llama_synchronize(self._raw)
        return bool(code == 0)

    def _wear(self, adapters: Adapters) -> None:
        if adapters != self._worn:
            self._wardrobe.put_on(self._raw, adapters)
            self._worn = adapters

    def _fill(self, slices: list[Slice], guesses: Guesses) -> dict[int, int]:
        self._batch.clear()
        rows = {}
        for piece in slices:
            index, job = piece.sequence, self.jobs[piece.sequence]
            if job.generating and not piece.guessed:
                rows[index] = self._batch.add_one(job.newest, job.done, index)
                continue
            ids = job.ids[job.done : job.done + piece.count]
            if piece.guessed:
                ids = np.concatenate((ids, np.asarray(guesses[index][: piece.guessed], np.int32)))
            rows[index] = self._batch.add(ids, job.done, index, last=piece.last, guessed=piece.guessed)
        return rows

    def _advance(self, piece: Slice, row: int, guess: list[int]) -> None:
        job, slot = self.jobs[piece.sequence], self.slots[piece.sequence]
        job.done += piece.count
        if not job.generating:
            self.evaluated += piece.count
        ending = None
        if piece.last:
            ending = self._speak(job, piece.sequence, row, guess)
        else:
            self._emit(job, [Progress(job.done, job.prompt_tokens)], False)
        self.places.read(slot, job)
        if ending is not None:
            self._finish(piece.sequence, *ending)

    def _speak(self, job: Job, index: int, row: int, guess: list[int]) -> Ending | None:
        """Draw a token after the row, and after each that was guessed for as long as the guesses are what is drawn."""
        job.prefilled()
        before, said = job.done, Said([], [] if job.prompt.logprobs is not None else None)
        ending = self._draw(job, row, said)
        for guessed in guess:
            if ending is not None or said.ids[-1] != guessed:
                break
            job.done += 1  # its KV is there already
            row += 1
            ending = self._draw(job, row, said)
        self._settle(job, index, guess, job.done - before, said)
        return ending

    def _settle(self, job: Job, index: int, guess: list[int], kept: int, said: Said) -> None:
        if kept < len(guess):
            short.memory_seq_rm(self._memory, index, job.done, -1)
        if self.speculator is not None:
            self.speculator.heard(index, len(guess), kept, said.ids[0] if said.ids else -1)
        self._tell(job, said)

    def _tell(self, job: Job, said: Said) -> None:
        if said.ids:
            self._emit(job, [Tokens(said.ids, said.logprobs)], False)

    def _draw(self, job: Job, row: int, said: Said) -> Ending | None:
        """The next token, or why there is none; and whether it was the last."""
        wanted = job.prompt.logprobs
        raw = logits_of(self._raw, row, self._n_vocab).copy() if wanted is not None else None
        try:
            token = self._pick(job, row)
        except ModelyardError as error:
            return "error", error
        if token in job.stops or token < 0:
            return "stop", None
        job.append(token)
        said.ids.append(token)
        if raw is not None and said.logprobs is not None:
            said.logprobs.append(logprob_of(raw, token, wanted or 0))
        return self._ending(job)

    def _ending(self, job: Job) -> Ending | None:
        if job.mask is not None and job.mask.is_complete:
            return "stop", None
        if job.output >= job.prompt.max_tokens:
            return "length", None
        return ("window", None) if job.length >= self.info.window else None

    def _pick(self, job: Job, row: int) -> int:
        if job.scripted is not None:
            return next(job.scripted, next(iter(job.stops), -1))
        if job.mask is None:
            return job.chain.pick(self._raw, row)
        return job.mask.pick(logits_of(self._raw, row, self._n_vocab), partial(job.chain.pick, self._raw, row))

    # --- a job goes -------------------------------------------------------------------------------------------------

    def _drop_cancelled(self) -> None:
        now = time.time()
        for index, job in list(self.jobs.items()):
            if job.cancelled:
                self._finish(index, "cancelled")
            elif job.is_late(now):
                self._finish(index, "error", Timeout("the job's deadline passed"))

    def _finish(self, index: int, reason: Any, error: ModelyardError | None = None) -> None:
        self._choir, self._ahead = None, {}
        job, slot = self.jobs.pop(index), self.slots[index]
        slot.busy = False
        if self.speculator is not None:
            self.speculator.end(index)
        job.close()
        self._emit(job, [End(reason, _usage(job), _timings(job), error)], True)

    def _failed(self, sequences: list[int], code: int) -> None:
        """Nobody dies for another: only the sequences of this very batch fail, and their KV is thrown away."""
        fault = Internal(f"llama_decode answered {code}") if code < 0 else Unavailable("the KV cache is out of cells")
        for index in sequences:
            self.places.clear(self.slots[index])
            self._finish(index, "error", fault)

    def fail_all(self, error: ModelyardError) -> None:
        self._aloft = None
        for index in list(self.jobs):
            self._finish(index, "error", error)

    def evict(self) -> None:
        for slot in self.slots:
            if not slot.busy:
                self.places.clear(slot)
        self.places.lot.clear()

    def stats(self) -> CacheStats:
        """Read on the loop while the thread goes on: numbers that may be a step apart."""
        places = self.places
        return CacheStats(places.reused, self.evaluated, places.evicted, places.stats())

    def uses(self, adapter: str) -> bool:
        """Whether a running job wears it."""
        return any(name == adapter for job in self.jobs.values() for name, _ in job.prompt.adapters)

    def forget(self, adapter: str) -> None:
        """It goes: nobody wears it, and KV of its time would be another's if its name came back."""
        if any(name == adapter for name, _ in self._worn):
            self._wear(())
        for slot in self.slots:
            if any(name == adapter for name, _ in slot.adapters):
                self.places.clear(slot)
        self.places.lot.forget(adapter)

    def close(self) -> None:
        if self.speculator is not None:
            self.speculator.close()
        lib.llama_synchronize(self._raw)
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
