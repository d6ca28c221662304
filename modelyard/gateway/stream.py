"""A reply while it runs. `Stream` is the interface of all that give events; `ChoiceStream` is one generation."""

from __future__ import annotations

import logging
import time
from asyncio import Future
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol, Self
from weakref import WeakKeyDictionary

from msgspec import Struct

from modelyard.accounts.accounts import Accounts
from modelyard.core.engine import Accepted, End, Engine, Generation, Prompt, Tokens
from modelyard.core.errors import ENGINE_DIED, Cancelled, Incomplete, Internal, ModelyardError, Unavailable
from modelyard.core.events import BlockDelta, CacheReuse, Event, Failed, Finished, Started, Timings, Usage
from modelyard.core.pool import Lease, LeaseProvider, Ticket
from modelyard.gateway.cache_diagnostics import CacheDiagnostics, PromptRecord
from modelyard.gateway.model import CapabilityCache, check_capabilities, ignored_parameters, media_kinds
from modelyard.gateway.output import ChatOutput, TextOutput, new_call_id
from modelyard.gateway.prepared_request import PreparedRequest
from modelyard.gateway.repetition import NUDGE
from modelyard.gateway.replay_memory import ReplayMemory, as_message, generated_reply, text_before_calls
from modelyard.gateway.request_work import BackgroundTasks, end_of_stage
from modelyard.telemetry.history import History, RequestRecord
from modelyard.telemetry.metrics import Metrics
from modelyard.telemetry.request_capture import RequestCapture, current_capture

log = logging.getLogger("modelyard.gateway")

EventBatch = tuple[int, list[Event]]  # the events of one choice that arrived together


class Stream(Protocol):
    """The events of a request while it runs. Six classes have this interface:

        ChoiceStream        one generation: waits for its lease, starts the engine, reads its output
        MultiChoiceStream   several generations on one lease: `n` > 1, or several prompts
        SharedReader        reads the stream of an identical request
        ToolRounds          generates, calls tools of MCP servers, generates again
        CompactingStream    has a long conversation summarised, then generates the answer
        FallbackStream      the stream of the first model of a route that answers

    Iterating gives the events of one choice after the other, as they arrive, and ends after one Finished or Failed for
    each choice. `cancel` may be called at any time on the event loop: in the queue, in prefill, in the stream; the
    reader then gets Failed. The reader calls `close` when it stops reading, at the end or before. Both are idempotent.
    """

    @property
    def prepared(self) -> PreparedRequest:
        """What runs. Another model of the route may take its place until the first token."""

    @property
    def reuse(self) -> CacheReuse | None:
        """How much of the prompt the cache had; None until the engine has accepted it."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Requested sampling parameters that the engine does not support."""

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> EventBatch: ...

    def cancel(self, reason: ModelyardError | None = None) -> None: ...

    def close(self) -> None: ...


