"""CTranslate2 in process: the loop decides which jobs make a batch, each batch runs in a thread of its own.

Everything but a running batch belongs to the event loop. A batch tells what it has through `_emit`, and the loop hands
it out in one go, however many tokens have come since it last looked.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from modelyard.core.engine import (
    Accepted,
    CacheInfo,
    Chunk,
    Control,
    EngineInfo,
    EngineSpec,
    EngineStats,
    Generation,
    Media,
    OnProgress,
    Prompt,
)
from modelyard.core.errors import (
    ContextOverflow,
    Internal,
    InvalidRequest,
    ModelyardError,
    NotFound,
    Timeout,
    Unavailable,
    Unsupported,
)
from modelyard.engines.ct2 import model_folder
from modelyard.engines.ct2.batch import Ct2Batch, Ct2Job, next_batch
from modelyard.engines.ct2.options import CAPABILITIES, Ct2Options, is_beam

log = logging.getLogger(__name__)

_SWITCH_S = 0.0005  # a callback waits this long at most for a busy gateway to let go of the GIL


class Ct2Engine:
    def __init__(self, spec: EngineSpec) -> None:
        self.options: Ct2Options = spec.options
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[ModelyardError] = self._loop.create_future()
        self.info = EngineInfo("ct2", dict(spec.caches), CAPABILITIES, page=0)
        self._workers = self.options.workers(self.info.capacity)
        self._pool = ThreadPoolExecutor(self._workers, f"ct2:{spec.model}")
        self._held: list[Any] = []  # the generator, once it is loaded
        # One that is still there when Python ends takes the process down with an abort.
        self._let_go = weakref.finalize(self, self._held.clear)
        self._loading: asyncio.Task[None] | None = None
        self._over: ModelyardError | None = None  # why nothing can run here any more
        self._waiting: list[Ct2Job] = []
        self._running: dict[Ct2Batch, asyncio.Future[None]] = {}
        self._timer: asyncio.Handle | None = None
        self._parcels: deque[tuple[Ct2Job, list[Chunk], bool]] = deque()
        self._told = False  # the loop knows that parcels wait
        self._evaluated = 0

    def __repr__(self) -> str:
        return f"<Ct2Engine {len(self._running)}/{self._workers} batches, {len(self._waiting)} waiting>"

    # --- life -------------------------------------------------------------------------------------------------------

    async def open(self, progress: OnProgress) -> None:
        where = model_folder.find_folder(self.options.path)
        progress(0.0, "loading weights")
        # A task of its own: whoever stops waiting for it leaves a thread behind that `close` has to wait for.
        self._loading = asyncio.create_task(asyncio.to_thread(self._load, where))
        await asyncio.shield(self._loading)
        self.info = replace(self.info, device=self._held[0].device)
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        progress(1.0, "loading weights")

    def _load(self, where: Path) -> None:
        import ctranslate2

        self._words = model_folder.read_vocabulary(where)
        self._warn_of_length(model_folder.read_trained_length(where))
        try:
            generator = ctranslate2.Generator(
                str(where),
                device=self.options.device,
                device_index=self.options.device_index,
                compute_type=self.options.compute_type,
                inter_threads=self._workers,
                intra_threads=self.options.threads(self.info.capacity),
                flash_attention=self.options.flash_attention,
            )
        except (RuntimeError, ValueError, MemoryError) as error:
            raise InvalidRequest(
                f"{where / model_folder.WEIGHTS} cannot be loaded: {error}", code="model_unreadable"
            ) from error
        self._held.append(generator)

    def _warn_of_length(self, trained: int | None) -> None:
        for name, info in self._spec.caches.items():
            if trained is not None and info.window > trained:
                text = "the cache %r has a window of %d tokens and the model %r was trained on %d: beyond them answers "
                log.warning(text + "may be nonsense", name, info.window, self._spec.model, trained)

    async def close(self) -> None:
        self._give_up(Unavailable("the engine was closed"))
        # `wait`, not `gather`: whoever stops waiting for the end must not cut off what waits for the threads.
        if unfinished := [*self._running.values(), *([self._loading] if self._loading is not None else [])]:
            await asyncio.wait(unfinished)
        await asyncio.to_thread(self._pool.shutdown)
        self._deliver()
        await asyncio.to_thread(self._let_go)

    def _give_up(self, fault: ModelyardError) -> None:
        """Nothing starts any more, and what runs is told to end."""
        self._over = self._over or fault
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._waiting = self._waiting, []
        for job in waiting:
            self._refuse(job, self._over)
        for batch in self._running:
            batch.fault = batch.fault or self._over

    # --- jobs come --------------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt) -> Generation[Chunk]:
        job = Ct2Job(prompt, self._loop, self._on_cancel)
        try:
            self._check(job)
            job.fit(self._cache(prompt.cache), self.options)
        except ModelyardError as error:
            self._refuse(job, error)
        else:
            self._waiting.append(job)
            self._plan()
        return job.queue

    def _check(self, job: Ct2Job) -> None:
        if self._over is not None:
            raise self._over
        if not self._held:
            raise Unavailable("the engine is not open")
        cache = self._cache(job.prompt.cache)
        if job.prompt_tokens >= cache.window:
            raise ContextOverflow(job.prompt_tokens, cache.window)
        self._check_abilities(job.prompt)
        if not job.ids:
            raise InvalidRequest("the prompt is empty")
        if min(job.ids) < 0 or max(job.ids) >= len(self._words):
            raise InvalidRequest(f"the prompt holds token ids outside 0…{len(self._words) - 1}")

    def _check_abilities(self, prompt: Prompt) -> None:
        if any(isinstance(part, Media) for part in prompt.parts):
            raise Unsupported("this engine reads text only", code="modality_unsupported")
        if prompt.constraint is not None:
            told = "CTranslate2 cannot be held to a schema or grammar; ask for the form in words, or another model"
            raise Unsupported(told, code="structured_unsupported")
        if prompt.adapters:
            raise Unsupported("CTranslate2 takes no LoRA adapters", code="lora_unsupported")
        if prompt.logprobs is not None and is_beam(prompt.sampling):
            raise Unsupported("a beam search gives no logprobs: ask for one of the two", code="logprobs_unsupported")

    def _cache(self, name: str) -> CacheInfo:
        """A prompt that names none goes to the first. They share nothing, for no KV outlives a job."""
        known = self._spec.caches
        name = name or next(iter(known), "")
        if name not in known:
            raise NotFound(f"the engine has no cache {name!r}; it has {', '.join(known)}")
        return known[name]

    def _refuse(self, job: Ct2Job, error: ModelyardError) -> None:
        job.queue.put_many([job.end("error", error)], last=True)

    def _on_cancel(self) -> None:
        """From any thread. A batch that runs sees it by itself; what waits is looked through."""
        self._loop.call_soon_threadsafe(self._sweep)

    # --- jobs run ---------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Jobs that come at the same moment are to share a batch: the first waits a little for the others."""
        if self._timer is None and self._over is None:
            wait = self.options.batch_window if self.info.capacity > 1 else 0.0
            self._timer = self._loop.call_later(wait, self._dispatch)

    def _dispatch(self) -> None:
        self._timer = None
        self._sweep()
        while self._waiting and len(self._running) < self._workers:
            jobs = next_batch(self._waiting, self.options.batch_slack)
            self._waiting = [job for job in self._waiting if job not in jobs]
            self._start(Ct2Batch(jobs, self._words, self._emit, self._wake))

    def _sweep(self) -> None:
        """What waits and is not wanted any more ends at once."""
        now = time.time()
        for job in [job for job in self._waiting if job.cancelled or job.is_late(now)]:
            self._waiting.remove(job)
            if job.cancelled:
                job.queue.put_many([job.end("cancelled")], last=True)
            else:
                self._refuse(job, Timeout("the job's deadline passed"))

    def _start(self, batch: Ct2Batch) -> None:
        for job in batch.jobs:
            self._evaluated += job.prompt_tokens
            job.queue.put(Accepted(0, 0))
        work = self._loop.run_in_executor(self._pool, batch.run, self._held[0])
        self._running[batch] = work
        work.add_done_callback(partial(self._finished, batch))

    def _emit(self, job: Ct2Job, chunks: list[Chunk], last: bool) -> None:
        self._parcels.append((job, chunks, last))

    def _wake(self) -> None:
        """From a batch's thread: one wake-up of the loop for all that comes until it has looked."""
        if self._parcels and not self._told:
            self._told = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._told = False  # before looking: what comes from now on tells again
        while self._parcels:
            job, chunks, last = self._parcels.popleft()
            job.queue.put_many(chunks, last=last)

    def _finished(self, batch: Ct2Batch, work: asyncio.Future[None]) -> None:
        self._deliver()
        del self._running[batch]
        error = work.exception()
        if error is not None or any(not job.ended for job in batch.jobs):
            self._failed(batch, error)
        if self._waiting and self._timer is None:  # else they are still gathering
            self._dispatch()

    def _failed(self, batch: Ct2Batch, error: BaseException | None) -> None:
        """Too little memory is this batch's trouble. Whatever else CTranslate2 raises leaves nothing to rely on."""
        log.error("a batch of CTranslate2 failed", exc_info=error)
        fault: ModelyardError = Internal("CTranslate2 could not answer")
        if isinstance(error, RuntimeError):
            fault = Unavailable(f"the engine died: {error}")
            self._give_up(fault)
            if not self.lost.done():
                self.lost.set_result(fault)
        for job in batch.jobs:
            if not job.ended:
                self._refuse(job, fault)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        running = [job for batch in self._running for job in batch.jobs if not job.queue.closed]
        return EngineStats(
            running=len(running) + len(self._waiting),
            sequences=self.info.capacity,
            occupied_tokens=sum(job.prompt_tokens + job.said for job in running),
            evaluated_tokens=self._evaluated,
        )

    async def control(self, op: Control) -> None:
        if op.op != "evict":
            raise InvalidRequest(f"{op.op} is not a thing that CTranslate2 can do", code="unsupported_control")
        if op.cache is not None:
            self._cache(op.cache)  # no KV outlives a job: there is nothing to throw away
