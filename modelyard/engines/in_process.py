"""The life cycle that the in-process engines share.

    open ─→ load ─→ generate: check ─→ create ─→ submit ─→ tokens … End ─→ close
                                                         └→ the library fails ─→ all jobs end, `lost` resolves

`InProcessJob` is one generation. `InProcessEngine` is the event loop's side of an engine: opening, checking prompts,
closing, death. `ThreadedEngine` adds one thread that owns the model from loading to unloading. The thread takes jobs
from an inbox, steps the model, and hands the tokens of a step to the event loop in one call.

The memory of an unloaded model is returned to the operating system: glibc keeps most of what native code frees. Every
allocator arena (one per thread, up to eight per core) keeps free memory at its end up to a threshold, which grows to 64
MB as large blocks are freed. `malloc_trim` returns only the free memory before that end. So the threshold is lowered
while a model is freed; while models run it is high, because returning memory after each step would cost time.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, ClassVar, Generic, TypeVar

from msgspec import Struct

from modelyard.core.engine import Chunk, Control, End, EngineInfo, EngineSpec, Generation, Media, OnProgress, Prompt
from modelyard.core.errors import (
    ENGINE_DIED,
    ContextOverflow,
    Internal,
    InvalidRequest,
    ModelyardError,
    NotFound,
    Timeout,
    Unavailable,
    Unsupported,
)
from modelyard.core.events import Timings, Usage
from modelyard.engines.generation_queue import GenerationQueue, TokenDispatch

log = logging.getLogger(__name__)

# A native call that returns waits at most this long for a busy gateway to release the GIL; Python's default is 5 ms.
_SWITCH_INTERVAL_S = 0.0005
_LOADING = "loading weights"
_PREPARE_S = 60.0  # the longest wait for a job's grammar or images, which take at most a few seconds

T = TypeVar("T")

Finish = tuple[str, ModelyardError | None]  # why a job ends: reason and error of its End


class InProcessJob:
    """One generation.

    It is created on the event loop that reads `queue`. Once submitted, it belongs to the engine's thread, except for
    `cancelled`: any thread may set it, and the engine reads it between two steps. `preparing` is work on another thread
    that must be done before the engine's thread gets the job: compiling a grammar, reading images.
    """

    def __init__(self, prompt: Prompt, loop: asyncio.AbstractEventLoop, cache: str = "", window: int = 0) -> None:
        self.prompt, self.cache = prompt, cache
        self.queue: GenerationQueue[Chunk] = GenerationQueue(on_cancel=self.cancel, loop=loop)
        self.prompt_tokens = prompt.n_tokens
        self.cached_tokens = self.output_tokens = self.max_output = 0
        self.limit_reason: str = "length"
        self.cancelled: bool = False
        self.ended: bool = False
        self.created_at = time.perf_counter()
        self.first_token_at: float | None = None
        self.preparing: Future[Any] | None = None
        self.limit_output(window)

    def __repr__(self) -> str:
        progress = f"{self.output_tokens}/{self.max_output} output tokens"
        return f"<{type(self).__name__} {self.prompt_tokens} prompt tokens, {progress}>"

    def cancel(self) -> None:
        self.cancelled = True

    def revoked(self, now: float) -> Finish | None:
        """Why the job must not continue: it was cancelled, or its deadline has passed. `now` is monotonic time."""
        if self.cancelled:
            return "cancelled", None
        if self.prompt.deadline is not None and now >= self.prompt.deadline:
            return "error", Timeout("the job's deadline passed")
        return None

    def limit_output(self, window: int) -> None:
        """Limits the output to the room that the prompt leaves in the window."""
        room = window - self.prompt_tokens
        self.max_output = min(self.prompt.max_tokens, room)
        self.limit_reason = "window" if room < self.prompt.max_tokens else "length"

    def count_output(self, tokens: int = 1) -> None:
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.output_tokens += tokens

    def end(self, reason: Any, error: ModelyardError | None = None) -> End:
        self.ended = True
        return End(reason, self.usage(), self.timings(), error)

    def fail(self, error: ModelyardError) -> None:
        """Ends the job with an error, unless it has ended. Event loop only."""
        if not self.queue.closed:
            self.queue.put_many([self.end("error", error)], last=True)

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.cached_tokens, self.output_tokens)

    def timings(self) -> Timings:
        now, first = time.perf_counter(), self.first_token_at
        if first is None:
            return Timings(total=now - self.created_at)
        wait = first - self.created_at
        return Timings(prefill=wait, first_token=wait, decode=now - first, total=now - self.created_at)


J = TypeVar("J", bound=InProcessJob)


class InProcessEngine(ABC, Generic[J]):
    """The event loop's side of an engine. Create it on the loop that reads its generations."""

    library: ClassVar[str]  # the native library's name in messages

    def __init__(self, spec: EngineSpec, info: EngineInfo) -> None:
        self.spec, self.info = spec, info
        self.n_vocab = 0  # known once the model is loaded
        self.is_open = False
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[ModelyardError] = self._loop.create_future()
        self._opening: asyncio.Task[None] | None = None
        self._stop_error: ModelyardError | None = None  # why the engine takes no more jobs; set on the loop only

    # --- hooks --------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def _load(self, progress: OnProgress) -> None:
        """Loads the model."""

    @abstractmethod
    async def _shut_down(self) -> None:
        """Ends all jobs and frees the model. Called once loading is over, also if it failed, and once per `close`."""

    @abstractmethod
    def _create_job(self, prompt: Prompt, cache: str, window: int) -> J:
        """The job, complete but for what its `preparing` adds. Raises if the engine lacks what only it knows of."""

    @abstractmethod
    def _submit(self, job: J) -> None:
        """Runs the job."""

    # --- opening and closing ------------------------------------------------------------------------------------------

    async def open(self, progress: OnProgress) -> None:
        """Loads in a separate task: if the caller stops waiting, `close` waits for the load instead."""
        self._opening = asyncio.create_task(self._open(progress))
        await asyncio.shield(self._opening)
        progress(1.0, _LOADING)

    async def _open(self, progress: OnProgress) -> None:
        await self._load(progress)
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        self.is_open = True

    async def close(self) -> None:
        """Idempotent."""
        self._stop(Unavailable("the engine was closed"))
        if self._opening is not None:
            # `wait`, not `gather`: a caller that stops waiting must not cancel the load.
            await asyncio.wait({self._opening})
            if not self._opening.cancelled():
                self._opening.exception()  # marks it as retrieved: the caller of `open` may be gone
        self.is_open = False
        with memory_returned():
            await self._shut_down()
        await asyncio.to_thread(trim_memory)

    def _stop(self, error: ModelyardError) -> None:
        """Takes no more jobs, for the first reason given."""
        self._stop_error = self._stop_error or error

    def _report_lost(self, error: ModelyardError) -> None:
        """The engine died."""
        self._stop(error)
        if not self.lost.done():
            self.lost.set_result(error)

    def _require_open(self) -> None:
        if self._stop_error is not None:
            raise self._stop_error
        if not self.is_open:
            raise Unavailable("the engine is not open")

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt) -> Generation[Chunk]:
        try:
            self._require_open()
            cache = self._cache_name(prompt.cache)
            window = self.spec.caches[cache].window
            self._check(prompt, window)
            job = self._create_job(prompt, cache, window)
        except ModelyardError as error:
            refused = InProcessJob(prompt, self._loop)
            refused.fail(error)
            return refused.queue
        self._submit(job)
        return job.queue

    def _check(self, prompt: Prompt, window: int) -> None:
        """Raises if the engine cannot run the prompt, by what its capabilities say."""
        capabilities = self.info.capabilities
        if not capabilities.generates:
            raise Unsupported("this model does not generate", code="model_has_no_chat")
        if prompt.n_tokens >= window:
            raise ContextOverflow(prompt.n_tokens, window)
        for part in prompt.parts:
            if isinstance(part, Media) and part.kind not in capabilities.modalities:
                raise Unsupported(f"this model takes no {part.kind}", code="modality_unsupported")
        if prompt.prompt_logprobs is not None and not capabilities.prompt_logprobs:
            raise Unsupported(
                "this engine does not report a prompt's log probabilities", code="prompt_logprobs_unsupported"
            )
        ids = prompt.ids
        if not ids:
            raise InvalidRequest("the prompt is empty")
        if min(ids) < 0 or max(ids) >= self.n_vocab:
            raise InvalidRequest(f"the prompt holds token ids outside 0…{self.n_vocab - 1}")

    def _cache_name(self, name: str) -> str:
        """A prompt that names no cache uses the first one."""
        caches = self.spec.caches
        name = name or next(iter(caches), "")
        if name not in caches:
            raise NotFound(f"the engine has no cache {name!r}; it has {', '.join(caches)}")
        return name

    # --- messages -----------------------------------------------------------------------------------------------------

    def _unsupported_control(self, op: Control) -> InvalidRequest:
        return InvalidRequest(f"{self.library} does not support {op.op!r}", code="unsupported_control")

    def _as_error(self, error: BaseException) -> ModelyardError:
        """The error of one job or one call; what the library raised stays in the log."""
        if isinstance(error, ModelyardError):
            return error
        internal = Internal(f"the {self.library} engine failed to run this job")
        log.error("a job of %s failed (id %s)", self.library, internal.id, exc_info=error)
        return internal