class WrappingStream:
    """Base of the streams that read others, one after the other: `_source` is the one that runs now. `_events` gives
    the events of one choice; whatever it raises becomes Failed."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self.prepared = prepared
        self._source: Stream | None = None
        self._cancelled: ModelyardError | None = None
        self._batches = self._run()

    @property
    def reuse(self) -> CacheReuse | None:
        return None if self._source is None else self._source.reuse

    @property
    def ignored(self) -> tuple[str, ...]:
        return () if self._source is None else self._source.ignored

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EventBatch:
        return 0, await self._batches.__anext__()

    def cancel(self, reason: ModelyardError | None = None) -> None:
        """Idempotent. The reader gets Failed next."""
        if self._cancelled is None:
            self._cancelled = reason or Cancelled("the client disconnected")
            if self._source is not None:
                self._source.cancel(reason)

    def close(self) -> None:
        if self._source is not None:
            self._source.close()

    def _check_cancelled(self) -> None:
        if self._cancelled is not None:
            raise self._cancelled

    async def _run(self) -> AsyncIterator[list[Event]]:
        try:
            async for events in self._events():
                if isinstance(last := events[-1], Finished | Failed):
                    events[-1] = self._end(last)
                yield events
        except ModelyardError as error:
            yield [self._end(Failed(self._cancelled or error))]
        except Exception as error:
            log.exception("%s failed", type(self).__name__)
            yield [self._end(Failed(Internal(f"{type(error).__name__} between two generations")))]

    def _events(self) -> AsyncIterator[list[Event]]:
        raise NotImplementedError

    def _end(self, last: Finished | Failed) -> Finished | Failed:
        """The last event as the reader gets it."""
        return last


class NewestStarts:
    """When the last request of each engine was started that is not finished: when an engine dies, that one may be the
    reason. An engine that is closed is forgotten. Its future `lost` stands for it: an engine of a plug-in may allow no
    weak references, or compare by value."""

    def __init__(self) -> None:
        self._at: WeakKeyDictionary[Future[ModelyardError], float] = WeakKeyDictionary()

    def add(self, engine: Engine, at: float) -> None:
        self._at[engine.lost] = at

    def finished(self, engine: Engine, at: float | None) -> None:
        if self._at.get(engine.lost) == at:
            self._at.pop(engine.lost, None)

    def has_later(self, engine: Engine, at: float | None) -> bool:
        """Whether another request was started after this one, and has not finished."""
        newest = self._at.get(engine.lost)
        return newest is not None and newest != at


class StreamServices(Struct, frozen=True):
    """What a generation uses, of which a process has one each."""

    leases: LeaseProvider
    metrics: Metrics
    history: History
    accounts: Accounts
    capabilities: CapabilityCache
    diagnostics: CacheDiagnostics
    replay: ReplayMemory
    newest_starts: NewestStarts
    background: BackgroundTasks


class ChoiceStream:
    """One generation: waits for its lease, starts the engine, passes events on, releases the lease.

    The lease is released when the engine reports a free slot, which may be after the end: `_drain` waits for it.
    """

    __slots__ = (
        "_accepted",
        "_cancel_reason",
        "_cancelled",
        "_capture",
        "_closed",
        "_engine",
        "_engine_started",
        "_engine_was_lost",
        "_events",
        "_first_output",
        "_generation",
        "_last_output",
        "_lease",
        "_may_retry",
        "_on_close",
        "_prompt_record",
        "_services",
        "_started",
        "_ticket",
        "choice",
        "ignored",
        "output",
        "prepared",
        "reuse",
    )

    def __init__(
        self,
        prepared: PreparedRequest,
        choice: int,
        ticket: Ticket,
        services: StreamServices,
        capture: RequestCapture | None = None,
        on_close: Callable[[ChoiceStream], None] | None = None,
        *,
        retry: bool = True,
    ) -> None:
        self.prepared, self.choice = prepared, choice
        self._ticket, self._services, self._capture, self._on_close = ticket, services, capture, on_close
        self._lease: Lease | None = None
        self._engine: Any = None
        self._engine_was_lost = False  # before this request reached it
        self._generation: Generation[Any] | None = None
        self._may_retry = retry and not prepared.model.remote  # a remote engine retries by itself
        self._cancelled = self._closed = False
        self._cancel_reason: ModelyardError | None = None
        self.output: TextOutput | ChatOutput
        if prepared.model.kind == "chat":
            self.output = ChatOutput(prepared, choice)
        else:
            self.output = TextOutput(prepared, choice, new_call_id, capture.output if capture is not None else None)
        self._accepted: Accepted | None = None
        self.reuse: CacheReuse | None = None  # how much of the prompt the cache had
        self._prompt_record: PromptRecord | None = None  # where the diagnostics keep this prompt
        self.ignored: tuple[str, ...] = ()  # requested sampling parameters that the engine does not support
        keep_events = prepared.request.tools and choice == 0 and prepared.model.kind == "text"
        self._events: list[Event] | None = [] if keep_events else None
        self._started = time.perf_counter()
        self._engine_started: float | None = None
        self._first_output: float | None = None
        self._last_output = 0.0

    @property
    def has_lease(self) -> bool:
        return self._lease is not None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EventBatch:
        output = self.output
        if output.over:
            raise StopAsyncIteration
        events: list[Event] = []
        while not events:
            try:
                if self._generation is None:
                    self._generation = self._start_engine(await self._ticket.lease())
                    if self.prepared.model.kind == "text":
                        await end_of_stage()  # start
                elif output.repeats:
                    events = await self._stop_repetition(self._generation)
                    continue
                batch = await self._generation.__anext__()
                failure = batch[-1].error if isinstance(batch[-1], (End, Failed)) else None
                if failure is not None and self._should_retry(batch, failure):
                    self._retry()
                    continue
                if type(batch[0]) is Accepted and not output.is_nudged:
                    self._on_accepted(batch[0])
                before = output.tokens
                events = output.feed(batch)
                if output.tokens > before:
                    self._observe(output.tokens - before)
                if self._events is not None:
                    self._events += events
            except StopAsyncIteration:
                events = output.fail(Incomplete("the engine's stream ended without a final event"))
            except ModelyardError as error:
                events = output.fail(error)
            except Exception as error:
                log.exception("a stream failed")
                events = output.fail(Internal(f"{type(error).__name__} while generating"))
        if isinstance(last := events[-1], (Finished, Failed)):
            events[-1] = self._end(last)
        return self.choice, events

    def _start_engine(self, lease: Lease) -> Generation[Any]:
        self._lease = lease
        lease.on_revoke(self.cancel)
        self._engine_started = time.perf_counter()
        if self._may_retry:  # a second attempt is not the one that killed the engine of the first
            self._services.newest_starts.add(lease.engine, self._engine_started)
        prepared, services = self.prepared, self._services
        model, request = prepared.model, prepared.request
        services.metrics.queue_wait.observe(model.name, lease.waited)
        if self._cancelled:
            raise Cancelled("the client disconnected")
        engine: Any = lease.engine
        self._engine, self._engine_was_lost = engine, engine.lost.done()
        capabilities = engine.info.capabilities
        if capabilities is not prepared.capabilities and capabilities != prepared.capabilities:
            # The engine was loaded or replaced after `prepare`.
            effective = services.capabilities.effective(model, capabilities)
            check_capabilities(request, effective, model.name, media=media_kinds(request))
        if ignored := ignored_parameters(request, capabilities):
            self.ignored = ignored
            services.metrics.warnings.add(("parameter_ignored",))
            log.info("request: the engine of %s ignores %s", model.name, ", ".join(ignored))
        # By the definition's kind: `isinstance` with a runtime-checkable Protocol is slow.
        started: Generation[Any]
        if model.kind == "text":
            started = engine.generate(prepared.engine_prompt(self.choice))
        elif self._capture is None:
            started = engine.chat(prepared.engine_request(self.choice))
        else:
            token = current_capture.set(self._capture)
            try:
                started = engine.chat(prepared.engine_request(self.choice))
            finally:
                current_capture.reset(token)
        return started

    async def _stop_repetition(self, generation: Generation[Any]) -> list[Event]:
        """The output repeats itself. If the engine has a DRY penalty, it continues the output once with it, from the KV
        that it has: a model that only needs a nudge finds its way. Else, or if it repeats itself again, it ends."""
        prompt, model, output = self._nudged_prompt(), self.prepared.model.name, self.output
        self._services.metrics.repetitions.add((model, "ended" if prompt is None else "nudged"))
        log.info("request %s: the output of %s repeats itself", self.prepared.caller.trace, model)
        if prompt is None or not isinstance(output, TextOutput):
            return output.end_repetition()
        generation.cancel()
        last: Any = None
        async for batch in generation:  # until its slot is free
            last = batch[-1]
        if self._cancelled:
            raise Cancelled("the client disconnected")
        if isinstance(last, End) and last.error is not None:
            raise last.error
        output.nudge()
        self._generation = self._engine.generate(prompt)
        return []

    def _nudged_prompt(self) -> Prompt | None:
        prepared, output = self.prepared, self.output
        if output.is_nudged or not output.ids or prepared.sampling.dry_multiplier or prepared.reasoning is not None:
            return None
        if "dry_multiplier" in self._engine.info.capabilities.ignored or prepared.request.prompt_logprobs is not None:
            return None
        prompt = prepared.continued_prompt(self.choice, output.ids, NUDGE)
        return prompt if prompt.max_tokens > 0 else None

    def _on_accepted(self, accepted: Accepted) -> None:
        """The engine has placed the prompt: record how much of it its cache had, and why not more."""
        self._accepted, prepared, services = accepted, self.prepared, self._services
        if self.choice != 0:
            return
        if (change := services.diagnostics.system_prompt_change(prepared, accepted)) is not None:
            services.metrics.system_prompt_changes.add((prepared.target.cache,))
            log.warning("%s", change)
        if (found := services.diagnostics.reuse(prepared, accepted, self._engine.info.page)) is not None:
            self.reuse, self._prompt_record = found
            services.metrics.cache_lookup(prepared.target.cache, self.reuse)

    def _observe(self, tokens: int) -> None:
        now, model, metrics = time.perf_counter(), self.prepared.model.name, self._services.metrics
        if self._first_output is None:
            self._first_output = now
            metrics.first_token.observe(model, now - self._started)
        else:
            metrics.inter_token.observe(model, (now - self._last_output) / tokens, tokens)
        self._last_output = now

    def _end(self, last: Finished | Failed) -> Finished | Failed:
        """Count the request, keep what its next turn needs, and add it to the history. Return the last event with the
        gateway's own times."""
        prepared, services, accepted = self.prepared, self._services, self._accepted
        request, caller, model = prepared.request, prepared.caller, prepared.model
        status: str
        measured = gateway_timings(
            last.timings if isinstance(last, Finished) else Timings(),
            now=time.perf_counter(),
            arrived=caller.arrived,
            started=self._started,
            engine_started=self._engine_started,
            first_output=self._first_output,
            queue_s=self._lease.waited if self._lease is not None else 0.0,
            tokenize_s=prepared.tokenize_s,
            remote=model.remote,
        )
        if isinstance(last, Finished):
            usage, status = last.usage, last.reason
            last = Finished(last.reason, usage, last.stop_string, measured)
            services.metrics.generation_finished(model.name, prepared.billed_usage(self.choice, usage), status)
            if self.choice == 0:
                if self._prompt_record is not None:
                    self._prompt_record.output = usage.output
                if request.tools:
                    self._remember(usage)
            services.newest_starts.finished(self._engine, self._engine_started)
        else:
            # An engine that is closed at the same time may report its own reason.
            error = self._cancel_reason or last.error
            last, usage, status = Failed(error), self.output.usage, error.code or error.kind
        failed = isinstance(last, Failed) and not isinstance(last.error, Cancelled)
        cost = self._bill(usage, failed=failed)
        record = RequestRecord(
            trace=caller.trace,
            model=model.name,
            cache=prepared.target.cache,
            endpoint=caller.endpoint,
            key=caller.key,
            session=request.session,
            at=time.time(),
            status=status,
            failed=failed,
            usage=usage,
            timings=measured,
            divergence=accepted.divergence if accepted is not None else None,
            evicted=accepted is not None and accepted.evicted,
            reuse=self.reuse,
            cost=cost,
            skipped=prepared.skipped,
        )
        if prepared.server_tools is None:
            services.history.add(record)
        else:
            prepared.server_tools.records.append(record)  # `ToolRounds` adds one for all rounds
        if self._lease is not None:
            self._lease.spend(usage.output)
        return last

    def _remember(self, usage: Usage) -> None:
        """Keep the generated tokens and calls: the next prompt of this session begins with them."""
        prepared, ids, replay = self.prepared, self.output.ids, self._services.replay
        if ids and prepared.prompts:
            prepared.model.pipeline.renderer.learn(prepared.prompts[0].ids, ids)
        reply = generated_reply(prepared, self._events, ids, usage)
        if reply is None:
            return
        if self._prompt_record is not None:
            self._prompt_record.reply = as_message(reply)
        kept = replay.keep(reply, prepared.caller.key, text_before_calls(prepared, reply, ids))
        if kept:
            self._services.background.run(replay.share(kept, prepared.caller.key))

    def _bill(self, usage: Usage, *, failed: bool) -> float:
        """Count the request for its key, and what it costs. A prompt that no engine has accepted is free."""
        prepared, choice, tools = self.prepared, self.choice, self.prepared.server_tools
        billed = prepared.billed_usage(choice, usage) if self.output.emitted_start else Usage()
        is_first = choice == 0 and (tools is None or not tools.records)  # choice of the first round
        return self._services.accounts.add(
            prepared.caller.key, prepared.model.name, billed, failed=failed, requests=int(is_first)
        )

    # --- a second attempt -----------------------------------------------------------------------------------------

    def _should_retry(self, batch: Sequence[Any], error: ModelyardError) -> bool:
        """Once, if the engine was lost before any output and the client is still connected."""
        if not isinstance(error, Unavailable) or not self._may_retry or self._cancelled or self.output.has_output:
            return False
        if error.code == ENGINE_DIED and self._is_suspect(batch):
            return False
        return not any(isinstance(item, (Tokens, BlockDelta)) for item in batch)

    def _is_suspect(self, batch: Sequence[Any]) -> bool:
        """Whether this request may have killed the engine, and would kill the next one: the engine had not accepted it
        yet, or no other request was started after it that still ran."""
        if self._engine_was_lost:
            return False
        is_accepted = self.output.emitted_start or isinstance(batch[0], (Accepted, Started))
        return not is_accepted or not self._services.newest_starts.has_later(self._engine, self._engine_started)

    def _retry(self) -> None:
        self._may_retry = False
        self._generation = None
        self._release()
        self._ticket = self._services.leases.request(self.prepared.lease_request(is_retry=True))

    # --- the end --------------------------------------------------------------------------------------------------

    def cancel(self, reason: ModelyardError | None = None) -> None:
        """Idempotent. The reader gets Failed(reason or Cancelled) next, unless the stream is over."""
        if self._cancelled:
            return
        self._cancelled, self._cancel_reason = True, reason
        if self._generation is not None:
            self._generation.cancel()
        else:
            self._ticket.cancel()

    def close(self) -> None:
        """The reader has stopped reading, at the end or before. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._on_close is not None:
            self._on_close(self)
        if not self.output.over:  # the server stops, or the connection is broken
            self._bill(self.output.usage, failed=True)
        if self._generation is None:
            self._ticket.cancel()
        elif self.output.slot_free:
            self._release()
        else:
            self._generation.cancel()
            self._services.background.run(self._drain(self._generation))

    async def _drain(self, generation: Generation[Any]) -> None:
        """Drop the tokens that the engine generated ahead; release the slot when the engine reports it free."""
        try:
            async for _ in generation:
                pass
        finally:
            self._release()

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


def gateway_timings(
    engine: Timings,
    *,
    now: float,
    started: float,
    tokenize_s: float,
    queue_s: float = 0.0,
    arrived: float | None = None,
    engine_started: float | None = None,
    first_output: float | None = None,
    remote: bool,
) -> Timings:
    """The engine's own figures, completed with what the gateway measured. All times are of one clock.

    A remote engine's first token includes the network, so it does not count as the model's.
    """
    first_token, decode = engine.first_token, engine.decode
    if engine_started is not None and first_output is not None and not remote:
        first_token = first_output - engine_started if first_token is None else first_token
        decode = now - first_output if decode is None else decode
    in_gateway = now - started + tokenize_s
    return Timings(
        queue=queue_s,
        tokenize=tokenize_s,
        prefill=engine.prefill,
        first_token=first_token,
        decode=decode,
        backend=None if engine_started is None else now - engine_started,
        engine=in_gateway,
        total=in_gateway if arrived is None else now - arrived,
    )
