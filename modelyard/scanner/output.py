"""The visible output as block events: text and reasoning without line breaks around markers, up to a stop string.

Text passes three stages: line breaks that may belong to a marker are held back, markers that appear only because
another one was dropped are removed (`MarkerFilter`), and stop strings are searched in the rest. A stage exists only
from the first text on that it may change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from msgspec.structs import replace

from modelyard.core.events import BlockDelta, BlockEnd, BlockKind, BlockStart, Event, TokenLogprob
from modelyard.core.tokenizer import IdLogprob
from modelyard.scanner.automaton import automaton
from modelyard.scanner.lexer import MarkerFilter, MarkerSpellings, any_char

VisibleKind = Literal["text", "thinking"]
TokenText = Callable[[int], tuple[str, bytes]]  # token id → its text and bytes


class BlockWriter:
    """Writes the events of one reply: at most one block is open, and the deltas of one feed are joined."""

    __slots__ = ("_events", "_logprobs", "index", "kind", "parts")

    def __init__(self) -> None:
        self.index = -1
        self.kind: BlockKind | None = None
        self.parts: list[str] = []  # the text of the open block since its last delta
        self._logprobs: list[TokenLogprob] = []
        self._events: list[Event] = []

    def write(self, kind: BlockKind, text: str, logprobs: Sequence[TokenLogprob] = ()) -> None:
        if self.kind != kind:
            if self.kind is not None:
                self.close()
            self._open(kind)
        self.parts.append(text)
        if logprobs:
            self._logprobs.extend(logprobs)

    def start_call(self, call_id: str, name: str, namespace: str | None, custom: bool) -> None:
        self.close()
        self._open("tool_call", call_id, name, namespace, custom)

    def _open(
        self, kind: BlockKind, call_id: str = "", name: str = "", namespace: str | None = None, custom: bool = False
    ) -> None:
        self.index += 1
        self.kind = kind
        self._events.append(BlockStart(self.index, kind, call_id, name, namespace, custom))

    def close(self, complete: bool = True) -> None:
        if self.kind is None:
            return
        if self.parts or self._logprobs:
            self._flush()
        self._events.append(BlockEnd(self.index, complete=complete))
        self.kind = None

    def _flush(self) -> None:
        if (text := "".join(self.parts)) or self._logprobs:
            self._events.append(BlockDelta(self.index, text, tuple(self._logprobs)))
            self._logprobs.clear()
        self.parts.clear()

    def take_events(self) -> list[Event]:
        """All events since the last call."""
        if self.parts:
            self._flush()
        events, self._events = self._events, []
        return events

    def discard_prompt(self) -> None:
        """Drop the blocks of the prompt. A call that it left open is part of the reply, from its start."""
        events = self.take_events()
        starts = [i for i, e in enumerate(events) if isinstance(e, BlockStart)]
        if self.kind == "tool_call":
            self.index = 0
            self._events = [replace(e, index=0) for e in events[starts[-1] :] if isinstance(e, BlockStart | BlockDelta)]
        else:
            self.index, self.kind = -1, None


def cut_end(events: list[Event], open_block: str | None, shorten: Callable[[str], str]) -> list[Event]:
    """The last events of an output that a limit cut off, with the text at its end as `shorten` leaves it.
    `open_block` is the kind of the block that was open before them."""
    start = next((at for at in reversed(range(len(events))) if isinstance(events[at], BlockStart)), None)
    opening = None if start is None else events[start]
    if (opening.kind if isinstance(opening, BlockStart) else open_block) == "tool_call":
        return events
    first = 0 if start is None else start + 1
    deltas = [event for event in events[first:] if isinstance(event, BlockDelta)]
    text = "".join(delta.text for delta in deltas)
    kept = shorten(text)
    if kept == text:
        return events
    cut, logprobs = len(text) - len(kept), [token for delta in deltas for token in delta.logprobs]
    while logprobs and len(logprobs[-1].token) <= cut:
        cut -= len(logprobs.pop().token)
    if not kept and opening is not None:
        return events[: first - 1]  # nothing is left of this block
    rest = [BlockDelta(deltas[0].index, kept, tuple(logprobs))] if kept or logprobs else []
    return [*events[:first], *rest, *(event for event in events[first:] if isinstance(event, BlockEnd))]


class StopStrings:
    """Finds stop strings in chunks of text. A stop string is never shown.

    The string whose LAST character comes first wins, and the longer one of two that end together. The text is read
    character by character, so the result does not depend on the chunks.
    """

    __slots__ = ("_automaton", "_first_chars", "_state", "held")

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = automaton(tuple(stops))
        self._first_chars = any_char(frozenset(self._automaton.next[0]))
        self._state = 0
        self.held = ""  # the end of the text, which may be the beginning of a stop string

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown, and the stop string that was found."""
        state, start = self._state, 0
        if not state:
            first = self._first_chars.search(text)
            if first is None:
                return text, None  # the usual case
            start = first.start()
        step, found = self._automaton.step, self._automaton.found
        for at in range(start, len(text)):
            state = step(state, text[at])
            if (stop := found[state]) is not None:
                shown = (self.held + text[: at + 1])[: -len(stop)]
                self.held, self._state = "", 0
                return shown, stop
        text, self._state = self.held + text, state
        end = len(text) - self._automaton.depth[state]
        self.held = text[end:]
        return text[:end], None

    def flush(self) -> str:
        text, self.held, self._state = self.held, "", 0
        return text


