"""llama.cpp in process: one model, several named caches, one thread that owns them all.

The thread takes jobs from its inbox, moves each cache that has work one step on, in turn, and hands what came out to
the event loop in one call a round. Nothing else ever touches a llama_context.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from modelyard.core.engine import (
    CacheInfo,
    Chunk,
    Control,
    Embeddings,
    End,
    EngineInfo,
    EngineSpec,
    EngineStats,
    Generation,
    Media,
    OnProgress,
    Prompt,
)
from modelyard.core.errors import (
    Conflict,
    InvalidRequest,
    ModelyardError,
    NotFound,
    Timeout,
    Unavailable,
    Unsupported,
)
from modelyard.core.events import Usage
from modelyard.engines.llama_cpp import files, loading
from modelyard.engines.llama_cpp.binding import ThreadPool, lib
from modelyard.engines.llama_cpp.context import LlamaContext
from modelyard.engines.llama_cpp.draft_model import DraftModel
from modelyard.engines.llama_cpp.embedding import Embedder
from modelyard.engines.llama_cpp.grammar_mask import GrammarCompiler, GrammarMask, TriggeredMask
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.engines.llama_cpp.kv_store import KvStore, create_kv_store
from modelyard.engines.llama_cpp.lora import LoraAdapters, parse_adapter_argument
from modelyard.engines.llama_cpp.options import CAPABILITIES, Options
from modelyard.engines.llama_cpp.orders import Order, fault_of, obeyed, tried
from modelyard.engines.llama_cpp.replay import Replay, create_replay
from modelyard.engines.llama_cpp.sampler import JobSampler
from modelyard.engines.llama_cpp.sequence_manager import create_sequence_manager, link_compatible
from modelyard.engines.llama_cpp.speculation import NgramDrafter, Speculator
from modelyard.engines.token_dispatch import TokenDispatch

log = logging.getLogger(__name__)

_SWITCH_S = 0.0005  # a decode that comes back waits this long at most for a busy gateway to let go of the GIL


class LlamaCppEngine:
    def __init__(self, spec: EngineSpec) -> None:
        self.options: Options = spec.options
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[ModelyardError] = self._loop.create_future()
        self.info = EngineInfo("llama_cpp", dict(spec.caches), CAPABILITIES)
        self._inbox: SimpleQueue[LlamaCppJob | Order | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._loading: asyncio.Task[None] | None = None
        self._over: ModelyardError | None = None  # why nothing can run here any more; set on the loop only
        self._masks: GrammarCompiler | None = None
        self._model: Any = None
        self._caches: dict[str, LlamaContext] = {}
        self._dispatch = TokenDispatch(self._loop)
        self._arrived = 0
        self._desk: Embedder | None = None
        self._draft: DraftModel | None = None
        self._pool: ThreadPool | None = None
        self._keeper: KvStore | None = None
        self._replay: Replay | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    async def open(self, progress: OnProgress) -> None:
        path = files.find(self.options.path)
        # A task of its own: whoever stops waiting for it leaves a thread behind that `close` has to wait for.
        self._loading = asyncio.create_task(asyncio.to_thread(self._load, path, self._teller(progress)))
        await asyncio.shield(self._loading)
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        self._thread = threading.Thread(target=self._run, name=f"llama:{self._spec.model}", daemon=True)
        self._thread.start()

    def _teller(self, progress: OnProgress) -> Callable[[float], bool]:
        def tell(done: float) -> bool:
            self._loop.call_soon_threadsafe(progress, done, "loading weights")
            return self._over is None

        return tell

    def _load(self, path: Path, tell: Callable[[float], bool]) -> None:
        shape = loading.check_before_loading(path, self._spec)
        self._spec = loading.resolve_options(self._spec, shape)
        self.options = self._spec.options
        self._model = loading.load_model(path, self.options, tell)
        self._vocab = lib.llama_model_get_vocab(self._model)
        self._n_vocab = lib.llama_vocab_n_tokens(self._vocab)
        self._pool = ThreadPool(loading.max_threads(self._spec))
        self._desk = Embedder(self._model, self._spec, shape, self._order, self._pool.attach)
        self._wardrobe = LoraAdapters(self._model, self.options.lora)
        self._masks = GrammarCompiler(self._vocab, self._n_vocab)
        if self.options.uses_draft_model:
            self._draft = DraftModel(self.options, self._model, self._pool.attach, lambda _: self._over is None)
        for name, info in self._spec.caches.items():
            raw = loading.create_context(self._model, name, info, self.options)
            self._pool.attach(raw)
            self._caches[name] = LlamaContext(
                name,
                info,
                raw,
                self._n_vocab,
                self.options.for_cache(info).n_ubatch,
                self._dispatch.put,
                self._dispatch.put_batch,
                self._wardrobe,
                create_sequence_manager(raw, info, self.options),
            )
            self._caches[name].speculator = self._speculator(name, info)
        self._replay = create_replay(self.options.replay, path)
        link_compatible([cache.places for cache in self._caches.values()])
        self._keeper = create_kv_store(self._spec, path, self._wardrobe)
        if self._keeper is not None:
            self._keeper.restore_all(self._caches.values(), lambda: self._over is None)

    def _speculator(self, name: str, info: CacheInfo) -> Speculator | None:
        chosen = self.options.speculation
        if chosen == "off":
            return None
        if not loading.can_rewind(self._model, info, self.options):
            if chosen != "auto":
                log.warning("%r cannot take tokens back, so nothing is guessed in %r", self._spec.model, name)
            return None
        source = NgramDrafter() if self._draft is None else self._draft.drafter(name, info)
        return Speculator(source, self.options.draft_n_max, info.window, measured=chosen == "auto")

    async def close(self) -> None:
        self._over = self._over or Unavailable("the engine was closed")
        if self._loading is not None:
            await asyncio.gather(self._loading, return_exceptions=True)
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            await asyncio.to_thread(thread.join)
        self._turn_away()
        await asyncio.to_thread(self._free)

    def _free(self) -> None:
        if self._desk is not None:
            self._desk.close()
        caches, self._caches = self._caches, {}
        for cache in caches.values():
            cache.close()
        masks, self._masks = self._masks, None
        if masks is not None:
            masks.close()
        draft, self._draft = self._draft, None
        if draft is not None:
            draft.close()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        model, self._model = self._model, None
        if model is not None:
            lib.llama_model_free(model)

    # --- the loop's side --------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt) -> Generation[Chunk]:
        self._arrived += 1
        job = LlamaCppJob(prompt, self._loop, self._arrived)
        if self._over is not None:
            job.queue.put_many([_refused(job, self._over)], last=True)
        elif prompt.constraint is not None and self._masks is not None:
            # That may take long: not on this loop, and not between two steps.
            making = asyncio.wrap_future(self._masks.order(prompt.constraint), loop=self._loop)
            making.add_done_callback(partial(self._constrained, job))
        else:
            self._inbox.put(job)
        return job.queue

    def _constrained(self, job: LlamaCppJob, made: asyncio.Future[GrammarMask | TriggeredMask | None]) -> None:
        fault: BaseException | None = self._over or made.exception()
        if fault is None:
            job.mask = made.result()
            self._inbox.put(job)
        elif not job.queue.closed:
            job.queue.put_many([_refused(job, fault_of(fault))], last=True)

    def _turn_away(self) -> None:
        """What still waits in the inbox of a thread that has ended."""
        fault = self._over or Unavailable("the engine was closed")
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, LlamaCppJob) and not item.queue.closed:
                item.queue.put_many([_refused(item, fault)], last=True)
            elif isinstance(item, Order) and not item.done.done():
                item.done.set_exception(fault)

    def stats(self) -> EngineStats:
        caches = self._caches.values()
        return EngineStats(
            running=sum(len(cache.jobs) for cache in caches),
            sequences=sum(len(cache.slots) for cache in caches),
            occupied_tokens=sum(len(slot.tokens) for cache in caches for slot in cache.slots),
            reused_tokens=sum(cache.places.reused for cache in caches),
            copied_tokens=sum(cache.places.copied for cache in caches),
            restored_tokens=sum(cache.places.restored for cache in caches),
            evaluated_tokens=sum(cache.evaluated for cache in caches),
            guessed_tokens=sum(cache.speculator.guessed for cache in caches if cache.speculator is not None),
            accepted_tokens=sum(cache.speculator.kept for cache in caches if cache.speculator is not None),
            caches={name: cache.stats() for name, cache in self._caches.items()},
        )

    async def control(self, op: Control) -> None:
        if op.op == "load_adapter":
            await self._order(partial(self._wardrobe.load, *parse_adapter_argument(op.argument)))
            return
        if op.op == "unload_adapter":
            await self._order(partial(self._unload_adapter, op.argument or ""))
            return
        caches = [self._cache(op.cache)] if op.cache is not None else list(self._caches.values())
        if op.op == "evict":
            for cache in caches:
                await self._order(cache.evict)
            return
        if self._keeper is None:
            raise InvalidRequest(f"to {op.op} KV the model needs kv_store in its settings", code="kv_store_unset")
        for cache in caches:
            await (self._keeper.save if op.op == "save" else self._keeper.restore)(cache, self._order)

    async def _order(self, deed: Callable[[], None]) -> None:
        if self._over is not None:
            raise self._over
        order = Order(deed, self._loop.create_future())
        self._inbox.put(order)
        await order.done

    async def embed(self, batch: Sequence[Sequence[int]]) -> Embeddings:
        if self._desk is None:
            raise Unavailable("the engine is not open")
        return await self._desk.embed(batch)

    def _cache(self, name: str) -> LlamaContext:
        """A prompt that names none goes to the first."""
        name = name or next(iter(self._caches), "")
        if name not in self._caches:
            raise NotFound(f"the engine has no cache {name!r}; it has {', '.join(self._caches)}")
        return self._caches[name]

    # --- the thread's side ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._receive():
                for cache in self._caches.values():
                    if cache.has_work:
                        cache.step()
                self._dispatch.flush()
            self._land()
        except Exception as error:
            log.exception("the llama.cpp thread died")
            self._die(Unavailable(f"the engine died: {error}"))
        else:
            self._end_all(Unavailable("the engine was closed"))
            self._save()

    def _save(self) -> None:
        """Whatever goes wrong with it, the engine closes."""
        try:
            if self._keeper is not None:
                self._keeper.save_all(self._caches.values())
        except Exception:
            log.exception("the KV of %r was not saved", self._spec.model)

    def _receive(self) -> bool:
        """Take what has come; wait only where nothing is to be done. False: the end."""
        busy = any(cache.has_work for cache in self._caches.values())
        while not (busy and self._inbox.empty()):
            item = self._inbox.get()
            if item is None:
                return False
            self._take(item)
            if isinstance(item, Order):
                return True  # one a round: many of them must not keep streams waiting
            busy = True
        return True

    def _land(self) -> None:
        for cache in self._caches.values():
            cache.land()

    def _take(self, item: LlamaCppJob | Order) -> None:
        self._land()
        if isinstance(item, LlamaCppJob):
            self._admit(item)
        else:
            self._loop.call_soon_threadsafe(obeyed, item.done, tried(item.deed))

    def _admit(self, job: LlamaCppJob) -> None:
        """Whatever is wrong with a job ends that job, not the engine."""
        if job.cancelled:
            self._dispatch.put(job, [End("cancelled", Usage(job.prompt_tokens))], True)
            return
        try:
            cache = self._cache(job.prompt.cache)
            self._check(job)
            cache.check(job)
            job.chain = JobSampler(job.prompt.sampling, self._vocab, self._n_vocab, cache.info.window, job.ids)
        except Exception as error:
            self._dispatch.put(job, [_refused(job, fault_of(error))], True)
        else:
            if self._replay is not None:
                job.mask, job.scripted = None, self._replay.answer(job.prompt.ids, job.prompt.session)
            cache.admit(job)

    def _unload_adapter(self, name: str) -> None:
        self._wardrobe.check(((name, 1.0),))
        if any(cache.uses(name) for cache in self._caches.values()):
            raise Conflict(f"the adapter {name!r} is in use; unload it when its answers have ended")
        for cache in self._caches.values():
            cache.forget(name)
        self._wardrobe.unload(name)

    def _check(self, job: LlamaCppJob) -> None:
        """An id that is no token would fail the whole batch that it is read in."""
        if any(isinstance(part, Media) for part in job.prompt.parts):
            raise Unsupported("this engine reads text only")
        if not len(job.ids):
            raise InvalidRequest("the prompt is empty")
        if job.ids.min() < 0 or job.ids.max() >= self._n_vocab:
            raise InvalidRequest(f"the prompt holds token ids outside 0…{self._n_vocab - 1}")
        self._wardrobe.check(job.prompt.adapters)
        if job.is_late(time.time()):
            raise Timeout("the job's deadline passed")

    def _end_all(self, error: ModelyardError) -> None:
        for cache in self._caches.values():
            cache.fail_all(error)
        self._dispatch.flush()

    def _die(self, error: ModelyardError) -> None:
        self._end_all(error)
        self._loop.call_soon_threadsafe(self._report_loss, error)

    def _report_loss(self, error: ModelyardError) -> None:
        self._over = self._over or error
        self._turn_away()
        if not self.lost.done():
            self.lost.set_result(error)


def _refused(job: LlamaCppJob, error: ModelyardError) -> End:
    return End("error", Usage(job.prompt_tokens), error=error)
