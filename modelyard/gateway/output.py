"""What an engine generates, as events: token ids are detokenized and scanned, events are renamed and checked. Pure."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence

import msgspec

from modelyard.core.engine import Accepted, Chunk, End, Progress, Tokens
from modelyard.core.errors import Cancelled, ModelyardError
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    Event,
    Failed,
    Finished,
    Measured,
    PromptRead,
    Started,
    StopReason,
    Timings,
    TokenLogprob,
    Usage,
)
from modelyard.core.tokenizer import IdLogprob
from modelyard.gateway.model import VERBATIM
from modelyard.gateway.prepared_request import PreparedRequest, estimated_tokens
from modelyard.gateway.repetition import RepetitionDetector
from modelyard.scanner.scanner import Scanner


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


def _repetition_detector(prepared: PreparedRequest, *, is_text: bool = False) -> RepetitionDetector | None:
    """None if the output may repeat itself: a grammar may require it, and a request that sets how long its output is
    measures something."""
    threshold, sampling, constraint = prepared.model.entry.max_repeated_tokens, prepared.sampling, prepared.constraint
    is_bound = constraint is not None and constraint.trigger is None
    if not threshold or is_bound or sampling.ignore_eos or sampling.min_tokens:
        return None
    return RepetitionDetector(threshold, is_text=is_text)


class TextOutput:
    """Token ids → detokenize → scan → events. Pure.

    `over`: Finished or Failed was emitted. `slot_free`: the engine has released its slot, which may be later: after a
    stop string the client has its Finished while the engine may be a step behind. `has_output`: content was emitted.
    `tokens` counts those of the output, `read` those of the prompt that the engine has evaluated. `watched` is the raw
    text since an administrator opened the request. `repeats`: the stream must continue it with other sampling values
    (`is_nudged`), or end it.
    """

    __slots__ = (
        "_accepted_at",
        "_cached_tokens",
        "_choice",
        "_detokenizer",
        "_first_at",
        "_late_stop",
        "_on_text",
        "_prepared",
        "_prompt_logprobs",
        "_prompt_tokens",
        "_rendered",
        "_repetition",
        "_scanner",
        "_started",
        "_stop_logprob",
        "emitted_start",
        "has_output",
        "ids",
        "is_nudged",
        "over",
        "read",
        "repeats",
        "slot_free",
        "tokens",
        "watched",
    )

    def __init__(
        self,
        prepared: PreparedRequest,
        choice: int,
        new_id: Callable[[], str],
        on_text: Callable[[str], None] | None,
    ) -> None:
        rendered, pipeline, request, model = (
            prepared.rendered(choice),
            prepared.model.text,
            prepared.request,
            prepared.model,
        )
        if rendered is None or pipeline is None:
            raise ValueError("a text engine needs a rendered prompt")
        self._prepared, self._rendered, self._choice, self._on_text = prepared, rendered, choice, on_text
        visible = request.reasoning.visible
        self._detokenizer = pipeline.tokenizer.detokenizer()
        self._late_stop: tuple[str, ...] | None = None  # from the token on that may end the output
        stop = model.entry.stop + pipeline.stop_strings + request.stop
        if prepared.sampling.min_tokens:
            self._late_stop, stop = stop, pipeline.stop_strings
        self._scanner = Scanner(
            VERBATIM if request.echo and request.prompt_logprobs is not None else pipeline.format_for(request),
            tools=request.tools,
            stop=stop,
            prefill="" if request.prompts else pipeline.renderer.tail(rendered.text),
            new_id=new_id,
            show_thinking=model.settings.show_thinking if visible is None else visible,
            tool_stream=model.settings.tool_stream,
            parallel=request.parallel_tool_calls is not False,
            specials=pipeline.specials,
            token_text=self._token_text if request.logprobs is not None else None,
        )
        self._prompt_tokens, self._cached_tokens, self.tokens = len(rendered.ids), 0, 0
        self._repetition = _repetition_detector(prepared)
        # An agent's next prompt repeats them.
        self.ids: list[int] | None = [] if request.tools or self._repetition is not None else None
        self._prompt_logprobs: list[IdLogprob] = []
        self._started: Started | None = None  # held back until the prompt's log probabilities have arrived
        self._stop_logprob: IdLogprob | None = None  # of the token that ended the output
        self._accepted_at = self._first_at = 0.0  # set if the request asks for times
        self.read = 0
        self.watched: list[str] | None = None
        self.over = self.slot_free = self.has_output = self.emitted_start = self.repeats = self.is_nudged = False

    @property
    def usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._cached_tokens, self.tokens, self._scanner.reasoning_tokens)

    @property
    def warnings(self) -> Sequence[str]:
        return self._scanner.warnings

    def _token_text(self, token: int) -> tuple[str, bytes]:
        raw = self._prepared.model.pipeline.tokenizer.token_bytes(token)
        return raw.decode("utf-8", "replace"), raw

    def feed(self, batch: Sequence[Chunk]) -> list[Event]:
        events: list[Event] = []
        for chunk in batch:
            if isinstance(chunk, Tokens):
                if self._started is not None:
                    self._start_late(events)
                if not self.over:
                    self._feed_tokens(chunk, events)
            elif isinstance(chunk, End):
                self.slot_free = True
                if self._started is not None and chunk.error is None:
                    self._start_late(events)
                if not self.over:
                    self._finish(chunk, events)
            elif isinstance(chunk, Progress) and not self.is_nudged:
                self.read = chunk.done
                self._prompt_logprobs += chunk.logprobs or ()
                if self._prepared.request.progress and not self._started:
                    events.append(self._prompt_read(chunk.done))
            elif isinstance(chunk, Accepted) and not self.emitted_start:
                self.emitted_start = True
                prepared, self._cached_tokens = self._prepared, chunk.cached_tokens
                self.read = chunk.cached_tokens
                echo = self._echo() if prepared.request.echo else ""
                started = Started(prepared.caller.trace, prepared.request.model, prepared.created, self.usage, echo)
                if prepared.request.prompt_logprobs is None:
                    events.append(started)
                else:
                    self._started = started
                if prepared.request.timings is not None:
                    self._accepted_at = time.perf_counter()
                    if prepared.request.progress and not self._started:
                        events.append(self._prompt_read(chunk.cached_tokens))
        return events

    def watch(self) -> str:
        """The raw text since the first call, which begins to keep it."""
        if self.watched is None:
            kept: list[str] = []
            self.watched, before = kept, self._on_text

            def on_text(text: str) -> None:
                kept.append(text)
                if before is not None:
                    before(text)

            self._on_text = on_text
        return "".join(self.watched)

    def _prompt_read(self, done: int) -> PromptRead:
        usage = self.usage
        return PromptRead(usage.prompt, usage.cached, done, time.perf_counter() - self._accepted_at)

    def _measured(self) -> list[Event]:
        """Before the text of the newest tokens."""
        request, now, events = self._prepared.request, time.perf_counter(), list[Event]()
        if not self._first_at:
            self._first_at = now
            if request.progress:
                events.append(self._prompt_read(self.usage.prompt))
        if request.timings == "all":
            timings = Timings(first_token=self._first_at - self._accepted_at, decode=now - self._first_at)
            events.append(Measured(self.usage, timings))
        return events

    def _echo(self) -> str:
        request = self._prepared.request
        prompt = request.prompts[self._choice // request.n]
        return prompt if isinstance(prompt, str) else self._rendered.text

    def _start_late(self, events: list[Event]) -> None:
        started, self._started = self._started, None
        if started is not None:
            events.append(msgspec.structs.replace(started, prompt_logprobs=self._written_prompt_logprobs()))

    def _written_prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """One for each token of the prompt. A token that was put in front of the client's text has none itself."""
        ids, bos = self._rendered.ids, self._prepared.model.pipeline.tokenizer.bos
        text, raw = self._token_text(ids[0])
        is_added = ids[0] == bos and not self._rendered.text.startswith(text)
        first = TokenLogprob("" if is_added else text, math.nan, raw, id=ids[0])
        return (first, *map(self._write_logprob, self._prompt_logprobs))

    def _write_logprob(self, logprob: IdLogprob) -> TokenLogprob:
        def written(token: int, value: float) -> TokenLogprob:
            text, raw = self._token_text(token)
            return TokenLogprob(text, value, raw, id=token)

        top = tuple(written(token, value) for token, value in logprob.top)
        return msgspec.structs.replace(written(logprob.id, logprob.logprob), top=top, rank=logprob.rank)

    def _feed_tokens(self, chunk: Tokens, events: list[Event]) -> None:
        scanner = self._scanner
        if not chunk.ids:
            self._stop_logprob = chunk.logprobs[0] if chunk.logprobs and self._prepared.request.echo else None
            return
        if self._late_stop is not None:
            chunk = self._feed_unstoppable(chunk, self._late_stop, events)
            if self.over:
                return
        if self.ids is not None:
            self.ids += chunk.ids
        pieces = self._detokenizer.feed(chunk.ids, chunk.logprobs)
        if self._on_text is not None:
            self._on_text("".join(piece.text for piece in pieces))
        scanned = scanner.feed(pieces)
        self.tokens += len(chunk.ids)
        if self._accepted_at:
            events += self._measured()
        if scanned:
            self.has_output = True
            events += scanned
        if scanner.is_done:  # a stop string or a complete call: drop what the engine generated ahead
            events += scanner.finish()
            reason: StopReason = "stop_string" if scanner.stop_string is not None else "tool_calls"
            self.over = True
            events.append(Finished(reason, self.usage, scanner.stop_string))
        elif self._repetition is not None and not (self._prepared.constraint is not None and scanner.is_in_call):
            self.repeats = self._repetition.feed(chunk.ids) or self.repeats

    def nudge(self) -> None:
        """The engine continues the output with a penalty for repetitions."""
        self.repeats, self.is_nudged = False, True
        if self._repetition is not None:
            self._repetition.clear()

    def end_repetition(self) -> list[Event]:
        self.over = True
        return [*self._scanner.finish(truncated=True), Finished("repetition", self.usage)]

    def _feed_unstoppable(self, chunk: Tokens, stop: tuple[str, ...], events: list[Event]) -> Tokens:
        """Feeds the tokens before which no stop string counts; returns the others."""
        left = (self._prepared.sampling.min_tokens or 0) - self.tokens
        if left >= len(chunk.ids):
            return chunk
        self._late_stop = None
        if left > 0:
            self._feed_tokens(Tokens(chunk.ids[:left], chunk.logprobs and chunk.logprobs[:left]), events)
            chunk = Tokens(chunk.ids[left:], chunk.logprobs and chunk.logprobs[left:])
        self._scanner.set_stop_strings(stop)
        return chunk

    def _finish(self, end: End, events: list[Event]) -> None:
        if end.reason in ("error", "cancelled"):
            events += self.fail(end.error or Cancelled("the request was cancelled"))
            return
        scanner = self._scanner
        if rest := self._detokenizer.finish(truncated=end.reason != "stop"):
            events += scanner.feed(rest)
        last = scanner.finish(truncated=end.reason != "stop")
        events += last if self._stop_logprob is None else self._with_stop_logprob(last, self._stop_logprob)
        if not self.is_nudged:  # only the engine knows how many tokens images take
            self._prompt_tokens = max(self._prompt_tokens, end.usage.prompt)
        reason: StopReason
        if scanner.stop_string is not None:
            reason = "stop_string"
        elif end.reason == "window":
            reason = "window"
        elif end.reason == "length":
            reason = self._rendered.budget.limit
        else:
            reason = "tool_calls" if scanner.has_complete_call else "end"
        self.over = True
        timings = Timings() if self.is_nudged else end.timings  # those of its last part say little
        events.append(Finished(reason, self.usage, scanner.stop_string, timings))

    def _with_stop_logprob(self, last: list[Event], stop: IdLogprob) -> list[Event]:
        """The token that ended the output counts where the prompt's tokens count; it has no text."""
        written = (msgspec.structs.replace(self._write_logprob(stop), token=""),)
        for at, event in enumerate(last):
            if isinstance(event, BlockEnd):
                return [*last[:at], BlockDelta(event.index, "", written), *last[at:]]
        return [*last, BlockStart(0, "text"), BlockDelta(0, "", written), BlockEnd(0)]

    def fail(self, error: ModelyardError) -> list[Event]:
        self.over = True
        return [Failed(error)]


