"""ExLlamaV3 in process: one model, several named caches, one thread that owns them all from loading to unloading.

The thread takes jobs from its inbox, lets the generator of each cache that has work do one step, in turn, and hands
what came out to the event loop in one call a round, while the GPU computes the next. Nothing else ever touches the GPU.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from modelyard.core.engine import (
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
from modelyard.engines.exllamav3 import model as library
from modelyard.engines.exllamav3 import model_folder
from modelyard.engines.exllamav3.arguments import CAPABILITIES
from modelyard.engines.exllamav3.grammar_filter import GrammarFilter, GrammarFilters
from modelyard.engines.exllamav3.model import ExllamaCache, ExllamaJob, ExllamaLibrary, ExllamaModel
from modelyard.engines.exllamav3.model_folder import ExllamaModelInfo
from modelyard.engines.exllamav3.options import PAGE, ExllamaOptions
from modelyard.engines.token_dispatch import TokenDispatch

log = logging.getLogger(__name__)

_SWITCH_S = 0.0005  # a step that comes back waits this long at most for a busy gateway to let go of the GIL

Deed = Callable[[], None]


class ExllamaEngine:
    def __init__(self, spec: EngineSpec, load: Callable[[], ExllamaLibrary] = library.load_library) -> None:
        self.options: ExllamaOptions = spec.options
        self._spec, self._load_library = spec, load
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[ModelyardError] = self._loop.create_future()
        self.info = EngineInfo("exllamav3", dict(spec.caches), CAPABILITIES, device="cuda", page=PAGE)
        self._inbox: SimpleQueue[ExllamaJob | Deed | None] = SimpleQueue()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._thread: threading.Thread | None = None
        self._over: ModelyardError | None = None  # why nothing can run here any more; set on the loop only
        self._shape: ExllamaModelInfo | None = None
        self._filters: GrammarFilters | None = None
        self._model: ExllamaModel | None = None
        self._lanes: dict[str, ExllamaCache] = {}
        self._dispatch = TokenDispatch(self._loop)

    def __repr__(self) -> str:
        return f"<Exl3Engine {self._spec.model}: {', '.join(map(repr, self._lanes.values())) or 'not open'}>"

    # --- life -------------------------------------------------------------------------------------------------------

    async def open(self, progress: OnProgress) -> None:
        where = model_folder.find_folder(self.options.path)
        self._shape = await asyncio.to_thread(model_folder.read_model_info, where)
        if self._over is not None:
            raise self._over
        self._warn_of_length(self._shape.trained)
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        progress(0.0, "loading weights")
        self._thread = threading.Thread(
            target=self._run,
            args=(where, self._shape, self._teller(progress)),
            name=f"exl3:{self._spec.model}",
            daemon=True,
        )
        self._thread.start()
        await asyncio.shield(self._opened)
        progress(1.0, "loading weights")

    def _warn_of_length(self, trained: int | None) -> None:
        for name, info in self._spec.caches.items():
            if trained is not None and info.window > trained:
                text = "the cache %r has a window of %d tokens and the model %r was trained on %d: beyond them answers "
                log.warning(text + "may be nonsense", name, info.window, self._spec.model, trained)

    def _teller(self, progress: OnProgress) -> Callable[[float], None]:
        def tell(done: float) -> None:
            if self._over is not None:
                raise self._over  # nobody waits for it any more
            self._loop.call_soon_threadsafe(progress, min(done, 0.99), "loading weights")

        return tell

    async def close(self) -> None:
        self._over = self._over or Unavailable("the engine was closed")
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            await asyncio.to_thread(thread.join)
        if self._opened.done():
            self._opened.exception()  # heard, also where whoever opened it has gone away
        self._turn_away()
        filters, self._filters = self._filters, None
        if filters is not None:
            await asyncio.to_thread(filters.close)

    def _turn_away(self) -> None:
        """What still waits in the inbox of a thread that has ended."""
        fault = self._over or Unavailable("the engine was closed")
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, ExllamaJob) and not item.queue.closed:
                item.queue.put_many([item.end("error", fault)], last=True)
            elif isinstance(item, _Order) and not item.done.done():
                item.done.set_exception(fault)

    # --- the loop's side --------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt) -> Generation[Chunk]:
        job = ExllamaJob(prompt, self._loop)
        try:
            self._check(job)
        except ModelyardError as error:
            job.queue.put_many([job.end("error", error)], last=True)
        else:
            self._send(job)
        return job.queue

    def _send(self, job: ExllamaJob) -> None:
        if job.prompt.constraint is None or self._filters is None:
            self._inbox.put(job)
            return
        # That may take long: not on this loop, and not between two steps.
        making = asyncio.wrap_future(self._filters.order(job.prompt.constraint), loop=self._loop)
        making.add_done_callback(partial(self._constrained, job))

    def _constrained(self, job: ExllamaJob, made: asyncio.Future[GrammarFilter | None]) -> None:
        fault = self._over or (Unavailable("the engine was closed") if made.cancelled() else made.exception())
        if fault is None:
            job.filter = made.result()
            self._inbox.put(job)
        elif not job.queue.closed:
            job.queue.put_many([job.end("error", _fault_of(fault))], last=True)

    def _check(self, job: ExllamaJob) -> None:
        if self._over is not None:
            raise self._over
        if self._shape is None or not self._lanes:
            raise Unavailable("the engine is not open")
        cache = self._cache(job.prompt.cache).info
        if job.prompt_tokens >= cache.window:
            raise ContextOverflow(job.prompt_tokens, cache.window)
        if any(isinstance(part, Media) for part in job.prompt.parts):
            raise Unsupported("this engine reads text only", code="modality_unsupported")
        if job.prompt.adapters:
            told = "ExLlamaV3 would put an adapter on all jobs at once: use a model with the adapter merged into it"
            raise Unsupported(told, code="lora_unsupported", param="lora_adapter")
        if not job.ids:
            raise InvalidRequest("the prompt is empty")
        if min(job.ids) < 0 or max(job.ids) >= self._shape.vocab:
            raise InvalidRequest(f"the prompt holds token ids outside 0…{self._shape.vocab - 1}")
        job.fit(cache)

    def _cache(self, name: str) -> ExllamaCache:
        """A prompt that names none goes to the first."""
        name = name or next(iter(self._lanes), "")
        if name not in self._lanes:
            raise NotFound(f"the engine has no cache {name!r}; it has {', '.join(self._lanes)}")
        return self._lanes[name]

    def stats(self) -> EngineStats:
        lanes = self._lanes.values()
        return EngineStats(
            running=sum(len(lane.jobs) for lane in lanes),
            sequences=self.info.capacity,
            occupied_tokens=sum(lane.held for lane in lanes),
            reused_tokens=sum(lane.reused for lane in lanes),
            evaluated_tokens=sum(lane.evaluated for lane in lanes),
            caches={name: lane.stats() for name, lane in self._lanes.items()},
        )

    async def control(self, op: Control) -> None:
        if op.op != "evict":
            raise InvalidRequest(f"{op.op} is not a thing that ExLlamaV3 can do", code="unsupported_control")
        lanes = [self._cache(op.cache)] if op.cache is not None else list(self._lanes.values())
        for lane in lanes:
            await self._order(lane.evict)

    async def _order(self, deed: Deed) -> None:
        if self._over is not None:
            raise self._over
        order = _Order(deed, self._loop)
        self._inbox.put(order)
        await order.done

    # --- the thread's side ------------------------------------------------------------------------------------------

    def _run(self, where: Path, shape: ExllamaModelInfo, tell: Callable[[float], None]) -> None:
        try:
            self._load(where, shape, tell)
        except BaseException as error:
            self._unload()
            self._loop.call_soon_threadsafe(self._not_opened, _fault_of(error, f"{where} cannot be loaded"))
            return
        self._loop.call_soon_threadsafe(self._is_open)
        try:
            self._work()
        except Exception as error:
            log.exception("the ExLlamaV3 thread died")
            self._die(Unavailable(f"the engine died: {error}"))
        else:
            self._end_all(Unavailable("the engine was closed"))
        self._unload()

    def _load(self, where: Path, shape: ExllamaModelInfo, tell: Callable[[float], None]) -> None:
        loaded = self._load_library()
        tell(0.0)
        self._model = ExllamaModel(loaded, where, shape, self._spec, self._dispatch, tell)
        self._filters = GrammarFilters(where, shape, loaded.torch.from_numpy)
        self._lanes = self._model.lanes

    def _is_open(self) -> None:
        if not self._opened.done():
            self._opened.set_result(None)

    def _not_opened(self, error: ModelyardError) -> None:
        if not self._opened.done():
            self._opened.set_exception(error)

    def _unload(self) -> None:
        """Whatever goes wrong with it, the thread ends."""
        model, self._model = self._model, None
        try:
            if model is not None:
                model.close()
        except Exception:
            log.exception("%r was not unloaded cleanly", self._spec.model)

    def _work(self) -> None:
        while self._receive():
            for lane in self._lanes.values():
                if lane.jobs:
                    lane.step()
            soon = all(lane.only_speaks for lane in self._lanes.values())
            self._dispatch.end_step(soon and self._inbox.empty())

    def _receive(self) -> bool:
        """Take what has come; wait only where nothing is to be done. False: the end."""
        busy = any(lane.jobs for lane in self._lanes.values())
        while True:
            try:
                item = self._inbox.get(block=not busy)
            except Empty:
                return True
            self._dispatch.flush()  # what comes may keep the next step from beginning
            if item is None:
                return False
            if isinstance(item, ExllamaJob):
                self._admit(item)
            else:
                item()
            busy = True

    def _admit(self, job: ExllamaJob) -> None:
        """Whatever is wrong with a job ends that job, not the engine."""
        if job.cancelled:
            self._dispatch.put(job, [job.end("cancelled")], True)
            return
        try:
            if job.is_late(time.time()):
                raise Timeout("the job's deadline passed")
            self._cache(job.prompt.cache).admit(job)
        except Exception as error:
            self._dispatch.put(job, [job.end("error", _fault_of(error))], True)

    def _end_all(self, error: ModelyardError) -> None:
        for lane in self._lanes.values():
            lane.fail_all(error)
        self._dispatch.flush()

    def _die(self, error: ModelyardError) -> None:
        self._end_all(error)
        self._loop.call_soon_threadsafe(self._report_loss, error)

    def _report_loss(self, error: ModelyardError) -> None:
        self._over = self._over or error
        self._turn_away()
        if not self.lost.done():
            self.lost.set_result(error)


class _Order:
    """Something for the thread to do between two steps; `done` hears of it on the loop."""

    def __init__(self, deed: Deed, loop: asyncio.AbstractEventLoop) -> None:
        self._deed, self._loop = deed, loop
        self.done: asyncio.Future[None] = loop.create_future()

    def __call__(self) -> None:
        try:
            self._deed()
        except Exception as error:
            self._loop.call_soon_threadsafe(self._tell, _fault_of(error))
        else:
            self._loop.call_soon_threadsafe(self._tell, None)

    def _tell(self, fault: ModelyardError | None) -> None:
        if self.done.done():
            return
        if fault is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(fault)


def _fault_of(error: BaseException, what: str = "") -> ModelyardError:
    """`what` could not be done, for a reason that is not ours."""
    if isinstance(error, ModelyardError):
        return error
    if what:
        log.error("%s", what, exc_info=error)
        told = str(error).strip() or type(error).__name__
        return InvalidRequest(f"{what}: {told}", code="model_unreadable")
    internal = Internal("the ExLlamaV3 engine cannot take this job")
    log.error("job refused (id %s)", internal.id, exc_info=error)
    return internal