class LogprobTracker:
    """Keeps each log probability with the text in which its token ends.

    Tokens that are markers or that end inside a call have no visible text and no log probability. Positions count
    characters, first of the input and then of the visible text.
    """

    def __init__(self, token_text: TokenText) -> None:
        self._token_text = token_text
        self._pending: deque[tuple[int, IdLogprob]] = deque()
        self._visible: deque[tuple[int, IdLogprob]] = deque()

    def add(self, end: int, logprob: IdLogprob) -> None:
        self._pending.append((end, logprob))

    def skip_to(self, end: int) -> None:
        """The input up to `end` is not visible text."""
        while self._pending and self._pending[0][0] <= end:
            self._pending.popleft()

    def show(self, start: int, end: int, seen: int) -> None:
        """The input from `start` to `end` is visible text, after `seen` visible characters."""
        while self._pending and self._pending[0][0] <= end:
            pos, logprob = self._pending.popleft()
            self._visible.append((seen + max(0, pos - start), logprob))

    def remove(self, ranges: Sequence[tuple[int, int]]) -> None:
        """These ranges of visible characters are markers."""
        self._visible = deque(v for v in self._visible if not any(start < v[0] <= end for start, end in ranges))

    def take(self, end: int) -> list[TokenLogprob]:
        """The log probabilities of all tokens that end within the first `end` visible characters."""
        taken = []
        while self._visible and self._visible[0][0] <= end:
            logprob = self._visible.popleft()[1]
            text, raw = self._token_text(logprob.id)
            top = tuple(self._alternative(token, value) for token, value in logprob.top)
            taken.append(TokenLogprob(text, logprob.logprob, raw, top, logprob.id))
        return taken

    def _alternative(self, token: int, logprob: float) -> TokenLogprob:
        text, raw = self._token_text(token)
        return TokenLogprob(text, logprob, raw, id=token)


