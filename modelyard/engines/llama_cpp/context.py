"""A llama_context with the sequences of one or several named caches, and the step that moves all its jobs on.

    step ─→ uniform: fill the batch ─→ decode ─→ sample all rows ─→ launch the next decode (GPU) ─→ emit
         └→ mixed:   plan slices of prompts, drafts and streams ─→ decode ─→ sample ─→ emit

On a GPU a uniform step launches the next decode before it emits its tokens: that decode is in flight until the next
step takes its logits, or until `flush`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from modelyard.core.engine import Progress, Tokens
from modelyard.core.errors import Internal, ModelyardError, Unavailable
from modelyard.engines.generation_queue import TokenDispatch
from modelyard.engines.in_process import Finish
from modelyard.engines.llama_cpp.adapters import LoraAdapters
from modelyard.engines.llama_cpp.batch import (
    BatchSlice,
    DecodeBatch,
    LlamaBatch,
    PromptRows,
    SequenceWork,
    VectorBatch,
    next_in_turn,
    plan_batch,
)
from modelyard.engines.llama_cpp.binding import lib, short, waiting
from modelyard.engines.llama_cpp.graph_sampler import GraphSampler
from modelyard.engines.llama_cpp.job import LlamaCppJob, StepOutput
from modelyard.engines.llama_cpp.logit_columns import best_tokens
from modelyard.engines.llama_cpp.logits import logits_row, logits_rows, token_logprob
from modelyard.engines.llama_cpp.media import MediaEncoder, Vectors
from modelyard.engines.llama_cpp.mtp import MtpHead
from modelyard.engines.llama_cpp.options import ContextLayout, Options
from modelyard.engines.llama_cpp.sequence_manager import create_sequence_managers
from modelyard.engines.llama_cpp.sequences import AdapterSet
from modelyard.engines.llama_cpp.speculation import Drafts, Speculator
from modelyard.engines.llama_cpp.threads import AdaptiveThreads


class LlamaContext:
    """Belongs to the engine's thread."""

    def __init__(
        self,
        raw: Any,
        layout: ContextLayout,
        n_vocab: int,
        dispatch: TokenDispatch,
        adapters: LoraAdapters,
        options: Options,
    ) -> None:
        self._raw, self.layout, self._n_vocab = raw, layout, n_vocab
        self._n_ubatch = options.for_cache(layout.info).n_ubatch
        self._prompt_rows = PromptRows(self._n_ubatch, options.max_gap_ms / 1000)
        self._emit, self._emit_batch = dispatch.put, dispatch.put_batch
        self._memory = lib.llama_get_memory(raw)
        self._batch = LlamaBatch(max(self._n_ubatch, layout.info.parallel))
        self.caches = create_sequence_managers(raw, layout, options)  # by name
        self.kv = next(iter(self.caches.values())).kv
        self.jobs: dict[int, LlamaCppJob] = {}  # by sequence
        self._held: list[
            tuple[LlamaCppJob, LlamaCppJob, int]
        ] = []  # each with the job that reads so much of its prompt
        # A GPU still computes when decode returns. Asking for logits then waits, and that call keeps the GIL.
        self._is_async = bool(lib.llama_supports_gpu_offload())
        self._adapters = adapters
        self._active_adapters: AdapterSet = ()  # of the context, since the last step
        self.graph_sampler: GraphSampler | None = None  # if the graph may sample
        self.neighbours: list[LlamaContext] = []  # the other contexts of the engine, which step in turn with this one
        self.speculator: Speculator | None = None
        self.head: MtpHead | None = None  # of a model that drafts with its own layers
        self.encoder: MediaEncoder | None = None  # of a model that takes images or audio
        self.threads: AdaptiveThreads | None = None  # unless the numbers of threads are fixed
        self._uniform: DecodeBatch | None = None  # all jobs, while all of them generate
        self._in_flight: DecodeBatch | None = None  # the batch whose next decode is launched
        self._launched_at = 0.0
        self._next_drafts: Drafts = {}  # of the uniform batch
        self.shares_batch = True  # False: llama.cpp computes the architecture wrongly in company
        self._turn = -1  # the sequence of the last step, if each has its own

    def __repr__(self) -> str:
        return f"<LlamaContext {', '.join(self.caches)}: {len(self.jobs)}/{self.layout.info.parallel} running>"

    # --- jobs join ----------------------------------------------------------------------------------------------------

    def admit(self, job: LlamaCppJob) -> None:
        """It begins, unless another job is just reading what its prompt begins with: then that comes first."""
        cache = self.caches[job.cache]
        awaited = cache.awaited(job, self.jobs.values())
        if awaited is None:
            self._begin(job)
        else:
            self._held.append((job, *awaited))
            cache.held += 1

    def _release_held(self) -> None:
        """Those whose prefix is read, or whose reader is gone. They may wait for each other next."""
        held, self._held, now = self._held, [], time.monotonic()
        for job, leader, shared in held:
            finish = job.revoked(now)
            if finish is None and leader.n_past < shared and self.jobs.get(leader.slot.index) is leader:
                self._held.append((job, leader, shared))
                continue
            self.caches[job.cache].held -= 1
            if finish is None:
                self.admit(job)
            else:
                self._end_held(job, *finish)

    def _end_held(self, job: LlamaCppJob, reason: Any, error: ModelyardError | None) -> None:
        job.sampler.close()
        self._emit(job, [job.end(reason, error)], True)

    def _begin(self, job: LlamaCppJob) -> None:
        self._uniform, self._next_drafts = None, {}
        job.slot, accepted = self.caches[job.cache].assign(job)
        self.jobs[job.slot.index] = job
        job.start(accepted.cached_tokens)
        if self.graph_sampler is not None:
            self._choose_sampler(self.graph_sampler, job)
        if self.speculator is not None:
            self.speculator.begin(job.slot.index, job)
        self._emit(job, [accepted], False)

    def _choose_sampler(self, sampler: GraphSampler, new: LlamaCppJob) -> None:
        """The graph samples all jobs or none."""
        sampler.admit(new.lone_temperature, (job.lone_temperature for job in self.jobs.values()))
        for job in self.jobs.values():
            job.graph_sampler = sampler if sampler.is_active else None

    # --- a step -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        if self._in_flight is not None:
            self._step_in_flight(self._in_flight)
            return
        self._drop_ended()
        if self._held:
            self._release_held()
        if self.encoder is not None and self._uniform is None:
            self._step_media(self.encoder)
        if not self.jobs:
            return
        started = time.perf_counter()
        jobs, uniform = self._select_jobs()
        speculator = self.speculator if uniform is not None else None
        drafts = self._take_drafts(speculator, jobs) if speculator is not None else {}
        drafted = self._step_uniform(uniform) if uniform is not None and not drafts else self._step_mixed(jobs, drafts)
        if drafted is None:
            return
        seconds = time.perf_counter() - started
        if uniform is not None and not drafted:
            self._prompt_rows.took_bare(seconds)
        if speculator is not None:
            speculator.measure(len(jobs), drafted, seconds)

    def _select_jobs(self) -> tuple[Mapping[int, LlamaCppJob], DecodeBatch | None]:
        """The jobs of this step, and their uniform batch if all of them generate: those of one adapter set, or one job
        if it may not share a batch. A batch of all jobs is kept until one joins or leaves."""
        if self._uniform is not None:
            return self._uniform.by_sequence, self._uniform
        self._set_adapters(next_in_turn((job.prompt.adapters for job in self.jobs.values()), self._active_adapters))
        jobs = {index: job for index, job in sorted(self.jobs.items()) if job.prompt.adapters == self._active_adapters}
        if not self.shares_batch and len(jobs) > 1:
            self._turn = next_in_turn(jobs, self._turn)
            jobs = {self._turn: jobs[self._turn]}
        if not all(job.generating for job in jobs.values()):
            return jobs, None
        uniform = DecodeBatch(jobs)
        if len(jobs) == len(self.jobs):
            self._uniform = uniform
        return jobs, uniform

    def _take_drafts(self, speculator: Speculator, jobs: Mapping[int, LlamaCppJob]) -> Drafts:
        drafts, self._next_drafts = self._next_drafts, {}
        return drafts or speculator.draft(jobs)

    def _set_adapters(self, adapters: AdapterSet) -> None:
        if adapters != self._active_adapters:
            self._adapters.apply(self._raw, adapters)
            self._active_adapters = adapters

    def _decode(self, sequences: Iterable[int], batch: LlamaBatch | VectorBatch | None = None) -> bool:
        batch = batch or self._batch
        threads = self.threads
        code = threads.decode(self._raw, batch) if threads is not None else lib.llama_decode(self._raw, batch.raw)
        if code != 0:
            self._fail_sequences(list(sequences), code)
        elif self._is_async:
            lib.llama_synchronize(self._raw)
        if code == 0 and self.head is not None and not isinstance(batch, VectorBatch):
            self.head.read(self._batch)
        return bool(code == 0)

    # --- a uniform step -----------------------------------------------------------------------------------------------

    def _step_uniform(self, batch: DecodeBatch) -> int | None:
        """Every job one token further, without a plan. On a fast GPU a step takes half a millisecond, so each
        microsecond counts. Returns the number of drafted rows; None if the decode failed."""
        self._batch.fill_uniform(batch)
        if not self._decode(batch.by_sequence):
            return None
        if self._is_async:
            self._batch.advance()
        self._finish_uniform(batch, short.get_logits(self._raw), launch=self._is_async)
        return 0

    def _finish_uniform(self, batch: DecodeBatch, logits: int, *, launch: bool) -> None:
        """Samples and emits a token per job. With `launch` the GPU gets the next decode before anything is emitted, if
        that decode is of the same jobs."""
        tokens = self._sample_all(batch, logits) if batch.is_simple else None
        if tokens is None or batch.finishes_with(tokens):
            self._finish_each(batch, tokens, launch=launch)
            return
        launch = launch and self._uniform is batch and not batch.must_stop
        launch_now = launch and (self.speculator is None or self.speculator.is_idle)
        if launch_now:
            self._launch(batch, tokens)
        batch.append(tokens)
        if self.speculator is not None:
            self._observe(self.speculator, batch.by_sequence, tokens)
            if launch_now:
                self.speculator.draft(batch.by_sequence)  # compared with the output, to see if drafting would pay
            elif launch and self._has_no_drafts(batch):
                self._launch(batch, tokens)
        self._emit_batch(batch.jobs, tokens)
        batch.update_slots()
        self.kv.after_decode(0, 0.0)

    def _sample_all(self, batch: DecodeBatch, logits: int) -> list[int]:
        if (graph := batch.graph_sampler) is not None:
            return [graph.sample(sequence, row) for row, sequence in enumerate(batch.by_sequence)]
        rows = logits_rows(logits, len(batch), self._n_vocab)
        if batch.is_greedy or batch.sampler is not None:
            batch.change(rows)
            tokens = best_tokens(rows) if batch.sampler is None else batch.sampler.sample(rows)
            batch.count(tokens)
            return tokens
        for row, job in enumerate(batch.jobs):
            if job.must_go_on:
                job.forbid_ends(rows[row])
        return [job.sampler.sample(self._raw, row, rows[row]) for row, job in enumerate(batch.jobs)]

    def _finish_each(self, batch: DecodeBatch, tokens: list[int] | None, *, launch: bool) -> None:
        """If a job ends, has a grammar or wants logprobs. `tokens`: those that are sampled already."""
        results: list[tuple[int, LlamaCppJob, StepOutput, Finish | None]] = []
        for row, (index, job) in enumerate(batch.by_sequence.items()):
            job.n_past += 1
            output = job.new_output()
            finish = job.sample(self._raw, row, output) if tokens is None else job.accept(tokens[row], output)
            results.append((index, job, output, finish))
        if self.speculator is not None:
            first_tokens = (output.ids[0] if output.ids else -1 for _, _, output, _ in results)
            self._observe(self.speculator, batch.by_sequence, first_tokens)
        is_same = self._uniform is batch and all(finish is None for *_, finish in results)
        if launch and is_same and not batch.must_stop and self._has_no_drafts(batch):
            self._launch(batch, [output.ids[0] for _, _, output, _ in results])
        for index, job, output, finish in results:
            self._emit_output(job, output)
            self.caches[job.cache].update(job.slot, job)
            if finish is not None:
                self._finish(index, *finish)
        batch.check_limits()  # the batch continues if one job generated another's stop token
        self.kv.after_decode(0, 0.0)

    def _observe(self, speculator: Speculator, jobs: Mapping[int, LlamaCppJob], tokens: Iterable[int]) -> None:
        for index, token in zip(jobs, tokens, strict=True):
            speculator.observe(index, 0, 0, token)

    def _has_no_drafts(self, batch: DecodeBatch) -> bool:
        self._next_drafts = self.speculator.draft(batch.by_sequence) if self.speculator is not None else {}
        return not self._next_drafts

    # --- the decode in flight -----------------------------------------------------------------------------------------

    def _launch(self, batch: DecodeBatch, tokens: list[int]) -> None:
        """Decodes these tokens before they are emitted."""
        self._launched_at = time.perf_counter()
        self._batch.set_tokens(tokens)
        # If it fails, the next step decodes again and fails its jobs.
        self._in_flight = batch if lib.llama_decode(self._raw, self._batch.raw) == 0 else None
        self._batch.advance()
        if batch.sampler is not None:
            batch.sampler.prepare()

    def _step_in_flight(self, batch: DecodeBatch) -> None:
        launched_at = self._launched_at
        self._finish_in_flight(batch, launch=True)
        seconds = time.perf_counter() - launched_at
        self._prompt_rows.took_bare(seconds)
        if self.speculator is not None:
            self.speculator.measure(len(batch), 0, seconds)

    def flush(self) -> None:
        """Completes the decode in flight. Call it before jobs join or leave, or anything reads the KV."""
        if self._in_flight is not None:
            self._finish_in_flight(self._in_flight, launch=False)

    def _finish_in_flight(self, batch: DecodeBatch, *, launch: bool) -> None:
        self._in_flight = None
        logits = waiting.get_logits(self._raw)
        if self.head is not None:
            self.head.read(self._batch, ahead=1)
        self._finish_uniform(batch, logits, launch=launch)

    # --- a mixed step -------------------------------------------------------------------------------------------------

    def _step_mixed(self, jobs: Mapping[int, LlamaCppJob], drafts: Drafts) -> int | None:
        """Prompts, drafts and streams in one decode. Returns the number of drafted rows; None if the decode failed."""
        slices = plan_batch([self._work(index, drafts) for index in jobs], self._row_budget(len(jobs)))
        if not slices:  # all of them wait for the encoder
            return None
        rows = self._fill_batch(slices, drafts)
        started = time.perf_counter()
        if not self._decode(part.sequence for part in slices):
            return None
        if not all(job.generating for job in jobs.values()):
            self._prompt_rows.took(self._batch.size, time.perf_counter() - started)
        prompts_only = not any(job.generating for job in jobs.values())
        self.kv.after_decode(self._batch.size if prompts_only else 0, started)
        for part in slices:
            self._advance(part, rows[part.sequence], drafts.get(part.sequence, [])[: part.drafted])
        self._uniform = None  # accepted drafts change lengths that the uniform batch relies on
        return sum(part.drafted for part in slices)

    def _work(self, index: int, drafts: Drafts | None = None) -> SequenceWork:
        job = self.jobs[index]
        owner, drafted = (job.cache, job.prompt.scope), len((drafts or {}).get(index, ()))
        return SequenceWork(index, job.pending, job.generating, job.arrival, drafted, job.most_rows, owner)

    def _row_budget(self, selected: int) -> int:
        """The rows of a step of so many jobs. All streams of the engine wait for it, those of other contexts, too."""
        work = [self._work(index) for index in self.jobs]
        beside = [each for other in self.neighbours for index in other.jobs if (each := other._work(index)).generating]
        turns = -(-len(work) // selected) + sum(bool(other.jobs) for other in self.neighbours)
        return self._prompt_rows.budget([*work, *beside], time.monotonic(), turns)

    def _fill_batch(self, slices: list[BatchSlice], drafts: Drafts) -> dict[int, int]:
        """Returns the first row of each sequence that has logits."""
        self._batch.clear()
        rows = {}
        for part in slices:
            index, job = part.sequence, self.jobs[part.sequence]
            if job.generating and not part.drafted:
                rows[index] = self._batch.add_token(job.last_token, job.n_past - job.shift, index)
                continue
            ids = job.ids[job.n_past : job.n_past + part.count]
            if part.drafted:
                ids = np.concatenate((ids, np.asarray(drafts[index][: part.drafted], np.int32)))
            wants_all = job.wants_logits and not job.generating
            drafted = len(ids) - 1 if wants_all else part.drafted
            position = job.n_past - job.shift
            rows[index] = self._batch.add(ids, position, index, last=part.last or wants_all, drafted=drafted)
        return rows

    def _advance(self, part: BatchSlice, row: int, draft: list[int]) -> None:
        job = self.jobs[part.sequence]
        cache = self.caches[job.cache]
        job.n_past += part.count
        if not job.generating:
            cache.evaluated += part.count
            if job.prompt.prompt_logprobs is not None and job.n_past - part.count >= job.logprobs_from:
                row = self._report_prompt(job, row, part.count, job.prompt.prompt_logprobs)
        finish: Finish | None = None
        if part.last and not job.prompt.max_tokens:
            job.mark_prefilled()
            finish = "length", None
        elif part.last:
            finish = self._sample_drafted(job, part.sequence, row, draft)
        elif job.prompt.prompt_logprobs is None:
            self._emit(job, [Progress(job.n_past, job.prompt_tokens)], False)
        cache.update(job.slot, job)
        if finish is not None:
            self._finish(part.sequence, *finish)

    def _report_prompt(self, job: LlamaCppJob, row: int, count: int, top: int) -> int:
        """The log probability of the token after each of these rows. Returns the last row."""
        following = job.ids[job.n_past - count + 1 : job.n_past + 1].tolist()  # none follows the prompt's last token
        logprobs = [
            token_logprob(logits_row(self._raw, row + at, self._n_vocab), token, top, ranked=True)
            for at, token in enumerate(following)
        ]
        self._emit(job, [Progress(job.n_past, job.prompt_tokens, logprobs)], False)
        return row + count - 1

    def _sample_drafted(self, job: LlamaCppJob, index: int, row: int, draft: list[int]) -> Finish | None:
        """Samples after the row, and after each drafted row as long as the sampled token is the drafted one."""
        job.mark_prefilled()
        before, output = job.n_past, job.new_output()
        finish = job.sample(self._raw, row, output)
        for token in draft:
            if finish is not None or output.ids[-1] != token:
                break
            job.n_past += 1  # its KV is computed
            row += 1
            finish = job.sample(self._raw, row, output)
        accepted, cache = job.n_past - before, self.caches[job.cache]
        cache.guessed, cache.accepted = cache.guessed + len(draft), cache.accepted + accepted
        if accepted < len(draft):
            short.memory_seq_rm(self._memory, index, job.n_past - job.shift, -1)
        if self.speculator is not None:
            self.speculator.observe(index, len(draft), accepted, output.ids[0] if output.ids else -1)
        self._emit_output(job, output)
        return finish

    def _emit_output(self, job: LlamaCppJob, output: StepOutput) -> None:
        if output.ids or output.logprobs:
            self._emit(job, [Tokens(output.ids, output.logprobs)], False)

    # --- images and audio ---------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        if self.encoder is None or not self.jobs:
            return bool(self.jobs or self._held)
        return any(not job.is_waiting for job in self.jobs.values())

    def _step_media(self, encoder: MediaEncoder) -> None:
        """Reads a micro-batch of the first job whose image is encoded, and requests what the others read next."""
        ready = []
        for job in self.jobs.values():
            if job.next_chunk is None:
                continue
            if job.vectors is None:
                job.vectors = encoder.request(job.next_chunk)
            if job.vectors.done():
                ready.append(job)
        if not ready:
            return
        job = min(ready, key=lambda job: job.arrival)
        try:
            vectors = job.vectors.result() if job.vectors is not None else None
        except ModelyardError as error:
            self._finish(job.slot.index, "error", error)
            return
        if vectors is not None:
            self._read_vectors(job, vectors)

    def _read_vectors(self, job: LlamaCppJob, vectors: Vectors) -> None:
        """A chunk that is read without a causal mask is one decode: each of its rows sees all of them."""
        chunk, cache = job.chunks[0], self.caches[job.cache]
        first = job.n_past - chunk.start
        count = min(self._row_budget(len(self.jobs)), chunk.tokens - first) if chunk.is_causal else chunk.tokens
        self._set_adapters(job.prompt.adapters)
        batch = VectorBatch(vectors[first : first + count], chunk.positions[:, first : first + count], job.slot.index)
        if not chunk.is_causal:
            lib.llama_set_causal_attn(self._raw, False)
        try:
            if not self._decode([job.slot.index], batch):
                return
        finally:
            if not chunk.is_causal:
                lib.llama_set_causal_attn(self._raw, True)
        self.kv.after_decode(0, 0.0)
        job.advance_media(count)
        cache.evaluated += count
        self._emit(job, [Progress(job.n_past, job.prompt_tokens)], False)
        cache.update(job.slot, job)

    # --- jobs leave ---------------------------------------------------------------------------------------------------

    def _drop_ended(self) -> None:
        now = time.monotonic()
        for index, job in list(self.jobs.items()):
            if (finish := job.revoked(now)) is not None:
                self._finish(index, *finish)

    def _finish(self, index: int, reason: Any, error: ModelyardError | None = None) -> None:
        self._uniform, self._next_drafts = None, {}
        job = self.jobs.pop(index)
        job.slot.busy = False
        if self.speculator is not None:
            self.speculator.end(index)
        job.sampler.close()
        self._emit(job, [job.end(reason, error)], True)

    def _fail_sequences(self, sequences: list[int], code: int) -> None:
        """Only the sequences of the failed batch end; their KV is dropped."""
        error = Internal(f"llama_decode failed with code {code}") if code < 0 else Unavailable("the KV cache is full")
        for index in sequences:
            job = self.jobs[index]
            self.caches[job.cache].clear(job.slot)
            self._finish(index, "error", error)

    def fail_all(self, error: ModelyardError) -> None:
        self._in_flight = None
        for index in list(self.jobs):
            self._finish(index, "error", error)
        for job, *_ in self._held:
            self._end_held(job, "error", error)
        self._held = []

    # --- the rest -----------------------------------------------------------------------------------------------------

    def uses_adapter(self, adapter: str) -> bool:
        jobs = (*self.jobs.values(), *(job for job, *_ in self._held))
        return any(name == adapter for job in jobs for name, _ in job.prompt.adapters)

    def drop_adapter(self, adapter: str) -> None:
        """Before it is unloaded."""
        if any(name == adapter for name, _ in self._active_adapters):
            self._set_adapters(())
        for cache in self.caches.values():
            cache.drop_adapter(adapter)

    def close(self) -> None:
        if self.speculator is not None:
            self.speculator.close()
        lib.llama_synchronize(self._raw)
        lib.llama_free(self._raw)
        if self.graph_sampler is not None:
            self.graph_sampler.close()
