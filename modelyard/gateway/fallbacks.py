"""A route with several models: the next one is tried if one cannot answer, until the first token.

    resolve → prepare for the first model → start ─┬─▶ a first token, or the end ──▶ its stream
                      ▲                            │
                      └── the next model ◀─────────┴── an error that another model may not have

Which errors lead on: the model is not loaded, draining or broken, its queue is full, its engine or upstream fails or
refuses, the route's `fallback_wait_s` is over, the request does not fit it (images, tools, a long prompt), or this
client may not use it. Not: what is wrong for every model, a limit of the client's key, and a cancelled request.

Events before the first token are held back until it comes: a client never sees the start of an answer that another
model gives. If no model answers, the error names the reason of each.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.errors import (
    Cancelled,
    ContextOverflow,
    KeyLimited,
    ModelyardError,
    OutputOverflow,
    QuotaExceeded,
    Unsupported,
    with_message,
)
from modelyard.core.events import Event, Failed, Measured, PromptRead, Started
from modelyard.core.request import Caller, Fallback, Request
from modelyard.gateway.compaction import Compactor
from modelyard.gateway.prepared_request import PreparedRequest
from modelyard.gateway.request_work import RequestWork
from modelyard.gateway.stream import EventBatch, Stream, WrappingStream
from modelyard.gateway.tool_rounds import ToolRounds
from modelyard.router.router import Target
from modelyard.telemetry.history import SkippedModel
from modelyard.telemetry.log import log_event
from modelyard.telemetry.metrics import Metrics

log = logging.getLogger("modelyard.gateway")

_LEADING_ON = frozenset(
    {
        "conflict",
        "forbidden",
        "internal",
        "not_found",
        "overloaded",
        "rate_limited",
        "timeout",
        "unauthenticated",
        "unavailable",
        "unimplemented",
    }
)
_MISFITS = (Unsupported, ContextOverflow, OutputOverflow)
_FINAL = (QuotaExceeded, Cancelled, KeyLimited)
_WORTH_A_RETRY = frozenset({"overloaded", "rate_limited", "timeout", "unavailable"})
_BEFORE_OUTPUT = (Started, PromptRead, Measured)


def leads_on(error: ModelyardError) -> bool:
    """Whether another model may answer where one failed with this error."""
    if isinstance(error, _FINAL) or error.code == "shutting_down":
        return False
    return isinstance(error, _MISFITS) or error.kind in _LEADING_ON


class Attempt(Struct, frozen=True):
    """A model that could not answer, and why."""

    model: str
    error: ModelyardError

    @property
    def reason(self) -> str:
        return self.error.code or self.error.kind


def no_answer(attempts: Sequence[Attempt]) -> ModelyardError:
    """The error of all attempts: of the kind of the last one if that is final, else of one that is worth a retry."""
    errors = [attempt.error for attempt in attempts]
    kind = errors[-1]
    if leads_on(kind):
        kind = next((error for error in errors if error.kind in _WORTH_A_RETRY), errors[0])
    reasons = "; ".join(f"{attempt.model}: {attempt.error.message}" for attempt in attempts)
    return with_message(kind, f"no model of this route could answer: {reasons}")


class FallbackPlan(Struct, frozen=True):
    """What is left to try: the client's request, the other targets, and what has failed so far."""

    size: int  # bytes of its body
    targets: tuple[tuple[Target, Request], ...]  # the client's request, as each model is asked
    attempts: tuple[Attempt, ...]
    wait_s: float | None


async def prepare_first(
    preparer: Compactor,
    request: Request,
    caller: Caller,
    work: RequestWork | None,
    target: Target,
    named: Sequence[tuple[Target, Fallback]] = (),
) -> PreparedRequest:
    """For the first model that takes the request: of the route, then of those that the client names. Raises if none
    does."""
    size = 0 if work is None else work.size
    targets = [(each, request) for each in (target, *target.fallbacks)]
    targets += [(each, _asked_of(fallback, request)) for each, fallback in named]
    plan = FallbackPlan(size, tuple(targets), (), target.fallback_wait_s)
    return await _prepare_next(preparer, plan, caller, work or RequestWork(size, caller.deadline))


def _asked_of(fallback: Fallback, request: Request) -> Request:
    limit, reasoning = fallback.max_tokens or request.max_tokens, fallback.reasoning or request.reasoning
    return replace(request, model=fallback.model, max_tokens=limit, reasoning=reasoning)


