"""The jobs of an engine that forwards: one task per job, which reads the upstream and emits events.

A job ends with exactly one Finished or Failed. A callback of the task adds a missing Failed, because a task that is
cancelled before its first step does not run at all.
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

Emit = Callable[[Sequence[Event]], Awaitable[bool]]  # returns True once the answer has ended; later events are dropped
RunJob = Callable[[Emit], Coroutine[Any, Any, None]]


class UpstreamJobs:
    """All jobs of one engine. Use it on the thread of the event loop; only `Generation.cancel` is thread-safe."""

    def __init__(self) -> None:
        self._jobs: set[_UpstreamJob] = set()  # includes jobs that have ended but still hold a connection
        self._closed: ModelyardError | None = None

    def __len__(self) -> int:
        """The number of answers that have not ended."""
        return sum(not job.queue.closed for job in self._jobs)

    def start(self, run: RunJob) -> Generation[Event]:
        job = _UpstreamJob(self._jobs.discard)
        if self._closed is not None:
            job.queue.put_many([Failed(self._closed)], last=True)
        else:
            self._jobs.add(job)
            job.start(run)
        return job.queue

    def close(self, error: ModelyardError) -> None:
        """Fails all jobs, the running ones and later ones, with this error."""
        self._closed = error
        for job in tuple(self._jobs):
            job.stop(error)

    async def join(self) -> None:
        """Waits until the tasks of all jobs have ended."""
        await asyncio.gather(*(job.task for job in tuple(self._jobs) if job.task), return_exceptions=True)


class _UpstreamJob:
    def __init__(self, on_end: Callable[[_UpstreamJob], None]) -> None:
        self.task: asyncio.Task[None] | None = None
        self._is_drained = asyncio.Event()
        self._is_drained.set()
        self.queue: GenerationQueue[Event] = GenerationQueue(on_cancel=self._cancel, on_drained=self._is_drained.set)
        self._stop_error: ModelyardError = Cancelled("the job was cancelled")
        self._on_end = on_end
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

    def start(self, run: RunJob) -> None:
        self.task = self._loop.create_task(run(self._emit))
        self.task.add_done_callback(self._on_task_done)

    async def _emit(self, events: Sequence[Event]) -> bool:
        if events and not self.queue.closed:
            is_last = isinstance(events[-1], Finished | Failed)
            if not self.queue.put_many(events, last=is_last) and not is_last:
                self._is_drained.clear()
        await self._is_drained.wait()
        return self.queue.closed

    def stop(self, error: ModelyardError) -> None:
        self._stop_error = error
        if self.task is not None:
            self.task.cancel()

    def _cancel(self) -> None:
        if self.task is None:
            return
        if threading.get_ident() == self._thread:
            self.task.cancel()
        else:
            self._loop.call_soon_threadsafe(self.task.cancel)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._on_end(self)
        error = self._stop_error if task.cancelled() else task.exception()
        if self.queue.closed:
            return
        if error is None:
            error = Incomplete("the stream of the upstream ended without a final event")
        elif not isinstance(error, ModelyardError):
            internal = Internal(f"{type(error).__name__} while a request was forwarded")
            log.error("a forwarded request failed (id %s)", internal.id, exc_info=error)
            error = internal
        self.queue.put_many([Failed(error)], last=True)
