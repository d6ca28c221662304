"""What an engine says, as the events a client hears: one translation for each kind of engine. Pure.

A translation ends in exactly one Finished or Failed. `slot_free` is a separate matter: after a stop string matched the
client has its Finished while the engine may still be a step away from letting go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec

from modelyard.core.engine import Accepted, Chunk, End, Tokens
from modelyard.core.errors import Cancelled, Internal, ModelyardError
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Started,
    StopReason,
    Timings,
    Usage,
)
from modelyard.core.tokenizer import Detokenizer
from modelyard.gateway.prepared_request import PreparedRequest
from modelyard.scanner.scanner import Scanner

_BAD = ("error", "cancelled")

T_contra = TypeVar("T_contra", contravariant=True)


class Translation(Protocol[T_contra]):
    over: bool  # Finished or Failed has been said
    slot_free: bool  # the engine has let go
    spoke: bool  # content went to the client: nothing may be tried again
    usage: Usage

    @property
    def warnings(self) -> Sequence[str]: ...
    def feed(self, batch: Sequence[T_contra]) -> list[Event]: ...
    def fail(self, error: ModelyardError) -> list[Event]: ...


class TextOutput:
    """Token ids → pieces → scanner → events."""

    __slots__ = (
        "_detokenizer",
        "_job",
        "_new_id",
        "_on_text",
        "_parts",
        "_prefill",
        "_run",
        "_scanner",
        "_started",
        "_stop",
        "ids",
        "over",
        "slot_free",
        "spoke",
        "usage",
    )

    def __init__(
        self, job: PreparedRequest, choice: int, new_id: Callable[[], str], on_text: Callable[[str], None] | None
    ) -> None:
        run, parts = job.run(choice), job.model.text
        if run is None or parts is None:
            raise ValueError("a text engine needs a rendered prompt")
        request = job.request
        self._job, self._run, self._parts = job, run, parts
        self._new_id, self._on_text = new_id, on_text
        self._prefill = "" if request.prompts else parts.renderer.tail(run.text)
        self._stop = job.model.stop + parts.stop_strings + request.stop
        self._detokenizer: Detokenizer | None = None
        self._scanner: Scanner | None = None
        self.usage = Usage(len(run.ids))
        self.ids: list[int] | None = [] if request.tools else None  # what was said: an agent's next prompt tells it
        self.over = self.slot_free = self.spoke = False
        self._started = False

    def _new_scanner(self) -> Scanner:
        job, parts, request = self._job, self._parts, self._job.request
        visible = request.reasoning.visible
        return Scanner(
            parts.format_for(request),
            tools=request.tools,
            stop=self._stop,
            prefill=self._prefill,
            new_id=self._new_id,
            show_thinking=job.model.show_thinking if visible is None else visible,
            tool_stream=job.model.tool_stream,
            parallel=request.parallel_tool_calls is not False,
            specials=parts.specials,
            spell=self._spell if request.logprobs is not None else None,
        )

    @property
    def warnings(self) -> Sequence[str]:
        """What the model said that could not be taken as it was meant."""
        return self._scanner.warnings if self._scanner is not None else ()

    def _spell(self, token: int) -> tuple[str, bytes]:
        raw = self._parts.vocab.token_bytes(token)
        return raw.decode("utf-8", "replace"), raw

    def feed(self, batch: Sequence[Chunk]) -> list[Event]:
        scanner, detokenizer = self._scanner, self._detokenizer
        if scanner is None or detokenizer is None:
            self._scanner = scanner = self._new_scanner()
            self._detokenizer = detokenizer = self._parts.vocab.detokenizer()
        events: list[Event] = []
        for chunk in batch:
            if isinstance(chunk, Tokens):
                if not self.over:
                    self._tokens(chunk, scanner, detokenizer, events)
            elif isinstance(chunk, End):
                self.slot_free = True
                if not self.over:
                    self._end(chunk, scanner, detokenizer, events)
            elif isinstance(chunk, Accepted) and not self._started:
                events.append(self._start(chunk))
        return events

    def _start(self, accepted: Accepted) -> Started:
        job = self._job
        self._started = True
        self.usage = Usage(self.usage.prompt, accepted.cached_tokens, self.usage.output, self.usage.reasoning)
        return Started(job.caller.trace, job.request.model, job.created, self.usage)

    def _tokens(self, chunk: Tokens, scanner: Scanner, detokenizer: Detokenizer, events: list[Event]) -> None:
        if self.ids is not None:
            self.ids += chunk.ids
        pieces = detokenizer.feed(chunk.ids, chunk.logprobs)
        if self._on_text is not None:
            self._on_text("".join(piece.text for piece in pieces))
        scanned = scanner.feed(pieces)
        self._count(len(chunk.ids), scanner)
        if scanned:
            self.spoke = True
            events.extend(scanned)
        if scanner.done:  # the verdict is ours: what the engine ran ahead is dropped
            events.extend(scanner.finish())
            self._finish("stop_string" if scanner.stopped is not None else "tool_calls", Timings(), scanner, events)

    def _count(self, output: int, scanner: Scanner) -> None:
        usage = self.usage
        self.usage = Usage(usage.prompt, usage.cached, usage.output + output, scanner.reasoning_tokens)

    def _end(self, end: End, scanner: Scanner, detokenizer: Detokenizer, events: list[Event]) -> None:
        if end.reason in _BAD:
            error = end.error or Cancelled("the request was cancelled")
            events.extend(self.fail(error))
            return
        if end.usage.prompt > self.usage.prompt:  # pictures: what they take only the engine could tell
            self.usage = msgspec.structs.replace(self.usage, prompt=end.usage.prompt)
        rest = detokenizer.finish()
        events.extend(scanner.feed(rest))
        events.extend(scanner.finish(cut=end.reason != "stop"))
        self._count(0, scanner)
        self._finish(self._reason(end, scanner), end.timings, scanner, events)

    def _reason(self, end: End, scanner: Scanner) -> StopReason:
        if scanner.stopped is not None:
            return "stop_string"
        return self._cut(end) or ("tool_calls" if scanner.called else "end")

    def _cut(self, end: End) -> StopReason | None:
        """Which limit ended it, if one did."""
        if end.reason == "window":
            return "window"
        return self._run.room.limit if end.reason == "length" else None

    def _finish(self, reason: StopReason, timings: Timings, scanner: Scanner, events: list[Event]) -> None:
        self.over = True
        events.append(Finished(reason, self.usage, scanner.stopped, timings))

    def fail(self, error: ModelyardError) -> list[Event]:
        self.over = True
        return [Failed(error)]


class ChatOutput:
    """Events pass through under our own id and the client's name for the model; the contract is checked.

    Where the prompt's tokens are known here, they are told from the start, and an answer that was cut off by the window
    is told from one that was cut off by the client's own limit. Hidden reasoning is left out.
    """

    warnings: Sequence[str] = ()
    ids = None  # whoever made them knows them

    def __init__(self, job: PreparedRequest, choice: int = 0) -> None:
        self._job, self._run = job, job.run(choice)
        visible = job.request.reasoning.visible
        self._hides = not (job.model.show_thinking if visible is None else visible)
        self._hidden: set[int] = set()
        self.usage = Usage()
        self.over = self.slot_free = self.spoke = False
        self._started = False

    def feed(self, batch: Sequence[Event]) -> list[Event]:
        events: list[Event] = []
        for event in batch:
            if self.over:
                break
            if isinstance(event, BlockStart | BlockDelta | BlockEnd):
                self.spoke = self.spoke or isinstance(event, BlockDelta)
                events.extend(self._shown(event) if self._hides else (event,))
            elif isinstance(event, Started):
                events.extend(() if self._started else (self._start(event),))
            else:
                self.over = self.slot_free = True
                events.append(self._last(event))
        return events

    def _start(self, event: Started) -> Started:
        self._started = True
        self.usage = event.usage if event.usage.prompt or self._run is None else Usage(len(self._run.ids))
        return Started(self._job.caller.trace, self._job.request.model, self._job.created, self.usage)

    def _last(self, event: Finished | Failed) -> Finished | Failed:
        if isinstance(event, Failed):
            return event
        self.usage = event.usage
        by_window = event.reason == "max_tokens" and self._run is not None and self._run.room.limit == "window"
        return msgspec.structs.replace(event, reason="window") if by_window else event

    def _shown(self, event: BlockStart | BlockDelta | BlockEnd) -> Sequence[Event]:
        """Nothing of a thinking block; the blocks after it move up."""
        if isinstance(event, BlockStart) and event.kind == "thinking":
            self._hidden.add(event.index)
        if event.index in self._hidden:
            return ()
        before = sum(index < event.index for index in self._hidden)
        return (msgspec.structs.replace(event, index=event.index - before),)

    def fail(self, error: ModelyardError) -> list[Event]:
        self.over = True
        return [Failed(error)]


def foreign(error: Exception) -> Internal:
    """The one line where an exception nobody expected becomes ours."""
    return Internal(f"{type(error).__name__} while answering")
