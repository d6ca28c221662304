"""Jobs that are somebody else's work: each is one task that reads elsewhere and says here what it hears.

A job ends in exactly one Finished or Failed, however its task ends. That last word is put in the task's callback: a
task that is cancelled before its first step runs nothing of its own.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from modelyard.core.engine import Generation
from modelyard.core.errors import Cancelled, Incomplete, Internal, ModelyardError
from modelyard.core.events import Event, Failed, Finished
from modelyard.engines.generation_queue import GenerationQueue

log = logging.getLogger(__name__)

Say = Callable[[Sequence[Event]], Awaitable[bool]]  # True once the answer is over: what comes after it is not heard
Work = Callable[[Say], Coroutine[Any, Any, None]]


class Jobs:
    """All jobs of one engine. Made and used on the loop's thread; only `Generation.cancel` may come from elsewhere."""

    def __init__(self) -> None:
        self._jobs: set[Job] = set()  # also those whose answer is over and whose connection is not
        self._refusal: ModelyardError | None = None

    def __len__(self) -> int:
        """How many answers are under way."""
        return sum(not job.box.closed for job in self._jobs)

    def start(self, work: Work) -> Generation[Event]:
        job = Job(self._jobs.discard)
        if self._refusal is not None:
            job.end(Failed(self._refusal))
        else:
            self._jobs.add(job)
            job.begin(work)
        return job.box

    def refuse(self, error: ModelyardError) -> None:
        """Whatever runs ends with this error, and nothing new begins."""
        self._refusal = error
        for job in tuple(self._jobs):
            job.stop(error)

    async def settled(self) -> None:
        """Returns when no task of a job is left."""
        await asyncio.gather(*(job.task for job in tuple(self._jobs) if job.task), return_exceptions=True)


class Job:
    def __init__(self, on_over: Callable[[Job], None]) -> None:
        self.task: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._room.set()
        self.box: GenerationQueue[Event] = GenerationQueue(on_cancel=self._cancel, on_drained=self._room.set)
        self._why: ModelyardError = Cancelled("the job was cancelled")
        self._on_over = on_over
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

    def begin(self, work: Work) -> None:
        self.task = self._loop.create_task(work(self._say))
        self.task.add_done_callback(self._ended)

    async def _say(self, events: Sequence[Event]) -> bool:
        if events and not self.box.closed:
            over = isinstance(events[-1], Finished | Failed)
            if not self.box.put_many(events, last=over) and not over:
                self._room.clear()
        await self._room.wait()
        return self.box.closed

    def stop(self, error: ModelyardError) -> None:
        self._why = error
        if self.task is not None:
            self.task.cancel()

    def _cancel(self) -> None:
        if self.task is None:
            return
        if threading.get_ident() == self._thread:
            self.task.cancel()
        else:
            self._loop.call_soon_threadsafe(self.task.cancel)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._on_over(self)
        error = self._why if task.cancelled() else task.exception()
        if not self.box.closed:
            self.end(Failed(_ours(error)))

    def end(self, last: Failed) -> None:
        self.box.put_many([last], last=True)


def _ours(error: BaseException | None) -> ModelyardError:
    if isinstance(error, ModelyardError):
        return error
    if error is None:
        return Incomplete("the upstream's stream ended without a last word")
    internal = Internal(f"{type(error).__name__} while a request was forwarded")
    log.error("a forwarded request failed (id %s)", internal.id, exc_info=error)
    return internal
