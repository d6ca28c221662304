"""llama.cpp in process: one model, several named caches, one thread that owns them all.

The thread takes jobs from its inbox, moves each cache that has work one step on, in turn, and hands what came out to
the event loop in one call a round. Nothing else ever touches a llama_context.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import psutil

from modelyard.core.engine import (
    Capabilities,
    Chunk,
    Control,
    EngineInfo,
    EngineSpec,
    EngineStats,
    Generation,
    OnProgress,
    Prompt,
)
from modelyard.core.errors import InvalidRequest, ModelyardError, Unavailable
from modelyard.engines.llama_cpp import files, loading
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.context import Cache
from modelyard.engines.llama_cpp.job import Job
from modelyard.engines.llama_cpp.options import Options
from modelyard.engines.llama_cpp.sample import Chain

log = logging.getLogger(__name__)

_SWITCH_S = 0.0005  # a decode that comes back waits this long at most for a busy gateway to let go of the GIL
_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}

Parcel = tuple[Job, list[Chunk], bool]


class LlamaEngine:
    def __init__(self, spec: EngineSpec) -> None:
        self.options: Options = spec.options
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[ModelyardError] = self._loop.create_future()
        able = Capabilities(modalities=("text",), logprobs=True, ignored=("beam_size",))
        self.info = EngineInfo("llama_cpp", dict(spec.caches), able)
        self._inbox: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._model: Any = None
        self._caches: dict[str, Cache] = {}
        self._parcels: list[Parcel] = []
        self._arrived = 0

    # --- life -------------------------------------------------------------------------------------------------------

    async def open(self, progress: OnProgress) -> None:
        path = files.find(self.options.path)
        await asyncio.to_thread(self._load, path, self._teller(progress))
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._thread = threading.Thread(target=self._run, name=f"llama:{self._spec.model}", daemon=True)
        self._thread.start()

    def _teller(self, progress: OnProgress) -> Callable[[float], None]:
        def tell(done: float) -> None:
            self._loop.call_soon_threadsafe(progress, done, "loading weights")

        return tell

    def _load(self, path: Path, tell: Callable[[float], None]) -> None:
        self._model = loading.load(path, self.options.n_gpu_layers, self.options.use_mmap, tell)
        self._vocab = lib.llama_model_get_vocab(self._model)
        self._n_vocab = lib.llama_vocab_n_tokens(self._vocab)
        for name, info in self._spec.caches.items():
            raw = lib.llama_init_from_model(self._model, self._parameters(info))
            if not raw:
                raise InvalidRequest(f"the cache {name!r} cannot be made: {loading.reason()}", code="cache_unusable")
            self._caches[name] = Cache(name, info, raw, self._n_vocab, self.options.n_ubatch, self._emit)

    def _parameters(self, info: Any) -> Any:
        options, params = self.options, lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = info.window * info.parallel, info.parallel
        params.n_batch = max(options.n_batch, options.n_ubatch)
        params.n_ubatch = options.n_ubatch
        params.n_threads = params.n_threads_batch = (
            options.n_threads or psutil.cpu_count(logical=False) or os.cpu_count()
        )
        params.flash_attn_type = {None: 0, True: 1, False: 0, "on": 1, "off": 0, "auto": -1}[options.flash_attn]
        params.type_k, params.type_v = _TYPES[info.type_k], _TYPES[info.type_v]
        params.kv_unified, params.no_perf = False, True
        return params

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            await asyncio.to_thread(thread.join)
        for cache in self._caches.values():
            cache.close()
        self._caches.clear()
        model, self._model = self._model, None
        if model is not None:
            lib.llama_model_free(model)

    # --- the loop's side --------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt) -> Generation[Chunk]:
        self._arrived += 1
        job = Job(prompt, self._loop, self._arrived)
        self._inbox.put(job)
        return job.box

    def stats(self) -> EngineStats:
        caches = self._caches.values()
        return EngineStats(
            running=sum(len(cache.jobs) for cache in caches),
            sequences=sum(len(cache.slots) for cache in caches),
            occupied_tokens=sum(len(slot.tokens) for cache in caches for slot in cache.slots),
            reused_tokens=sum(cache.reused for cache in caches),
            evaluated_tokens=sum(cache.evaluated for cache in caches),
        )

    async def control(self, op: Control) -> None:
        raise InvalidRequest(f"{op.op} is not a thing this engine does yet", code="unsupported_control")

    # --- the thread's side ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._receive():
                for cache in self._caches.values():
                    if cache.has_work:
                        cache.step()
                self._deliver()
        except Exception as error:
            log.exception("the llama.cpp thread died")
            self._die(Unavailable(f"the engine died: {error}"))
        else:
            self._end_all(Unavailable("the engine was closed"))

    def _receive(self) -> bool:
        """Take what has come; wait only where nothing is to be done. False: the end."""
        busy = any(cache.has_work for cache in self._caches.values())
        while True:
            try:
                job = self._inbox.get(block=not busy)
            except Empty:
                return True
            if job is None:
                return False
            self._admit(job)
            busy = True

    def _admit(self, job: Job) -> None:
        cache = self._caches.get(job.prompt.cache) or next(iter(self._caches.values()))
        job.chain = Chain(job.prompt.sampling, self._vocab, self._n_vocab)
        cache.admit(job)

    def _emit(self, job: Job, chunks: list[Chunk], last: bool) -> None:
        self._parcels.append((job, chunks, last))

    def _deliver(self) -> None:
        if self._parcels:
            parcels, self._parcels = self._parcels, []
            self._loop.call_soon_threadsafe(_hand_out, parcels)

    def _end_all(self, error: ModelyardError) -> None:
        for cache in self._caches.values():
            cache.fail_all(error)
        self._deliver()

    def _die(self, error: ModelyardError) -> None:
        self._end_all(error)
        self._loop.call_soon_threadsafe(self._report_loss, error)

    def _report_loss(self, error: ModelyardError) -> None:
        if not self.lost.done():
            self.lost.set_result(error)


def _hand_out(parcels: list[Parcel]) -> None:
    for job, chunks, last in parcels:
        if not job.box.closed:
            job.box.put_many(chunks, last=last)
