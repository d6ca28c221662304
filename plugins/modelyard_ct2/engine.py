"""CTranslate2 in process: the event loop decides which jobs form a batch; each batch runs in a worker thread.

Everything except a running batch belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from modelyard.core.engine import Accepted, Control, EngineInfo, EngineSpec, EngineStats, OnProgress, Prompt, Tokens
from modelyard.core.errors import ENGINE_DIED, Internal, InvalidRequest, ModelyardError, Unavailable, Unsupported
from modelyard.core.tokenizer import IdLogprob
from modelyard.engines.generation_queue import TokenDispatch
from modelyard.engines.in_process import InProcessEngine, InProcessJob, warn_about_trained_length
from modelyard_ct2.model_folder import WEIGHTS, find_folder, read_trained_length, read_vocabulary
from modelyard_ct2.options import CAPABILITIES, Ct2Options, generate_arguments, is_beam_search

log = logging.getLogger(__name__)

_SLACK = 16  # tokens in which the prompts of a batch may differ: those beyond the shortest are read one by one


class Ct2Job(InProcessJob):
    """While its batch runs it belongs to the batch's thread."""

    def __init__(
        self,
        prompt: Prompt,
        loop: asyncio.AbstractEventLoop,
        cache: str,
        window: int,
        options: Ct2Options,
        on_cancel: Callable[[], None],
    ) -> None:
        super().__init__(prompt, loop, cache, window)
        self._on_cancel = on_cancel
        self.stop_ids = frozenset(prompt.stop_ids)
        self.arguments = generate_arguments(prompt, self.max_output, options)  # of `generate_batch`

    def cancel(self) -> None:
        super().cancel()
        self._on_cancel()


def next_batch(waiting: Sequence[Ct2Job], slack: int = _SLACK) -> list[Ct2Job]:
    """The oldest job leads. Jobs join it that have the same arguments and a prompt of nearly the same length:
    CTranslate2 reads a batch in one pass only up to its shortest prompt, and token by token from there.

    The longest prompt comes first: then CTranslate2 keeps the order of rows, also in its logits. Pure.
    """
    leader = waiting[0]
    shortest = longest = leader.prompt_tokens
    chosen: list[Ct2Job] = []
    for job in waiting:
        low, high = min(shortest, job.prompt_tokens), max(longest, job.prompt_tokens)
        if job.arguments == leader.arguments and high - low <= slack:
            shortest, longest = low, high
            chosen.append(job)
    return sorted(chosen, key=lambda job: -job.prompt_tokens)


class Ct2Batch:
    """Runs in a worker thread and ends its jobs one by one. Any thread may set `error` to stop it.

    Tokens are flushed once per step, after the last row: if the event loop woke earlier, it would hold the GIL against
    the callbacks that are still to come. While CTranslate2 computes the next step, the loop has the GIL for itself.
    """

    def __init__(self, jobs: list[Ct2Job], vocabulary: Sequence[str], dispatch: TokenDispatch) -> None:
        self.jobs, self._vocabulary, self._dispatch = jobs, vocabulary, dispatch
        self.error: ModelyardError | None = None
        requested = [job.prompt.logprobs for job in jobs if job.prompt.logprobs is not None]
        self._logprobs, self._top = bool(requested), max(requested, default=0)
        self._step = self._last_row = -1
        self._rows: list[int] = []  # the jobs that have a row in this step
        self._logits: npt.NDArray[np.float32] | None = None

    def __repr__(self) -> str:
        return f"<Ct2Batch of {len(self.jobs)}, {sum(not job.ended for job in self.jobs)} running>"

    def run(self, generator: Any) -> None:
        """Returns when every job has ended."""
        prompts = [[self._vocabulary[id] for id in job.prompt.ids] for job in self.jobs]
        arguments = dict(self.jobs[0].arguments)
        arguments["end_token"] = list(arguments.get("end_token", ()))  # empty: the callback knows each job's own
        arguments["include_prompt_in_result"] = False
        try:
            if is_beam_search(self.jobs[0].prompt.sampling):
                for job, result in zip(self.jobs, generator.generate_batch(prompts, **arguments), strict=True):
                    self._end_beam_search(job, list(result.sequences_ids[0]))
                return
            generator.generate_batch(
                prompts,
                max_length=max(job.max_output for job in self.jobs),
                return_scores=self._logprobs,
                return_logits_vocab=self._top > 0,
                callback=self._on_token,
                **arguments,
            )
        finally:
            self._dispatch.flush()

    def _on_token(self, result: Any) -> bool:
        """CTranslate2 calls this once per token and job, row after row; True ends the job."""
        if result.step != self._step:
            self._begin_step(result)
        ended = self._take_token(self.jobs[result.batch_id], result)
        if result.batch_id >= self._last_row:
            self._dispatch.flush()
        return ended

    def _begin_step(self, result: Any) -> None:
        """The logits of all rows come with the first token of a step only."""
        self._step = result.step
        self._rows = [index for index, job in enumerate(self.jobs) if not job.ended]
        self._last_row = self._rows[-1] if self._rows else -1
        if self._top:
            self._logits = _to_numpy(result.logits)

    def _take_token(self, job: Ct2Job, result: Any) -> bool:
        if job.ended or self._end_if_revoked(job):
            return True
        token: int = result.token_id
        if token in job.stop_ids:
            self._end(job, "stop")
            return True
        job.count_output()
        self._dispatch.put(job, [Tokens([token], self._token_logprobs(job, result))])
        if job.output_tokens < job.max_output:
            return False
        self._end(job, job.limit_reason)
        return True

    def _end_beam_search(self, job: Ct2Job, ids: list[int]) -> None:
        if self._end_if_revoked(job):
            return
        stopped = bool(ids) and ids[-1] in job.stop_ids
        if output := ids[:-1] if stopped else ids:
            job.count_output(len(output))
            self._dispatch.put(job, [Tokens(output)])
        self._end(job, "stop" if stopped else job.limit_reason)

    def _end_if_revoked(self, job: Ct2Job) -> bool:
        finish = ("error", self.error) if self.error is not None else job.revoked(time.monotonic())
        if finish is not None:
            self._end(job, *finish)
        return job.ended

    def _end(self, job: Ct2Job, reason: str, error: ModelyardError | None = None) -> None:
        self._dispatch.put(job, [job.end(reason, error)], True)

    def _token_logprobs(self, job: Ct2Job, result: Any) -> list[IdLogprob] | None:
        top = job.prompt.logprobs
        if top is None:
            return None
        if not top or self._logits is None:
            return [IdLogprob(result.token_id, min(0.0, result.log_prob))]
        return [top_logprobs(self._logits[self._rows.index(result.batch_id)], result.token_id, top)]


