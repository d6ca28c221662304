"""CTranslate2 in process: the event loop decides which jobs form a batch; each batch runs in a worker thread.

Everything except a running batch belongs to the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from modelyard.core.engine import Accepted, Control, EngineInfo, EngineSpec, EngineStats, OnProgress, Prompt
from modelyard.core.errors import Internal, InvalidRequest, ModelyardError, Timeout, Unavailable, Unsupported
from modelyard.engines.ct2.batch import Ct2Batch, Ct2Job, next_batch
from modelyard.engines.ct2.model_folder import WEIGHTS, find_folder, read_trained_length, read_vocabulary
from modelyard.engines.ct2.options import CAPABILITIES, Ct2Options, generate_arguments, is_beam_search
from modelyard.engines.in_process import InProcessEngine
from modelyard.engines.token_dispatch import TokenDispatch

log = logging.getLogger(__name__)


class Ct2Engine(InProcessEngine[Ct2Job]):
    library = "CTranslate2"

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec, EngineInfo("ct2", dict(spec.caches), CAPABILITIES, page=0))
        self.options: Ct2Options = spec.options
        self._workers = self.options.batch_workers(self.info.capacity)
        self._pool = ThreadPoolExecutor(self._workers, f"ct2:{spec.model}")
        self._generators: list[Any] = []  # one, once it is loaded
        # A generator that still exists when Python exits aborts the process.
        self._free_generator = weakref.finalize(self, self._generators.clear)
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
        await asyncio.to_thread(self._load_generator, folder)
        self.info = replace(self.info, device=self._generators[0].device)

    def _load_generator(self, folder: Path) -> None:
        import ctranslate2

        self._vocabulary = read_vocabulary(folder)
        self.n_vocab = len(self._vocabulary)
        self._warn_about_trained_length(read_trained_length(folder))
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
        await asyncio.to_thread(self._pool.shutdown)
        await asyncio.to_thread(self._free_generator)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def _create_job(self, prompt: Prompt) -> Ct2Job:
        return Ct2Job(prompt, self._loop, on_cancel=self._on_cancel)

    def _check(self, job: Ct2Job) -> None:
        super()._check(job)
        job.arguments = generate_arguments(job.prompt, job.max_output, self.options)

    def _check_support(self, prompt: Prompt) -> None:
        super()._check_support(prompt)
        if prompt.constraint is not None:
            raise Unsupported(
                "CTranslate2 cannot follow a schema or grammar: describe the format in the prompt",
                code="structured_unsupported",
            )
        if prompt.adapters:
            raise Unsupported("CTranslate2 takes no LoRA adapters", code="lora_unsupported")
        if prompt.logprobs is not None and is_beam_search(prompt.sampling):
            raise Unsupported("beam search has no logprobs: request one of the two", code="logprobs_unsupported")

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
        now = time.time()
        for job in [job for job in self._waiting if job.cancelled or job.deadline_passed(now)]:
            self._waiting.remove(job)
            if job.cancelled:
                job.queue.put_many([job.end("cancelled")], last=True)
            else:
                job.fail(Timeout("the job's deadline passed"))

    # --- batches ------------------------------------------------------------------------------------------------------

    def _start_batches(self) -> None:
        self._batch_timer = None
        self._end_revoked()
        while self._waiting and len(self._running) < self._workers:
            jobs = next_batch(self._waiting, self.options.batch_slack)
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
            failure = Unavailable(f"the engine died: {error}")
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
