"""How requests share the processor: stages on the event loop, threads for large requests, and tasks that outlive them.

The threads are not those of `asyncio.to_thread`: a handful of large prompts must not hold up admin calls, files and
engines. There are as many as cores; more would only slow each other down, and each holds a large prompt in memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
import types
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar

from modelyard.core.errors import Cancelled, ContextOverflow, ModelyardError, Timeout
from modelyard.core.protocol import INLINE_BYTES
from modelyard.core.request import Reservation
from modelyard.library import cores
from modelyard.tokenizer.slices import EXACT_CHARS

log = logging.getLogger("modelyard.gateway")

P = ParamSpec("P")
T = TypeVar("T")


@types.coroutine
def end_of_stage() -> Generator[None, None, None]:
    """Let the requests that arrived at the same time reach this point, too.

    They then run stage by stage, each stage for all of them while its code and data are in the CPU's caches: 0.7 of the
    CPU time per request with 32 clients. The wait for an engine in another thread or process does the same.
    """
    yield  # as `asyncio.sleep(0)`


def _late() -> Timeout:
    return Timeout("the request's deadline passed while its prompt was read")


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(2, min(8, cores.logical())), "request")


class RequestWork:
    """Work on a large request, which stops when the client leaves or its deadline passes.

    `size` is that of the request's body, `reservation` what it may take. `cancel` may be called at any time on the
    event loop.
    """

    __slots__ = ("_future", "_reason", "deadline", "reservation", "size")

    def __init__(self, size: int = 0, deadline: float | None = None, reservation: Reservation | None = None) -> None:
        self.size, self.deadline, self.reservation = size, deadline, reservation
        self._reason: ModelyardError | None = None
        self._future: asyncio.Future[Any] | None = None

    def cancel(self, reason: ModelyardError | None = None) -> None:
        self._reason = self._reason or reason or Cancelled("the client disconnected")
        if self._future is not None:
            self._future.cancel()

    def check(self) -> None:
        """Called in the thread, between two steps."""
        if self._reason is not None:
            raise self._reason
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise _late()

    def watch_window(self, chars: int, window: int | None) -> Callable[[int, int], None]:
        """What a tokenizer calls after each slice of a text of `chars` characters. It also stops a very long prompt
        that exceeds the window; the error then estimates the rest of it."""

        def on_progress(tokens: int, done: int) -> None:
            self.check()
            if window is not None and tokens >= window and done < chars and chars > EXACT_CHARS:
                raise ContextOverflow(max(tokens, round(tokens * chars / max(1, done))), window)

        return on_progress

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        self.check()
        work = partial(copy_context().run, self._run, partial(function, *args, **kwargs))
        future = asyncio.get_running_loop().run_in_executor(_threads(), work)
        self._future = future
        try:
            left = None if self.deadline is None else self.deadline - time.monotonic()
            return await asyncio.wait_for(future, left)
        except (TimeoutError, asyncio.CancelledError) as ended:
            if self._reason is None and isinstance(ended, asyncio.CancelledError):  # of the task itself
                self._reason = Cancelled("the request was cancelled")  # the thread stops too
                raise
            self._reason = self._reason or _late()
            raise self._reason from None
        finally:
            self._future = None

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. It ends if the client leaves."""
        task: asyncio.Future[T] = asyncio.ensure_future(work)
        self._future = task
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            raise self._reason or Cancelled("the request was cancelled") from None
        finally:
            self._future = None

    def _run(self, function: Callable[[], T]) -> T:
        """The client may have left while this waited for a thread."""
        self.check()
        return function()


async def run_in_request_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await RequestWork().run(function, *args, **kwargs)


async def run_sized(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run work on `size` bytes in a thread if it would block the event loop for long."""
    if size > INLINE_BYTES:
        return await run_in_request_thread(work, *args, **kwargs)
    return work(*args, **kwargs)


class BackgroundTasks:
    """Work that outlives its request. The references keep the tasks from being garbage-collected."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