async def _prepare_next(preparer: Compactor, plan: FallbackPlan, caller: Caller, work: RequestWork) -> PreparedRequest:
    for number, (target, request) in enumerate(plan.targets):
        try:
            prepared = await preparer.prepare(request, caller, target, work)
        except ModelyardError as error:
            plan = replace(plan, attempts=_failed(preparer.metrics, plan, target.model, error, caller.deadline))
            continue
        rest = plan.targets[number + 1 :]
        # The last model is waited for as any other.
        wait_until = time.monotonic() + plan.wait_s if plan.wait_s is not None and rest else None
        skipped = tuple(SkippedModel(each.model, each.reason, each.error.message) for each in plan.attempts)
        return replace(prepared, plan=replace(plan, targets=rest), skipped=skipped, wait_until=wait_until)
    raise no_answer(plan.attempts)


def _failed(
    metrics: Metrics, plan: FallbackPlan, model: str, error: ModelyardError, deadline: float | None
) -> tuple[Attempt, ...]:
    """The attempts with this one. Raises if it is the end."""
    attempts = (*plan.attempts, Attempt(model, error))
    late = deadline is not None and time.monotonic() >= deadline
    if late or not leads_on(error):
        raise no_answer(attempts) if len(attempts) > 1 and not isinstance(error, Cancelled) else error
    metrics.fallbacks.add((model, attempts[-1].reason))
    log_event(log, logging.WARNING, "fallback", model=model, reason=attempts[-1].reason, why=error.message)
    return attempts


class FallbackStream(WrappingStream):
    """The `Stream` of the model tried now; `prepared` is that model's."""

    def __init__(
        self,
        prepared: PreparedRequest,
        plan: FallbackPlan,
        preparer: Compactor,
        start: Callable[[PreparedRequest], Stream],
    ) -> None:
        super().__init__(prepared)
        self._plan, self._preparer, self._start_model = plan, preparer, start
        self._held: list[EventBatch] = []  # before the first token
        self._work: RequestWork | None = None
        self._settled = self._over = False
        self._start()

    async def __anext__(self) -> EventBatch:
        if not self._settled:
            try:
                await self._settle()
            except ModelyardError as error:
                self._settled = self._over = True
                return 0, [Failed(error)]
        if self._held:
            return self._held.pop(0)
        if self._over or self._source is None:
            raise StopAsyncIteration
        return await self._source.__anext__()

    async def _settle(self) -> None:
        """Read until a model has given its first token or its whole answer. Raises if none does."""
        while not self._settled:
            if self._source is None:
                await self._try_next()
                continue
            try:
                choice, events = await self._source.__anext__()
            except StopAsyncIteration:
                self._settled = True
                return
            has_called = isinstance(self._source, ToolRounds) and self._source.has_called
            if isinstance(last := events[-1], Failed) and not _has_output(events) and not has_called:
                self._on_failed(last.error)
                continue
            self._held.append((choice, events))
            self._settled = _has_output(events) or isinstance(last, Failed)

    async def _try_next(self) -> None:
        self._check_cancelled()
        plan, caller = self._plan, self.prepared.caller
        if not plan.targets:
            raise no_answer(plan.attempts)
        self._work = RequestWork(plan.size, caller.deadline)
        self.prepared = await _prepare_next(self._preparer, plan, caller, self._work)
        self._check_cancelled()  # while it was prepared
        self._plan = self.prepared.plan or plan
        self._start()

    def _start(self) -> None:
        try:
            self._source = self._start_model(self.prepared)
        except ModelyardError as error:
            self._on_failed(error)

    def _on_failed(self, error: ModelyardError) -> None:
        """Raises if no other model may be tried."""
        if self._source is not None:
            self._source.close()
        has_lease = self._source is not None
        self._source, self._held = None, []
        caller, model = self.prepared.caller, self.prepared.model.name
        attempts = _failed(self._preparer.metrics, self._plan, model, self._cancelled or error, caller.deadline)
        if has_lease:  # its key has paid for a request
            caller = replace(caller, is_retry=True)
            self.prepared = replace(self.prepared, caller=caller)
        self._plan = replace(self._plan, attempts=attempts)

    def cancel(self, reason: ModelyardError | None = None) -> None:
        """Idempotent. No other model is tried."""
        super().cancel(reason)
        if self._work is not None:
            self._work.cancel(self._cancelled)

    def close(self) -> None:
        self._over = True
        super().close()


def _has_output(events: Sequence[Event]) -> bool:
    return not all(isinstance(event, (*_BEFORE_OUTPUT, Failed)) for event in events)
