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

from modelyard.core.engine import Accepted, End, Engine, Generation, Tokens
from modelyard.core.errors import Cancelled, Incomplete, ModelyardError, Unavailable
from modelyard.core.events import BlockDelta, Event, Failed, Finished
from modelyard.core.lease import Lease, LeaseProvider, Ticket
from modelyard.gateway.prepared_request import PreparedRequest
from modelyard.gateway.timings import Moments, around
from modelyard.gateway.translate import ChatOutput, TextOutput, foreign
from modelyard.telemetry.cache_diagnostics import CacheReuse, PromptRecord
from modelyard.telemetry.metrics import Metrics
from modelyard.telemetry.request_capture import RequestCapture

log = logging.getLogger("modelyard.gateway")

# Tuples, made once: a union in an `isinstance` is made anew each time it is asked.
_LAST = (Finished, Failed)
_ENDS = (End, Failed)


class Surroundings(Protocol):
    """What an answer needs of the gateway."""

    leases: LeaseProvider
    metrics: Metrics

    def granted(self, job: PreparedRequest, engine: Engine) -> None: ...
    def accepted(self, answer: ChoiceStream, where: Accepted, engine: Engine) -> None: ...
    def ended(self, answer: ChoiceStream, last: Finished | Failed) -> None: ...
    def left(self, answer: Any) -> None: ...
    def background(self, work: Coroutine[Any, Any, None]) -> None: ...


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


class ChoiceStream:
    """While it runs it notes how it goes: `where` it was placed, what its cache had of the prompt (`reuse`), where that
    prompt is remembered (`asked`), and, for requests with tools, what was `said`. None: not yet, or nobody knows."""

    __slots__ = (
        "_around",
        "_began",
        "_cancelled",
        "_closed",
        "_engine",
        "_entry",
        "_generation",
        "_given",
        "_last",
        "_lease",
        "_retried",
        "_spoke",
        "_ticket",
        "_translation",
        "_waited",
        "_why",
        "asked",
        "choice",
        "job",
        "reuse",
        "said",
        "where",
    )

    def __init__(
        self,
        job: PreparedRequest,
        choice: int,
        ticket: Ticket,
        around: Surroundings,
        entry: RequestCapture | None = None,
        *,
        retry: bool = True,
    ) -> None:
        self.job, self.choice = job, choice
        self._ticket, self._around, self._entry = ticket, around, entry
        self._lease: Lease | None = None
        self._engine: Any = None
        self._generation: Generation[Any] | None = None
        self._translation = self._new_translation()
        self._retried, self._cancelled, self._closed = not retry, False, False
        self._why: ModelyardError | None = None
        self.where: Accepted | None = None
        self.reuse: CacheReuse | None = None
        self.asked: PromptRecord | None = None
        listens = job.request.tools and choice == 0 and job.model.kind == "text"
        self.said: list[Event] | None = [] if listens else None
        self._began = time.perf_counter()
        self._given: float | None = None
        self._spoke: float | None = None
        self._waited = self._last = 0.0

    def _new_translation(self) -> TextOutput | ChatOutput:
        if self.job.model.kind == "chat":
            return ChatOutput(self.job, self.choice)
        return TextOutput(self.job, self.choice, new_call_id, self._entry.output if self._entry else None)

    @property
    def ids(self) -> list[int] | None:
        """What was said, in tokens, where somebody wants to know."""
        return self._translation.ids

    def __aiter__(self) -> ChoiceStream:
        return self

    async def __anext__(self) -> tuple[int, list[Event]]:
        if self._translation.over:
            raise StopAsyncIteration
        events: list[Event] = []
        while not events:
            try:
                generation = self._generation
                if generation is None:
                    generation = self._begin(await self._ticket.lease())
                events = self._hear(await generation.__anext__())
            except StopAsyncIteration:
                events = self._translation.fail(Incomplete("the engine's stream ended without a last word"))
            except ModelyardError as error:
                events = self._translation.fail(error)
            except Exception as error:
                log.exception("an answer failed")
                events = self._translation.fail(foreign(error))
        if isinstance(last := events[-1], _LAST):
            events[-1] = last = self._told(last)
            self._around.ended(self, last)
            if self._lease is not None:
                self._lease.spend(self._translation.usage.output)
        return self.choice, events

    def _told(self, last: Finished | Failed) -> Finished | Failed:
        """An engine knows only its own share of the time, and only that it was cancelled, not why."""
        if isinstance(last, Finished):
            job, now = self.job, time.perf_counter()
            at = Moments(self._began, job.caller.arrived, self._given, self._spoke, self._waited)
            timings = around(last.timings, at, job.tokenize_s, now, remote=job.model.remote)
            return Finished(last.reason, last.usage, last.stop_string, timings)
        # An engine that is closed at the same time may have ended it in words of its own.
        return last if self._why is None else Failed(self._why)

    def _begin(self, lease: Lease) -> Generation[Any]:
        self._lease = lease
        lease.on_revoke(self.cancel)
        self._waited, self._given = lease.waited, time.perf_counter()
        job, choice = self.job, self.choice
        self._around.metrics.queued(job.model.name, lease.waited)
        if self._cancelled:
            raise Cancelled("the client went away")
        engine: Any = lease.engine
        self._engine = engine
        self._around.granted(job, engine)
        # By the definition's kind, not isinstance: a runtime check of a Protocol costs more than the whole step.
        is_text = job.model.kind == "text"
        begun: Generation[Any] = engine.generate(job.prompt(choice)) if is_text else engine.chat(job.chat(choice))
        self._generation = begun
        return begun

    def _hear(self, batch: Sequence[Any]) -> list[Event]:
        """Nothing, where there is nothing to tell yet, or all begins anew."""
        if self._may_retry(batch):
            self._retry()
            return []
        if type(batch[0]) is Accepted:
            self._around.accepted(self, batch[0], self._engine)
        before = self._translation.usage.output
        events = self._translation.feed(batch)
        self._observe(batch, self._translation.usage.output - before)
        if self.said is not None:
            self.said += events
        return events

    def _observe(self, batch: Sequence[Any], tokens: int) -> None:
        tokens = tokens or sum(isinstance(item, BlockDelta) for item in batch)
        if not tokens:
            return
        now, model, metrics = time.perf_counter(), self.job.model.name, self._around.metrics
        if not self._last:
            self._spoke = now
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