class ChatOutput:
    """Events of a ChatEngine under our request id and the client's model name. The event contract is enforced.

    Where the prompt's tokens are known, usage starts with them, and an output cut by the window differs from one
    cut by the client's `max_tokens`. Hidden reasoning is dropped. Attributes as in `TextOutput`; a delta counts as one
    token, because the engine reports its usage at the end.
    """

    warnings: Sequence[str] = ()
    ids: list[int] | None = None  # only the engine knows them
    is_nudged = False

    def __init__(self, prepared: PreparedRequest, choice: int = 0) -> None:
        self._prepared, self._rendered, self._choice = prepared, prepared.rendered(choice), choice
        visible = prepared.request.reasoning.visible
        self._hide_thinking = not (prepared.model.settings.show_thinking if visible is None else visible)
        self._hidden: set[int] = set()
        self.usage, self.tokens = Usage(), 0
        self._repetition = _repetition_detector(prepared, is_text=True)
        self._open: BlockStart | None = None
        self.over = self.slot_free = self.has_output = self.emitted_start = self.repeats = False

    def feed(self, batch: Sequence[Event]) -> list[Event]:
        events: list[Event] = []
        for event in batch:
            if self.over:
                break
            if isinstance(event, (BlockStart, BlockDelta, BlockEnd)):
                if isinstance(event, BlockDelta):
                    self.has_output, self.tokens = True, self.tokens + 1
                self._watch_repetition(event)
                events += self._without_thinking(event) if self._hide_thinking else (event,)
            elif isinstance(event, Started):
                if not self.emitted_start:
                    events.append(self._start(event))
            elif isinstance(event, PromptRead):
                if self._prepared.request.progress:
                    events.append(event)
            elif isinstance(event, Measured):
                if self._prepared.request.timings == "all":
                    events.append(event)
            else:
                self.over = self.slot_free = True
                events.append(self._last(event))
        return events

    def _watch_repetition(self, event: BlockStart | BlockDelta | BlockEnd) -> None:
        """Arguments of calls are the server's, which may write them under a grammar."""
        if isinstance(event, BlockStart):
            self._open = event
        elif isinstance(event, BlockEnd):
            self._open = None
        elif self._repetition is not None and self._open is not None and self._open.kind in ("text", "thinking"):
            self.repeats = self._repetition.feed_text(event.text) or self.repeats

    def end_repetition(self) -> list[Event]:
        self.over = True
        self._count_so_far()
        events: list[Event] = []
        if (block := self._open) is not None:
            events += self._without_thinking(BlockEnd(block.index)) if self._hide_thinking else (BlockEnd(block.index),)
        return [*events, Finished("repetition", self.usage)]

    def _start(self, event: Started) -> Started:
        prepared = self._prepared
        self.emitted_start = True
        self.usage = event.usage if event.usage.prompt or self._rendered is None else Usage(len(self._rendered.ids))
        return Started(
            prepared.caller.trace,
            prepared.request.model,
            prepared.created,
            self.usage,
            self._echo,
            event.prompt_logprobs,
        )

    @property
    def _echo(self) -> str:
        """With log probabilities the server repeats the prompt itself."""
        request = self._prepared.request
        if not request.echo or request.prompt_logprobs is not None:
            return ""
        prompt = request.prompts[self._choice // request.n]
        return prompt if isinstance(prompt, str) else ""

    def _last(self, event: Finished | Failed) -> Finished | Failed:
        if isinstance(event, Failed):
            self._count_so_far()
            return event
        self.usage = event.usage
        rendered = self._rendered
        if event.reason == "max_tokens" and rendered is not None and rendered.budget.limit == "window":
            return msgspec.structs.replace(event, reason="window")
        return event

    def _without_thinking(self, event: BlockStart | BlockDelta | BlockEnd) -> Sequence[Event]:
        """Nothing of a thinking block; the blocks after it are renumbered."""
        if isinstance(event, BlockStart) and event.kind == "thinking":
            self._hidden.add(event.index)
        if event.index in self._hidden:
            return ()
        before = sum(index < event.index for index in self._hidden)
        return (msgspec.structs.replace(event, index=event.index - before),)

    def fail(self, error: ModelyardError) -> list[Event]:
        self.over = True
        self._count_so_far()
        return [Failed(error)]

    def _count_so_far(self) -> None:
        """A server that reports its usage at the end has not reported any."""
        prompt, output = self.usage.prompt, self.usage.output
        if self.has_output and not prompt:
            prompt = estimated_tokens(self._prepared.request)
        self.usage = msgspec.structs.replace(self.usage, prompt=prompt, output=max(output, self.tokens))
