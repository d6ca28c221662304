"""Work on a large request: in threads of its own, and stopped when the client leaves or its deadline passes.

The threads are not those of `asyncio.to_thread`: a handful of large prompts must not hold up admin calls, files and
engines. There are as many as cores; more would only slow each other down, and each holds a large prompt in memory.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar

from modelyard.core.errors import Cancelled, ContextOverflow, ModelyardError, Timeout
from modelyard.core.protocol import INLINE_BYTES
from modelyard.core.request import Reservation
from modelyard.library import cores
from modelyard.tokenizer.slices import EXACT_CHARS

P = ParamSpec("P")
T = TypeVar("T")


def _late() -> Timeout:
    return Timeout("the request's deadline passed while its prompt was read")


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(2, min(8, cores.logical())), "request")


class RequestWork:
    """`size` is that of the request's body, `reservation` what it may take. `cancel` may be called at any time on the
    event loop."""

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
        work = partial(self._run, partial(function, *args, **kwargs))
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