class VisibleOutput:
    """Visible text and reasoning on their way to the blocks.

    If the format trims newlines, a run of white space with a line break is held back: a marker may follow and own it.
    """

    __slots__ = (
        "_after_marker",
        "_blocks",
        "_filters",
        "_has_messages",
        "_has_shown_text",
        "_is_begun",
        "_kind",
        "_show_thinking",
        "_space",
        "_spellings",
        "_stops",
        "_trims_newlines",
        "flowing",
        "logprobs",
        "seen",
        "stop_string",
    )

    def __init__(
        self,
        blocks: BlockWriter,
        spellings: MarkerSpellings,
        *,
        trims_newlines: bool,
        show_thinking: bool,
        has_messages: bool = False,
    ) -> None:
        self._blocks, self._spellings, self._has_messages = blocks, spellings, has_messages
        self._filters: dict[VisibleKind, MarkerFilter] = {}
        self._kind: VisibleKind = "text"
        self._trims_newlines = trims_newlines
        self._stops: StopStrings | None = None
        self._show_thinking = show_thinking
        self._space: list[str] = []
        self._is_begun = False  # the block has visible characters
        self._after_marker = False  # the block follows a marker, which owns the white space at its start
        self._has_shown_text = False  # keep the space before later text: clients would join the words around a call
        self.seen = 0
        self.stop_string: str | None = None
        self.logprobs: LogprobTracker | None = None
        # The kind of the open block, while nothing is held back: text without the beginning of anything may be appended
        # to the block as it is.
        self.flowing: VisibleKind | None = None

    def set_stop_strings(self, stop: Sequence[str]) -> None:
        """From here on. Stop strings in the prompt have no effect."""
        self._stops = StopStrings(stop) if stop else None

    @property
    def is_blank(self) -> bool:
        """The block has no visible characters yet."""
        return not self._is_begun

    def mark_gap(self) -> None:
        """Some input was dropped here: what follows does not continue what came before."""
        for marker_filter in self._filters.values():
            marker_filter.mark_gap()

    def show(self, kind: VisibleKind, text: str) -> None:
        if kind != self._kind:
            self._flush()
            self._kind = kind
        if self.stop_string is not None:
            return
        self.seen += len(text)
        if self._trims_newlines:
            text = self._hold_newlines(kind, text)
        if text:
            self._filter(kind, text)
        is_held = self._space or self.logprobs or (self._stops and self._stops.held) or self.stop_string is not None
        is_begun = kind in self._filters and not self._filters[kind].is_idle
        self.flowing = kind if self._blocks.kind == kind and not is_held and not is_begun else None

    def _hold_newlines(self, kind: VisibleKind, text: str) -> str:
        body = text.rstrip()
        if not body:
            return self._hold_space(text)
        lead = "".join(self._space)
        self._space.clear()
        if self._after_marker and not self._is_begun and not (kind == "text" and self._has_shown_text):
            lead, text, body = "", text.lstrip(), body.lstrip()
            self._drop_logprobs(self.seen - len(text))
        if self._has_messages and self._has_shown_text and kind == "text" and not self._is_begun:
            self._separate(lead + text)
        self._is_begun = True
        self._has_shown_text = self._has_shown_text or kind == "text"
        newline = text.find("\n", len(body))
        if newline >= 0:
            self._space.append(text[newline:])
            text = text[:newline]
        return lead + text

    def _separate(self, text: str) -> None:
        """The next message of text begins: clients join it to the one before."""
        if not text.startswith("\n"):
            self._blocks.write("text", "\n")

    def _hold_space(self, space: str) -> str:
        if not self._is_begun or self._space:
            self._space.append(space)
            return ""
        shown, newline, rest = space.partition("\n")
        if newline:
            self._space.append(newline + rest)
        return shown

    def _filter(self, kind: VisibleKind, text: str) -> None:
        if kind == "thinking" and not self._show_thinking:
            self._drop_logprobs(self.seen)
            return
        if kind in self._filters or self._spellings.first_char.search(text):
            text = self._without_markers(self._marker_filter(kind), text)
        self._write(kind, text)

    def _marker_filter(self, kind: VisibleKind) -> MarkerFilter:
        found = self._filters.get(kind)
        if found is None:
            found = self._filters[kind] = MarkerFilter(self._spellings)
        return found

    def _without_markers(self, marker_filter: MarkerFilter, text: str) -> str:
        shown = marker_filter.feed(text)
        if self.logprobs and marker_filter.removed:
            start = self.seen - sum(map(len, self._space)) - len(text)
            self.logprobs.remove([(start + first, start + last) for first, last in marker_filter.removed])
        return shown

    def _write(self, kind: VisibleKind, text: str) -> None:
        """Up to a stop string."""
        if kind == "text" and self._stops:
            text, self.stop_string = self._stops.feed(text)
            if self.stop_string is not None:
                self._space.clear()
        logprobs = self._take_logprobs() if self.logprobs else ()
        if text:
            self._blocks.write(kind, text, logprobs)

    def _take_logprobs(self) -> Sequence[TokenLogprob]:
        """Of the text that is no longer held back."""
        held = len(self._stops.held) if self._stops else 0
        if self._kind in self._filters:
            held += self._filters[self._kind].held
        return self.logprobs.take(self.seen - held - sum(map(len, self._space))) if self.logprobs else ()

    def _flush(self) -> None:
        """No more text can follow in this block. Show what was held back for it."""
        rest = self._filters[self._kind].flush() if self._kind in self._filters else ""
        if rest and self.stop_string is None:
            self._write(self._kind, rest)
        if self.stop_string is None and self._stops and (rest := self._stops.flush()):
            self._blocks.write("text", rest, self._take_logprobs())

    def _drop_logprobs(self, end: int) -> None:
        """The first `end` characters, as far as they were not shown yet, never will be."""
        if self.logprobs:
            self.logprobs.take(end)

    def end_block(self) -> None:
        """A marker ends this run of text. The white space before it is dropped, and a new block follows."""
        self._flush()
        self.mark_gap()
        self._space.clear()
        self._drop_logprobs(self.seen)
        self._blocks.close()
        self._is_begun, self._after_marker, self.flowing = False, True, None

    def recall(self, kind: VisibleKind, text: str) -> None:
        """The last words of the prompt. They are not repeated, but the reply may continue them."""
        marker_filter = self._marker_filter(kind)
        marker_filter.feed(text)
        marker_filter.flush()

    def end_prompt(self) -> None:
        """Forget the text of the prompt: it is not repeated."""
        self._space.clear()
        for marker_filter in self._filters.values():
            marker_filter.flush()
        self._is_begun, self._after_marker = False, self._after_marker and not self._is_begun
        self._has_shown_text, self.flowing = False, None

    def finish(self, kind: VisibleKind) -> None:
        if kind == "text" and self._space and (self._is_begun or not self._after_marker):
            space = "".join(self._space)
            self._space.clear()
            self._filter(kind, space)
        self._flush()
