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
    Event,
    Failed,
    Finished,
    Started,
    StopReason,
    Timings,
    Usage,
)
from modelyard.gateway.job import Job
from modelyard.scanner.scanner import Scanner

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


class TextTranslation:
    """Token ids → pieces → scanner → events."""

    def __init__(self, job: Job, choice: int, new_id: Callable[[], str], on_text: Callable[[str], None] | None) -> None:
        run, parts = job.run(choice), job.model.parts
        if run is None:
            raise ValueError("a text engine needs a rendered prompt")
        request = job.request
        self._job, self._room = job, run.room
        self._vocab, self._detokenizer = parts.vocab, parts.vocab.detokenizer()
        self._on_text = on_text
        visible = request.reasoning.visible
        self._scanner = Scanner(
            parts.format_for(request),
            tools=request.tools,
            stop=(*job.model.stop, *request.stop),
            prefill="" if request.prompts else parts.renderer.tail(run.text),
            new_id=new_id,
            show_thinking=job.model.show_thinking if visible is None else visible,
            tool_stream=job.model.tool_stream,
            parallel=request.parallel_tool_calls is not False,
            specials=parts.specials,
            spell=self._spell if request.logprobs is not None else None,
        )
        self.usage = Usage(prompt=len(run.ids))
        self.over = self.slot_free = self.spoke = False
        self._started = False

    @property
    def warnings(self) -> Sequence[str]:
        """What the model said that could not be taken as it was meant."""
        return self._scanner.warnings

    def _spell(self, token: int) -> tuple[str, bytes]:
        raw = self._vocab.token_bytes(token)
        return raw.decode("utf-8", "replace"), raw

    def feed(self, batch: Sequence[Chunk]) -> list[Event]:
        events: list[Event] = []
        for chunk in batch:
            if isinstance(chunk, Tokens):
                if not self.over:
                    self._tokens(chunk, events)
            elif isinstance(chunk, End):
                self.slot_free = True
                if not self.over:
                    self._end(chunk, events)
            elif isinstance(chunk, Accepted) and not self._started:
                self._started = True
                self.usage = msgspec.structs.replace(self.usage, cached=chunk.cached_tokens)
                events.append(Started(self._job.caller.trace, self._job.request.model, self._job.created, self.usage))
        return events

    def _tokens(self, chunk: Tokens, events: list[Event]) -> None:
        pieces = self._detokenizer.feed(chunk.ids, chunk.logprobs)
        if self._on_text is not None:
            self._on_text("".join(piece.text for piece in pieces))
        scanned = self._scanner.feed(pieces)
        self._count(len(chunk.ids))
        if scanned:
            self.spoke = True
            events.extend(scanned)
        if self._scanner.done:  # the verdict is ours: what the engine ran ahead is dropped
            events.extend(self._scanner.finish())
            self._finish("stop_string" if self._scanner.stopped is not None else "tool_calls", Timings(), events)

    def _count(self, output: int) -> None:
        usage = self.usage
        self.usage = Usage(usage.prompt, usage.cached, usage.output + output, self._scanner.reasoning_tokens)

    def _end(self, end: End, events: list[Event]) -> None:
        if end.reason in ("error", "cancelled"):
            error = end.error or Cancelled("the request was cancelled")
            events.extend(self.fail(error))
            return
        rest = self._detokenizer.finish()
        cut = end.reason != "stop"
        events.extend(self._scanner.feed(rest))
        events.extend(self._scanner.finish(cut=cut))
        self._count(0)
        self._finish(self._reason(end), end.timings, events)

    def _reason(self, end: End) -> StopReason:
        if self._scanner.stopped is not None:
            return "stop_string"
        if end.reason == "window":
            return "window"
        if end.reason == "length":
            return self._room.limit
        return "tool_calls" if self._scanner.called else "end"

    def _finish(self, reason: StopReason, timings: Timings, events: list[Event]) -> None:
        self.over = True
        events.append(Finished(reason, self.usage, self._scanner.stopped, timings))

    def fail(self, error: ModelyardError) -> list[Event]:
        self.over = True
        return [Failed(error)]


class ChatTranslation:
    """Events pass through under our own id and the client's name for the model; the contract is checked."""

    warnings: Sequence[str] = ()

    def __init__(self, job: Job) -> None:
        self._job = job
        self.usage = Usage()
        self.over = self.slot_free = self.spoke = False
        self._started = False

    def feed(self, batch: Sequence[Event]) -> list[Event]:
        events: list[Event] = []
        for event in batch:
            if self.over:
                break
            if isinstance(event, BlockDelta):
                self.spoke = True
            elif isinstance(event, Started):
                if self._started:
                    continue
                self._started, self.usage = True, event.usage
                events.append(Started(self._job.caller.trace, self._job.request.model, self._job.created, event.usage))
                continue
            elif isinstance(event, Finished):
                self.over = self.slot_free = True
                self.usage = event.usage
            elif isinstance(event, Failed):
                self.over = self.slot_free = True
            events.append(event)
        return events

    def fail(self, error: ModelyardError) -> list[Event]:
        self.over = True
        return [Failed(error)]


def foreign(error: Exception) -> Internal:
    """The one line where an exception nobody expected becomes ours."""
    return Internal(f"{type(error).__name__} while answering")
