"""One choice of an answer while it runs: waits for its lease, starts the engine, hands events on, lets go.

Iterating gives `(choice, events)` and ends after Finished or Failed. `cancel` may be called at any time from the loop's
thread: in the queue, in prefill, in the stream; its one reader then hears Failed(Cancelled), and calls `close` when it
stops reading. The lease goes back when the engine says that the slot is free, which may be a step later than the
client's last event: `_drain` waits for it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from msgspec import Struct

from modelyard.core.engine import Accepted, End, Engine, Generation, Tokens
from modelyard.core.errors import Cancelled, Incomplete, ModelyardError, Unavailable
from modelyard.core.events import BlockDelta, Event, Failed, Finished
from modelyard.core.lease import Lease, Leases, Ticket
from modelyard.gateway.job import Job
from modelyard.gateway.timings import Moments, around
from modelyard.gateway.translate import ChatTranslation, TextTranslation, foreign
from modelyard.telemetry.cause import Reuse
from modelyard.telemetry.journal import Entry
from modelyard.telemetry.metrics import Metrics

log = logging.getLogger("modelyard.gateway")

# Tuples, made once: a union in an `isinstance` is made anew each time it is asked.
_LAST = (Finished, Failed)
_ENDS = (End, Failed)


class Course(Struct):
    """How an answer went: where it was placed, what its cache had, and, for requests with tools, what was said."""

    where: Accepted | None = None
    reuse: Reuse | None = None
    said: list[Event] | None = None
    ids: list[int] | None = None


class Surroundings(Protocol):
    """What an answer needs of the gateway."""

    leases: Leases
    metrics: Metrics

    def granted(self, job: Job, engine: Engine) -> None: ...
    def accepted(self, job: Job, choice: int, where: Accepted, engine: Engine) -> Reuse | None: ...
    def ended(self, job: Job, choice: int, last: Finished | Failed, course: Course) -> None: ...
    def left(self, answer: Any) -> None: ...
    def background(self, work: Coroutine[Any, Any, None]) -> None: ...


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


class Answer:
    def __init__(
        self,
        job: Job,
        choice: int,
        ticket: Ticket,
        around: Surroundings,
        entry: Entry | None = None,
        *,
        retry: bool = True,
    ) -> None:
        self.job, self.choice = job, choice
        self._ticket, self._around, self._entry = ticket, around, entry
        self._lease: Lease | None = None
        self._generation: Generation[Any] | None = None
        self._translation = self._new_translation()
        self._retried, self._cancelled, self._closed = not retry, False, False
        self._why: ModelyardError | None = None
        listens = job.request.tools and choice == 0 and job.model.kind == "text"
        self.course = Course(said=[] if listens else None)
        self._began = time.perf_counter()
        self._at = Moments(self._began, job.caller.arrived)
        self._last = 0.0

    def _new_translation(self) -> TextTranslation | ChatTranslation:
        if self.job.model.kind == "chat":
            return ChatTranslation(self.job, self.choice)
        return TextTranslation(self.job, self.choice, new_call_id, self._entry.output if self._entry else None)

    @property
    def reuse(self) -> Reuse | None:
        """What the cache had of the prompt; None until the engine has said so, and where it cannot."""
        return self.course.reuse

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> tuple[int, list[Event]]:
        if self._translation.over:
            raise StopAsyncIteration
        try:
            events = await self._next()
        except ModelyardError as error:
            events = self._translation.fail(error)
        except Exception as error:
            log.exception("an answer failed")
            events = self._translation.fail(foreign(error))
        if isinstance(last := events[-1], _LAST):
            events[-1] = last = self._told(last)
            self.course.ids = self._translation.ids
            self._around.ended(self.job, self.choice, last, self.course)
            if self._lease is not None:
                self._lease.spend(self._translation.usage.output)
        return self.choice, events

    def _told(self, last: Finished | Failed) -> Finished | Failed:
        """An engine knows only its own share of the time, and only that it was cancelled, not why."""
        if isinstance(last, Finished):
            job, now = self.job, time.perf_counter()
            timings = around(last.timings, self._at, job.tokenize_s, now, remote=job.model.remote)
            return Finished(last.reason, last.usage, last.stop_string, timings)
        # An engine that is closed at the same time may have ended it in words of its own.
        return last if self._why is None else Failed(self._why)

    async def _next(self) -> list[Event]:
        while True:
            generation = self._generation if self._generation is not None else await self._begin()
            try:
                batch = await generation.__anext__()
            except StopAsyncIteration:
                raise Incomplete("the engine's stream ended without a last word") from None
            if self._may_retry(batch):
                self._retry()
                continue
            if events := self._translate(batch):
                return events

    async def _begin(self) -> Generation[Any]:
        self._lease = lease = await self._ticket.lease()
        lease.on_revoke(self.cancel)
        self._around.metrics.queued(self.job.model.name, lease.waited)
        self._at.waited, self._at.given = lease.waited, time.perf_counter()
        if self._cancelled:
            raise Cancelled("the client went away")
        job = self.job
        engine: Any = lease.engine
        self._around.granted(job, engine)
        # By the definition's kind, not isinstance: a runtime check of a Protocol costs more than the whole step.
        is_text, choice = job.model.kind == "text", self.choice
        begun: Generation[Any] = engine.generate(job.prompt(choice)) if is_text else engine.chat(job.chat(choice))
        self._generation = begun
        return begun

    def _translate(self, batch: Sequence[Any]) -> list[Event]:
        if type(batch[0]) is Accepted and self._lease is not None:
            self.course.where = batch[0]
            self.course.reuse = self._around.accepted(self.job, self.choice, batch[0], self._lease.engine)
        before = self._translation.usage.output
        events = self._translation.feed(batch)
        self._observe(batch, self._translation.usage.output - before)
        if self.course.said is not None:
            self.course.said += events
        return events

    def _observe(self, batch: Sequence[Any], tokens: int) -> None:
        tokens = tokens or sum(isinstance(item, BlockDelta) for item in batch)
        if not tokens:
            return
        now, model, metrics = time.perf_counter(), self.job.model.name, self._around.metrics
        if not self._last:
            self._at.spoke = now
            metrics.first_token(model, now - self._began)
        else:
            metrics.inter_token(model, (now - self._last) / tokens, tokens)
        self._last = now

    # --- a second try ---------------------------------------------------------------------------------------------

    def _may_retry(self, batch: Sequence[Any]) -> bool:
        """Only an engine that was lost before it said anything, once, and only for a client that is still there."""
        if self.job.model.remote:
            return False  # its engine tries again by itself, as often as its settings say
        last = batch[-1]
        error = last.error if isinstance(last, _ENDS) else None
        if error is None or not isinstance(error, Unavailable):
            return False
        if self._retried or self._cancelled or self._translation.spoke:
            return False
        return not any(isinstance(item, Tokens | BlockDelta) for item in batch)

    def _retry(self) -> None:
        self._retried = True
        self._generation = None
        self._release()
        self._ticket = self._around.leases.request(self.job.demand(again=True))

    # --- the end --------------------------------------------------------------------------------------------------

    def cancel(self, why: ModelyardError | None = None) -> None:
        """Idempotent. The reader gets Failed(why or Cancelled) next, unless the answer was over already."""
        if self._cancelled:
            return
        self._cancelled, self._why = True, why
        if self._generation is not None:
            self._generation.cancel()
        else:
            self._ticket.cancel()

    def close(self) -> None:
        """The reader has stopped reading, at the end or before it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._around.left(self)
        if self._generation is None:
            self._ticket.cancel()
        elif self._translation.slot_free:
            self._release()
        else:
            self._generation.cancel()
            self._around.background(self._drain(self._generation))

    async def _drain(self, generation: Generation[Any]) -> None:
        """Tokens that the engine ran ahead are dropped; the slot goes back when it says so, or breaks."""
        try:
            async for _ in generation:
                pass
        finally:
            self._release()

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()