def warn_about_trained_length(spec: EngineSpec, trained: int | None, advice: str = "") -> None:
    for name, info in spec.caches.items():
        if trained and info.window > trained:
            log.warning(
                f"the cache {name!r} has a window of {info.window} tokens, but the model {spec.model!r} was trained "
                f"on {trained}: answers beyond that length may be nonsense{advice}"
            )


class ThreadCall(Struct, frozen=True):
    """A function to run on the engine's thread between two steps; `done` resolves on the event loop."""

    function: Callable[[], Any]
    done: asyncio.Future[Any]


class WakeUp(Struct, frozen=True):
    """There may be work for the engine's thread again: look."""


class ThreadedEngine(InProcessEngine[J]):
    """An engine whose model belongs to one thread. Nothing else touches the model."""

    def __init__(self, spec: EngineSpec, info: EngineInfo) -> None:
        super().__init__(spec, info)
        self._inbox: SimpleQueue[J | ThreadCall | WakeUp | None] = SimpleQueue()  # None ends the thread
        self._dispatch = TokenDispatch(self._loop)
        self._thread: threading.Thread | None = None

    # --- hooks on the engine's thread ---------------------------------------------------------------------------------

    @abstractmethod
    def _load_model(self, report: Callable[[float], bool]) -> None:
        """`report` takes the fraction that is loaded; it returns False once the engine is being closed."""

    @abstractmethod
    def _unload_model(self) -> None:
        """Called last on the thread, also after a failed load."""

    @abstractmethod
    def _has_work(self) -> bool: ...

    @abstractmethod
    def _admit(self, job: J) -> None:
        """Adds a job to the running ones; an error ends that job only."""

    @abstractmethod
    def _step(self) -> None:
        """Computes one step and dispatches its tokens; an error is the engine's death."""

    @abstractmethod
    def _fail_all(self, error: ModelyardError) -> None:
        """Ends all running jobs without asking the model for anything."""

    def _finish_step(self) -> None:
        """Called before the set of jobs changes: completes what `_step` left in flight."""

    def _idle_work(self) -> bool:
        """Called while there is nothing else to do: a short piece of work. False: there is none."""
        return False

    def _after_shutdown(self) -> None:
        """Called after a clean end, before the model is unloaded; saves state."""

    # --- hooks on the event loop --------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Frees what belongs to neither thread, such as grammar compilers. Called in a worker thread."""

    # --- the event loop's side ----------------------------------------------------------------------------------------

    async def _load(self, progress: OnProgress) -> None:
        progress(0.0, _LOADING)
        loaded: asyncio.Future[None] = self._loop.create_future()

        def report(fraction: float) -> bool:
            self._loop.call_soon_threadsafe(progress, min(fraction, 0.99), _LOADING)
            return self._stop_error is None

        name = f"{self.info.backend}:{self.spec.model}"
        self._thread = threading.Thread(target=self._run, args=(report, loaded), name=name, daemon=True)
        self._thread.start()
        await loaded

    async def _shut_down(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            await asyncio.to_thread(thread.join)
        self._reject_queued()
        await asyncio.to_thread(self._release)

    def _report_lost(self, error: ModelyardError) -> None:
        super()._report_lost(error)
        self._reject_queued()

    def _reject_queued(self) -> None:
        """Fails what waits in the inbox of a thread that has ended."""
        error = self._stop_error or Unavailable("the engine was closed")
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, ThreadCall):
                _resolve(item.done, None, error)
            elif item is not None and not isinstance(item, WakeUp):
                item.fail(error)

    def _submit(self, job: J) -> None:
        if job.preparing is None:
            self._inbox.put(job)
        else:
            waiting = asyncio.wrap_future(job.preparing, loop=self._loop)
            timer = self._loop.call_later(_PREPARE_S, self._give_up, job, waiting)
            waiting.add_done_callback(partial(self._prepared, job, timer))

    def _give_up(self, job: J, preparing: asyncio.Future[Any]) -> None:
        """Others' work is in front of this job's. What has not begun is dropped."""
        reason = f"the grammar or the images of this request were not read within {_PREPARE_S:g} s; try again later"
        job.fail(Timeout(reason))
        job.cancel()
        preparing.cancel()

    def _prepared(self, job: J, timer: asyncio.TimerHandle, preparing: asyncio.Future[Any]) -> None:
        timer.cancel()
        error = self._stop_error or (Unavailable("the engine was closed") if preparing.cancelled() else None)
        failure = error or preparing.exception()
        if failure is None:
            self._inbox.put(job)
        else:
            job.fail(self._as_error(failure))

    def wake(self) -> None:
        """What a job waited for is there. Any thread may call it."""
        self._inbox.put(WakeUp())

    async def run_on_thread(self, function: Callable[[], T]) -> T:
        """The function's result; its error is the caller's, not the engine's death."""
        self._require_open()
        done: asyncio.Future[T] = self._loop.create_future()
        self._inbox.put(ThreadCall(function, done))
        return await done

    # --- the thread's side --------------------------------------------------------------------------------------------

    def _run(self, report: Callable[[float], bool], loaded: asyncio.Future[None]) -> None:
        try:
            self._load_model(report)
        except BaseException as error:
            self._unload()
            self._loop.call_soon_threadsafe(_resolve, loaded, None, self._load_error(error))
            return
        self._loop.call_soon_threadsafe(_resolve, loaded, None, None)
        try:
            while self._receive():
                self._step()
            self._finish_step()
        except Exception as error:
            log.exception("the %s thread died", self.library)
            death = Unavailable(f"the engine died: {error}", code=ENGINE_DIED)
            self._end_all(death)
            self._loop.call_soon_threadsafe(self._report_lost, death)
        else:
            self._end_all(Unavailable("the engine was closed"))
            self._after_shutdown()
        self._unload()

    def _end_all(self, error: ModelyardError) -> None:
        self._fail_all(error)
        self._dispatch.flush()

    def _load_error(self, error: BaseException) -> ModelyardError:
        if isinstance(error, ModelyardError):
            return error
        log.error("the model %r failed to load", self.spec.model, exc_info=error)
        reason = str(error).strip() or type(error).__name__
        return InvalidRequest(f"the model {self.spec.model!r} cannot be loaded: {reason}", code="model_unreadable")

    def _unload(self) -> None:
        """The thread ends, whatever goes wrong."""
        try:
            self._unload_model()
        except Exception:
            log.exception("the model %r was not unloaded cleanly", self.spec.model)

    def _receive(self) -> bool:
        """Takes what has arrived; blocks only while there is no work. False: the engine closes."""
        busy = self._has_work()
        while not (busy and self._inbox.empty()):
            while self._inbox.empty() and self._idle_work():
                pass
            item = self._inbox.get()
            if item is None:
                return False
            if isinstance(item, WakeUp):
                busy = self._has_work()
                continue
            self._finish_step()
            if isinstance(item, ThreadCall):
                self._run_call(item)
                return True  # one call per step: many of them must not delay the streams
            self._admit_or_fail(item)
            busy = True
        return True

    def _run_call(self, call: ThreadCall) -> None:
        try:
            result, error = call.function(), None
        except Exception as raised:
            result, error = None, self._as_error(raised)
        self._loop.call_soon_threadsafe(_resolve, call.done, result, error)

    def _admit_or_fail(self, job: J) -> None:
        finish = job.revoked(time.monotonic())
        if finish is None:
            try:
                self._admit(job)
            except Exception as error:
                finish = "error", self._as_error(error)
        if finish is not None:
            self._dispatch.put(job, [job.end(*finish)], True)


def _resolve(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """On the event loop. A future whose reader is gone is cancelled."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LOW, _HIGH = 128 << 10, 64 << 20  # glibc's own: at the start, and the highest that it sets by itself
_MMAP_THRESHOLD = 32 << 20  # the highest that glibc sets by itself


@contextmanager
def memory_returned() -> Iterator[None]:
    """What is freed in this block goes back to the operating system. Does nothing without glibc."""
    if not _has_trim():
        yield
        return
    _set_thresholds(_LOW)
    try:
        yield
    finally:
        _set_thresholds(_HIGH)


def trim_memory() -> None:
    """Returns what lies free between blocks in use; takes milliseconds. Does nothing without glibc."""
    if _has_trim():
        ctypes.CDLL(None).malloc_trim(0)


def _set_thresholds(keep: int) -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, keep)


@cache
def _has_trim() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")
