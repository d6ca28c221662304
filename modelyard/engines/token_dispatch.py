"""Hands chunks from an engine's thread to the event loop, in one call per step and when it costs the least.

A step's tokens are known when it ends, and the next step starts at once. If the event loop woke then, it would take the
GIL while the thread launches GPU work, and both would lose. So tokens may wait here until the thread is about to wait
for the GPU without the GIL. First tokens, ends, and whatever else a client waits for are delivered at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from modelyard.core.engine import Chunk, Tokens
from modelyard.engines.generation_queue import GenerationQueue


class HasQueue(Protocol):
    @property
    def queue(self) -> GenerationQueue[Chunk]: ...


JobChunks = tuple[HasQueue, Sequence[Chunk], bool]  # the last item: these are the job's last chunks
BatchTokens = tuple[Sequence[HasQueue], Sequence[int]]  # one token for each job


class TokenDispatch:
    """Belongs to one thread. `loop` is the event loop that reads the jobs' queues."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: list[JobChunks | BatchTokens] = []
        self._urgent = self._waited = False

    def put(self, job: HasQueue, chunks: Sequence[Chunk], last: bool = False, *, urgent: bool = True) -> None:
        """Chunks that are not `urgent` may wait until the thread's next GPU wait, if one follows soon."""
        self._pending.append((job, chunks, last))
        self._urgent = self._urgent or urgent or last

    def put_batch(self, jobs: Sequence[HasQueue], tokens: Sequence[int]) -> None:
        """One token for each job. The event loop creates the chunks: the thread's time is more valuable."""
        self._pending.append((jobs, tokens))
        self._urgent = True

    def flush(self) -> None:
        self._urgent = False
        if self._pending:
            pending, self._pending = self._pending, []
            self._loop.call_soon_threadsafe(deliver, pending)

    def before_gpu_wait(self) -> None:
        """The thread is about to wait without the GIL."""
        self._waited = True
        self.flush()

    def end_step(self, next_is_similar: bool) -> None:
        """`next_is_similar`: a step of the same kind follows at once. If this step did not wait for the GPU, the next
        may not either, so nothing is held back for it."""
        waited, self._waited = self._waited, False
        if self._urgent or not (next_is_similar and waited):
            self.flush()


def deliver(pending: list[JobChunks | BatchTokens]) -> None:
    """On the event loop. Jobs that have ended meanwhile are skipped."""
    for item in pending:
        if len(item) == 3:
            job, chunks, last = item
            if not job.queue.closed:
                job.queue.put_many(chunks, last=last)
        else:
            for job, token in zip(*item, strict=True):
                if not job.queue.closed:
                    job.queue.put(Tokens([token]))
