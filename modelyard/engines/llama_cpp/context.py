"""One named cache: a llama_context with its sequences, and the step that moves all its jobs one token on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from modelyard.core.engine import CacheInfo, CacheStats, Chunk, Progress, Tokens
from modelyard.core.errors import ContextOverflow, Internal, ModelyardError, Overloaded, Timeout, Unavailable
from modelyard.engines.llama_cpp import job as speech
from modelyard.engines.llama_cpp.batch import BatchSlice, DecodeBatch, SequenceWork, next_adapters, plan_batch
from modelyard.engines.llama_cpp.binding import LlamaBatch, lib, short, waiting
from modelyard.engines.llama_cpp.job import Finish, LlamaCppJob, StepOutput
from modelyard.engines.llama_cpp.lora import LoraAdapters
from modelyard.engines.llama_cpp.sampler import logits_rows
from modelyard.engines.llama_cpp.sequence_manager import SequenceManager
from modelyard.engines.llama_cpp.sequences import AdapterSet
from modelyard.engines.llama_cpp.speculation import Drafts, Speculator

Emit = Callable[[LlamaCppJob, list[Chunk], bool], None]
EmitAll = Callable[[Sequence[LlamaCppJob], list[int]], None]
Heard = tuple[
    int, LlamaCppJob, StepOutput, Finish | None
]  # of which sequence's job; what it says, and why it is the last


class LlamaContext:
    """Belongs to the engine's thread: nobody else may touch it."""

    def __init__(
        self,
        name: str,
        info: CacheInfo,
        raw: Any,
        n_vocab: int,
        ubatch: int,
        emit: Emit,
        emit_all: EmitAll,
        wardrobe: LoraAdapters,
        places: SequenceManager,
    ) -> None:
        self.name, self.info = name, info
        self._raw, self._n_vocab, self._ubatch = raw, n_vocab, ubatch
        self._emit, self._emit_all = emit, emit_all
        self._memory = lib.llama_get_memory(raw)
        self._batch = LlamaBatch(max(ubatch, info.parallel))
        self.places, self.slots = places, places.slots
        self.jobs: dict[int, LlamaCppJob] = {}  # by sequence
        # A GPU is still at it when decode returns. Whoever then asks for logits waits, and that call keeps the GIL.
        self._may_wait = bool(lib.llama_supports_gpu_offload())
        self._wardrobe = wardrobe
        self._worn: AdapterSet = ()  # by the context, since the last step
        self.speculator: Speculator | None = None
        self._choir: DecodeBatch | None = None  # all jobs, while all of them speak
        self._aloft: DecodeBatch | None = None  # the choir whose next step a GPU has been given already
        self._sent = 0.0  # when it was given
        self._ahead: Drafts = {}  # guessed for the next step of the choir
        self.evaluated = 0

    def __repr__(self) -> str:
        return f"<Cache {self.name}: {len(self.jobs)}/{self.info.parallel} running>"

    # --- a job comes ------------------------------------------------------------------------------------------------

    def check(self, job: LlamaCppJob) -> None:
        """Raises what keeps the job from being admitted."""
        if job.prompt_tokens >= self.info.window:
            raise ContextOverflow(job.prompt_tokens, self.info.window)
        if len(self.jobs) >= self.info.parallel:
            raise Overloaded(f"the cache {self.name!r} has no free sequence")

    def admit(self, job: LlamaCppJob) -> None:
        self._choir, self._ahead = None, {}
        slot, accepted = self.places.take(job)
        self.jobs[slot.index] = job
        job.begin(accepted.cached_tokens, self.info.window)
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
        jobs, choir = self._turn()
        speculator = self.speculator if choir is not None else None
        guesses = self._guesses(speculator, jobs) if speculator is not None else {}
        guessed = self._speak_all(choir) if choir is not None and not guesses else self._read(jobs, guesses)
        if speculator is not None and guessed is not None:
            speculator.took(len(jobs), guessed, time.perf_counter() - began)

    def _turn(self) -> tuple[Mapping[int, LlamaCppJob], DecodeBatch | None]:
        """The jobs whose turn it is, and the choir that they are where all of them only speak. Where all jobs do, the
        next step is like this one, until somebody comes or goes."""
        if self._choir is not None:
            return self._choir.jobs, self._choir
        self._wear(next_adapters((job.prompt.adapters for job in self.jobs.values()), self._worn))
        jobs = {index: job for index, job in sorted(self.jobs.items()) if job.prompt.adapters == self._worn}
        if not all(job.generating for job in jobs.values()):
            return jobs, None
        choir = DecodeBatch(jobs, self.slots)
        if len(jobs) == len(self.jobs):
            self._choir = choir
        return jobs, choir

    def _read(self, jobs: Mapping[int, LlamaCppJob], guesses: Drafts) -> int | None:
        """Prompts, guesses and streams in one decode. How many rows were guesses; None where it failed."""
        needs = [
            SequenceWork(index, job.pending, job.generating, job.arrived, len(guesses.get(index, ())), job.until_pause)
            for index, job in jobs.items()
        ]
        slices = plan_batch(needs, self._ubatch)
        rows = self._fill(slices, guesses)
        asked = time.perf_counter()
        if not self._decoded(piece.sequence for piece in slices):
            return None
        self.places.kv.decoded(0 if any(job.generating for job in jobs.values()) else self._batch.size, asked)
        for piece in slices:
            self._advance(piece, rows[piece.sequence], guesses.get(piece.sequence, [])[: piece.guessed])
        self._choir = None  # some are further on than a choir counts
        return sum(piece.guessed for piece in slices)

    # --- and where all of them speak --------------------------------------------------------------------------------

    def _speak_all(self, choir: DecodeBatch) -> int | None:
        """What `_read` does where there is nothing to plan: every job one token further. On a fast GPU a step takes
        half a millisecond, so each microsecond here shows."""
        self._batch.speak(choir.jobs)
        if not self._decoded(choir.jobs):
            return None
        if self._may_wait:
            self._batch.move_on()
        self._hear(choir, short.get_logits(self._raw), onward=self._may_wait)
        return 0

    def _hear(self, choir: DecodeBatch, logits: int, *, onward: bool) -> None:
        """What all of them say after a decode. `onward`: where the next step is like this one the GPU gets it before
        anything is told, and what is told costs no time."""
        tokens = self._sung(choir, logits) if choir.is_plain else None
        if tokens is None or choir.ends_with(tokens):
            self._hear_each(choir, tokens, onward=onward)
            return
        onward = onward and self._choir is choir and not choir.is_disturbed
        at_once = onward and (self.speculator is None or self.speculator.rests)
        if at_once:
            self._send(choir, tokens)
        choir.say(tokens)
        if self.speculator is not None:
            self._compare(self.speculator, choir.jobs, tokens)
            if at_once:
                self.speculator.guess(choir.jobs)  # what comes next tells whether it would have been worth trying
            elif onward and self._guesses_nothing(choir):
                self._send(choir, tokens)
        self._emit_all(choir.singers, tokens)
        choir.hold()
        self.places.kv.decoded(0, 0.0)

    def _sung(self, choir: DecodeBatch, logits: int) -> list[int]:
        rows = logits_rows(logits, len(choir), self._n_vocab)
        if choir.takes_the_best:
            best: list[int] = rows.argmax(1).tolist()
            return best
        if choir.throw is not None:
            return choir.throw.pick(rows)
        return [job.chain.pick(self._raw, row, rows[row]) for row, job in enumerate(choir.singers)]

    def _compare(self, speculator: Speculator, jobs: Mapping[int, LlamaCppJob], tokens: Iterable[int]) -> None:
        for index, token in zip(jobs, tokens, strict=True):
            speculator.heard(index, 0, 0, token)

    def _hear_each(self, choir: DecodeBatch, tokens: list[int] | None, *, onward: bool) -> None:
        """Where one ends or is held to a grammar, or somebody asks for odds. `tokens`: what is drawn already."""
        heard = self._drawn(choir, tokens)
        if self.speculator is not None:
            self._compare(self.speculator, choir.jobs, (said.ids[0] if said.ids else -1 for _, _, said, _ in heard))
        ends = any(ending is not None for *_, ending in heard)
        if onward and self._choir is choir and not (ends or choir.is_disturbed) and self._guesses_nothing(choir):
            self._send(choir, [said.ids[0] for _, _, said, _ in heard])
        for index, job, said, ending in heard:
            self._tell(job, said)
            self.places.read(self.slots[index], job)
            if ending is not None:
                self._finish(index, *ending)
        choir.look_ahead()  # it may go on: one has said what ends another
        self.places.kv.decoded(0, 0.0)

    def _drawn(self, choir: DecodeBatch, tokens: list[int] | None) -> list[Heard]:
        heard: list[Heard] = []
        for row, (index, job) in enumerate(choir.jobs.items()):
            job.done += 1
            said = speech.new_output(job)
            ending = self._draw(job, row, said) if tokens is None else speech.append_token(job, tokens[row], said)
            heard.append((index, job, said, ending))
        return heard

    def _guesses_nothing(self, choir: DecodeBatch) -> bool:
        self._ahead = self.speculator.guess(choir.jobs) if self.speculator is not None else {}
        return not self._ahead

    def _send(self, choir: DecodeBatch, tokens: list[int]) -> None:
        """The next step, before this one is told: `tokens` are what was said in it."""
        self._sent = time.perf_counter()
        self._batch.go_on(tokens)
        # One that fails is no step: the next one tries again, and fails its jobs.
        self._aloft = choir if lib.llama_decode(self._raw, self._batch.raw) == 0 else None
        self._batch.move_on()

    def _step_on(self, choir: DecodeBatch) -> None:
        sent = self._sent
        self._hear(choir, self._down(), onward=True)
        if self.speculator is not None:
            self.speculator.took(len(choir), 0, time.perf_counter() - sent)

    def _guesses(self, speculator: Speculator, jobs: Mapping[int, LlamaCppJob]) -> Drafts:
        ahead, self._ahead = self._ahead, {}
        return ahead or speculator.guess(jobs)

    def land(self) -> None:
        """What the GPU works at ahead of time comes down: to be called before anybody comes, goes or looks at KV."""
        if self._aloft is not None:
            self._hear(self._aloft, self._down(), onward=False)

    def _down(self) -> int:
        """Wait for it; where its logits are."""
        self._aloft = None
        logits: int = waiting.get_logits(self._raw)
        return logits

    def _decoded(self, sequences: Iterable[int]) -> bool:
        code = lib.llama_decode(self._raw, self._batch.raw)
        if code != 0:
            self._failed(list(sequences), code)
        elif self._may_wait:
            lib.llama_synchronize(self._raw)
        return bool(code == 0)

    def _wear(self, adapters: AdapterSet) -> None:
        if adapters != self._worn:
            self._wardrobe.put_on(self._raw, adapters)
            self._worn = adapters

    def _fill(self, slices: list[BatchSlice], guesses: Drafts) -> dict[int, int]:
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

    def _advance(self, piece: BatchSlice, row: int, guess: list[int]) -> None:
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

    def _speak(self, job: LlamaCppJob, index: int, row: int, guess: list[int]) -> Finish | None:
        """Draw a token after the row, and after each that was guessed for as long as the guesses are what is drawn."""
        job.prefilled()
        before, said = job.done, speech.new_output(job)
        ending = self._draw(job, row, said)
        for guessed in guess:
            if ending is not None or said.ids[-1] != guessed:
                break
            job.done += 1  # its KV is there already
            row += 1
            ending = self._draw(job, row, said)
        self._settle(job, index, guess, job.done - before, said)
        return ending

    def _draw(self, job: LlamaCppJob, row: int, said: StepOutput) -> Finish | None:
        return speech.sample_token(self._raw, self._n_vocab, job, row, said)

    def _settle(self, job: LlamaCppJob, index: int, guess: list[int], kept: int, said: StepOutput) -> None:
        if kept < len(guess):
            short.memory_seq_rm(self._memory, index, job.done, -1)
        if self.speculator is not None:
            self.speculator.heard(index, len(guess), kept, said.ids[0] if said.ids else -1)
        self._tell(job, said)

    def _tell(self, job: LlamaCppJob, said: StepOutput) -> None:
        if said.ids:
            self._emit(job, [Tokens(said.ids, said.logprobs)], False)

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
        self._emit(job, [speech.end(job, reason, error)], True)

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