def _to_numpy(logits: Any) -> npt.NDArray[np.float32]:
    """A copy: CTranslate2's view is valid for this step only."""
    import ctranslate2

    if logits.device != "cpu":
        logits = logits.to_device(ctranslate2.Device.cpu)
    if logits.dtype != ctranslate2.DataType.float32:
        logits = logits.to(ctranslate2.DataType.float32)
    return np.array(logits, np.float32)


def top_logprobs(logits: npt.NDArray[np.float32], token: int, top: int) -> IdLogprob:
    """Of the model's own distribution, before any truncation."""
    peak = float(logits.max())
    total = peak + float(np.log(np.exp(logits - peak).sum()))
    top = min(top, len(logits))
    ids = np.argpartition(logits, -top)[-top:]
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    best = tuple((int(i), float(logits[i]) - total) for i in ids)
    return IdLogprob(token, float(logits[token]) - total, best)


def _free(generators: list[Any]) -> None:
    """Frees the weights even if something, such as the traceback of a failed batch, still refers to the generator."""
    for generator in generators:
        generator.unload_model()
    generators.clear()


class Ct2Engine(InProcessEngine[Ct2Job]):
    library = "CTranslate2"

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec, EngineInfo("ct2", dict(spec.caches), CAPABILITIES, page=0))
        self.options: Ct2Options = spec.options
        self._workers = self.options.batch_workers(self.info.capacity)
        self._pool = ThreadPoolExecutor(self._workers, f"ct2:{spec.model}")
        self._generators: list[Any] = []  # one, once it is loaded
        # A generator that still exists when Python exits aborts the process.
        self._free_generator = weakref.finalize(self, _free, self._generators)
        self._vocabulary: list[str] = []
        self._waiting: list[Ct2Job] = []
        self._running: dict[Ct2Batch, asyncio.Future[None]] = {}
        self._batch_timer: asyncio.Handle | None = None
        self._evaluated = 0

    def __repr__(self) -> str:
        return f"<Ct2Engine {len(self._running)}/{self._workers} batches, {len(self._waiting)} waiting>"

    # --- opening and closing ------------------------------------------------------------------------------------------

    async def _load(self, progress: OnProgress) -> None:
        folder = find_folder(self.options.path)
        progress(0.0, "loading weights")
        # In a thread of its own: glibc keeps up to 64 MB for every thread that has loaded weights and still runs.
        await self._loop.run_in_executor(self._pool, self._load_generator, folder)
        self.info = replace(self.info, device=self._generators[0].device)

    def _load_generator(self, folder: Path) -> None:
        import ctranslate2

        self._vocabulary = read_vocabulary(folder)
        self.n_vocab = len(self._vocabulary)
        warn_about_trained_length(self.spec, read_trained_length(folder))
        try:
            generator = ctranslate2.Generator(
                str(folder),
                device=self.options.device,
                device_index=self.options.device_index,
                compute_type=self.options.compute_type,
                inter_threads=self._workers,
                intra_threads=self.options.threads_per_batch(self.info.capacity),
                flash_attention=self.options.flash_attention,
            )
        except (RuntimeError, ValueError, MemoryError) as error:
            raise InvalidRequest(f"{folder / WEIGHTS} cannot be loaded: {error}", code="model_unreadable") from error
        self._generators.append(generator)

    def _stop(self, error: ModelyardError) -> None:
        """Rejects what waits and stops the running batches."""
        super()._stop(error)
        if self._batch_timer is not None:
            self._batch_timer.cancel()
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            job.fail(error)
        for batch in self._running:
            batch.error = batch.error or error

    async def _shut_down(self) -> None:
        if self._running:
            await asyncio.wait(self._running.values())
        await asyncio.to_thread(self._free_generator)
        await asyncio.to_thread(self._pool.shutdown)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def _create_job(self, prompt: Prompt, cache: str, window: int) -> Ct2Job:
        if prompt.constraint is not None:
            raise Unsupported(
                "CTranslate2 cannot follow a schema or grammar: describe the format in the prompt",
                code="structured_unsupported",
            )
        if prompt.adapters:
            raise Unsupported("CTranslate2 takes no LoRA adapters", code="lora_unsupported")
        if prompt.logprobs is not None and is_beam_search(prompt.sampling):
            raise Unsupported("beam search has no logprobs: request one of the two", code="logprobs_unsupported")
        return Ct2Job(prompt, self._loop, cache, window, self.options, self._on_cancel)

    def _submit(self, job: Ct2Job) -> None:
        """Jobs that arrive together should share a batch: the first waits `batch_window` for the others."""
        self._waiting.append(job)
        if self._batch_timer is None:
            delay = self.options.batch_window if self.info.capacity > 1 else 0.0
            self._batch_timer = self._loop.call_later(delay, self._start_batches)

    def _on_cancel(self) -> None:
        """From any thread. A running batch notices by itself; a waiting job is ended here."""
        self._loop.call_soon_threadsafe(self._end_revoked)

    def _end_revoked(self) -> None:
        now = time.monotonic()
        for job in list(self._waiting):
            if (finish := job.revoked(now)) is not None:
                self._waiting.remove(job)
                job.queue.put_many([job.end(*finish)], last=True)

    # --- batches ------------------------------------------------------------------------------------------------------

    def _start_batches(self) -> None:
        self._batch_timer = None
        self._end_revoked()
        while self._waiting and len(self._running) < self._workers:
            jobs = next_batch(self._waiting)
            self._waiting = [job for job in self._waiting if job not in jobs]
            for job in jobs:
                self._evaluated += job.prompt_tokens
                job.queue.put(Accepted(0, 0))
            batch = Ct2Batch(jobs, self._vocabulary, TokenDispatch(self._loop))
            running = self._loop.run_in_executor(self._pool, batch.run, self._generators[0])
            self._running[batch] = running
            running.add_done_callback(partial(self._finished, batch))

    def _finished(self, batch: Ct2Batch, running: asyncio.Future[None]) -> None:
        """The batch's chunks were delivered before: its thread scheduled them earlier."""
        del self._running[batch]
        error = running.exception()
        if error is not None or any(not job.ended for job in batch.jobs):
            self._fail(batch, error)
        if self._waiting and self._batch_timer is None:  # else the window for the next batch is open
            self._start_batches()

    def _fail(self, batch: Ct2Batch, error: BaseException | None) -> None:
        """A RuntimeError of CTranslate2 kills the engine. Other errors, such as too little memory, end the batch."""
        log.error("a CTranslate2 batch failed", exc_info=error)
        failure: ModelyardError = Internal("CTranslate2 could not answer")
        if isinstance(error, RuntimeError):
            failure = Unavailable(f"the engine died: {error}", code=ENGINE_DIED)
            self._report_lost(failure)
        for job in batch.jobs:
            if not job.ended:
                job.fail(failure)

    # --- the rest of the interface ------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        running = [job for batch in self._running for job in batch.jobs if not job.queue.closed]
        return EngineStats(
            running=len(running) + len(self._waiting),
            sequences=self.info.capacity,
            occupied_tokens=sum(job.prompt_tokens + job.output_tokens for job in running),
            evaluated_tokens=self._evaluated,
        )

    async def control(self, op: Control) -> None:
        if op.op != "evict":
            raise self._unsupported_control(op)
        if op.cache is not None:
            self._cache_name(op.cache)  # checks the name; no KV outlives a job, so there is nothing to evict
