"""The output as block events: text and reasoning without line breaks around markers, up to a stop string; tool calls.

Text passes three stages: line breaks that may belong to a marker are held back, markers that appear only because
another one was dropped are removed (`MarkerFilter`), and stop strings are searched in the rest. A stage exists only
from the first text on that it may change.

Tool calls are held back until certain, then streamed. A call is **sent** once its name and the first byte of its
arguments are known. If it breaks before that, it is shown as text. If it breaks later, it ends as an incomplete call. A
call of a tool that is not offered becomes text, with a warning.

A call inside reasoning is a **draft**: models try calls out there. It is sent only if the model ends its turn with it,
because then it forgot to close its reasoning. Otherwise it is reasoning.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from modelyard.core.events import BlockDelta, BlockEnd, BlockKind, BlockStart, Event, TokenLogprob
from modelyard.core.output_format import Dumps, NamedCalls
from modelyard.core.request import Tool
from modelyard.core.tokenizer import IdLogprob
from modelyard.scanner.automaton import automaton
from modelyard.scanner.lexer import MarkerFilter, MarkerSpellings, ParseError, TextBuffer, UnknownTool, any_char

VisibleKind = Literal["text", "thinking"]
TokenText = Callable[[int], tuple[str, bytes]]  # token id → its text and bytes


class BlockWriter:
    """Writes the events of one reply: at most one block is open, and the deltas of one feed are joined."""

    __slots__ = ("_events", "_logprobs", "_parts", "add", "index", "kind")

    def __init__(self) -> None:
        self.index = -1
        self.kind: BlockKind | None = None
        self._parts: list[str] = []  # the text of the open block since its last delta
        self.add: Callable[[str], None] = self._parts.append  # more text of the open block
        self._logprobs: list[TokenLogprob] = []
        self._events: list[Event] = []

    def write(self, kind: BlockKind, text: str, logprobs: Sequence[TokenLogprob] = ()) -> None:
        if self.kind != kind:
            if self.kind is not None:
                self.close()
            self._open(kind)
        self._parts.append(text)
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
        if self._parts or self._logprobs:
            self._flush()
        self._events.append(BlockEnd(self.index, complete=complete))
        self.kind = None

    def _flush(self) -> None:
        text = "".join(self._parts)
        self._parts.clear()
        if self._logprobs:
            self._events.append(BlockDelta(self.index, text, tuple(self._logprobs)))
            self._logprobs.clear()
        elif text:
            self._events.append(BlockDelta(self.index, text))

    def take_events(self) -> list[Event]:
        """All events since the last call."""
        if self._parts:
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

    def add_logprob(self, token_text: TokenText, end: int, logprob: IdLogprob) -> None:
        """Of the token that ends at this position of the input."""
        if self.logprobs is None:
            self.logprobs = LogprobTracker(token_text)
        self.logprobs.add(end, logprob)

    def place_logprobs(self, start: int, end: int) -> None:
        """This part of the input is shown next."""
        if self.logprobs:
            self.logprobs.show(start, end, self.seen)

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

    def quote(self, kind: VisibleKind, text: str) -> None:
        """Show a text as it is, although it spells a marker. The opening quote comes before it."""
        self.show(kind, "")
        if kind in self._filters and (rest := self._filters[kind].flush()):
            self._write(kind, rest)
        if self.stop_string is None and not (kind == "thinking" and not self._show_thinking):
            self.seen += len(text)
            self._write(kind, text)
            self.mark_gap()

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


# --- tool calls -------------------------------------------------------------------------------------------------------

_CALL_BEGUN = re.compile(r"[\w.:=/\"'`<{\[(,-]*")  # a name, perhaps inside of JSON or a code block
_JSON_BEGUN = re.compile(r"[{\[(]")
_AROUND_BRACKETS = re.compile(r"(?<=[:,{\[`])\s+|\s+(?=[{\[\"`])")
_WHITE_SPACE = re.compile(r"\s+")
_WORD = re.compile(r"[\w-]+")
_HEAD_LIMIT = 512  # characters of a call before its arguments
_CANDIDATES = 16  # names that a cut one may be
_EVIDENCE_LIMIT = 64  # the arguments of a call begin within this many characters


class CallBuilder:
    """Builds one call after another: `start`, then `append` for each part of the arguments, then `finish`."""

    _name: str | None = None
    is_sent = False
    _unknown: UnknownTool | None = None
    _after_unknown = ""
    _parallel = True
    _count_before = _drafts_before = 0  # how many there were when the reader began
    _broken_ends: tuple[str, ...] = ()  # what ends the last call that could not be read
    tool: Tool | None = None
    count = 0
    kind: VisibleKind = "text"  # how a call that cannot be read is shown
    is_drafting = False
    is_broken = False  # a call could not be read, and its end has not come yet
    expects_evidence = False

    def __init__(
        self,
        buffer: TextBuffer,
        blocks: BlockWriter,
        visible: VisibleOutput,
        remove_tags: Callable[[str], str],
        write: Callable[[NamedCalls, Dumps], str],
        *,
        tools: Sequence[Tool] | None,
        new_id: Callable[[], str],
        stream: bool,
    ) -> None:
        self._buffer, self._blocks, self._visible = buffer, blocks, visible
        self._tools = tools_by_name(tools) if tools else None if tools is None else {}
        self._remove_tags, self._write, self._new_id, self._stream = remove_tags, write, new_id, stream
        self._held: list[str] = []
        self.warnings: list[str] = []
        self.drafts: list[tuple[str, Tool | None, str]] = []  # name, tool and arguments of calls inside reasoning
        self._draft_text: list[str] = []  # their raw text
        self._quoted: dict[str, int] = {}  # how many tags are open that are shown because they belong to no call

    def allow_one(self) -> None:
        """From here on."""
        self._parallel = False

    def enter(self, kind: VisibleKind) -> None:
        """A region of this kind begins."""
        self.kind = kind

    def end_prompt(self) -> None:
        """Calls of the prompt do not count."""
        self.count = 0
        self.take_drafts()

    def begin_reading(self, is_drafting: bool) -> None:
        self.is_drafting, self._count_before, self._drafts_before = is_drafting, self.count, len(self.drafts)

    @property
    def has_new_draft(self) -> bool:
        """Since the reader began."""
        return len(self.drafts) > self._drafts_before

    def end_reading(self, draft_text: Sequence[str] | None = None) -> None:
        """`draft_text` is what was read, if it is a draft."""
        self.is_drafting = False
        self.is_broken = self.is_broken and self.count == self._count_before
        if draft_text:
            self._draft_text += draft_text

    def add_to_drafts(self, text: str) -> None:
        """More of the text between drafts."""
        self._draft_text.append(text)

    def take_drafts(self) -> str:
        """The raw text of the drafts, which are none."""
        text = "".join(self._draft_text)
        self.drafts.clear()
        self._draft_text.clear()
        return text

    def mark_broken(self, ends: tuple[str, ...]) -> None:
        """A call could not be read. One of `ends` ends it."""
        self.is_broken, self._broken_ends = True, ends

    def end_broken(self, marker: str) -> bool:
        """Whether this marker is the end of the call that could not be read."""
        if self.is_broken and marker in self._broken_ends:
            self.is_broken = False
            return True
        return False

    def open_quoted(self, names: Iterable[str]) -> None:
        """These tags are shown because they belong to no call."""
        for name in names:
            self._quoted[name] = self._quoted.get(name, 0) + 1

    def closes_quoted(self, name: str) -> bool:
        """Whether the end of a tag of this name is one of a tag that is shown."""
        is_quoted = self._quoted.get(name, 0) > 0
        if is_quoted:
            self._quoted[name] -= 1
        return is_quoted

    @property
    def is_open(self) -> bool:
        return self._name is not None

    def spelled(self, text: str) -> str:
        return self._buffer.spelled(text)

    @property
    def is_done(self) -> bool:
        """No further call is wanted, although the reader may be in the middle of several."""
        return (self.count > 0 and not self._parallel) or self._visible.stop_string is not None

    @property
    def is_custom(self) -> bool:
        return self.tool is not None and self.tool.kind == "custom"

    @property
    def is_offered(self) -> bool:
        """The open call is one of an offered tool. Without a list of tools every name is."""
        return self._tools is None or self.tool is not None

    @property
    def needs_arguments(self) -> bool:
        return self.tool is not None and bool(self.tool.parameters.get("required"))

    @property
    def is_first(self) -> bool:
        """Only white space comes before this in its block of text or reasoning."""
        return self._visible.is_blank

    def start(self, name: str) -> None:
        if not name or (self._tools is None and self._remove_tags(name) != name):
            raise ParseError("a call without a name")
        self._name, self.is_sent = name, False
        self._held.clear()
        if self._tools is not None:
            self.tool = self._tools.get(name) or self._tools.get(_plain_name(name))
        if self.tool is not None:
            self._name = self.tool.name

    def knows(self, name: str) -> bool:
        """Whether an offered tool or one of its parameters has this name. Without a list of tools every name counts."""
        if self._tools is None or not name:
            return self._tools is None
        return any(name in (tool.name, *(tool.parameters.get("properties") or ())) for tool in self._tools.values())

    def find_tool(self, arguments: str) -> str | None:
        """The name of the only offered tool, or of the only one that accepts these arguments."""
        tools = list({id(tool): tool for tool in (self._tools or {}).values()}.values())
        given: Any = msgspec.json.decode(arguments)
        fitting = tools if len(tools) == 1 else [tool for tool in tools if accepts(tool, given)]
        return fitting[0].name if len(fitting) == 1 and isinstance(given, dict) else None

    def append(self, text: str) -> None:
        if self.is_sent:
            self._blocks.add(text)
            self._buffer.commit()
            return
        self._held.append(text)
        if text and self._stream and self.is_offered and not (self.is_drafting or self.is_custom or self.is_done):
            self._send()

    def _send(self) -> None:
        """Unless the text before the call contains a stop string."""
        self._visible.end_block()
        if self.is_done:
            return
        namespace = self.tool.namespace if self.tool else None
        self._blocks.start_call(self._new_id(), self._name or "", namespace, self.is_custom)
        self._blocks.add("".join(self._held))
        self._held.clear()
        self.is_sent = True
        self._buffer.commit()

    def finish(self, arguments: str = "", *, is_repeated: bool = False) -> None:
        """The arguments are complete and valid. `is_repeated`: one of them is given twice."""
        if arguments:
            self.append(arguments)
        if self.is_drafting:
            self.drafts.append((self._name or "", self.tool, "".join(self._held)))
        elif not self.is_offered:
            self._show_as_text()
        elif not self.is_done:
            if self.is_custom:
                self._held = [custom_input("".join(self._held))]
            if not self.is_sent:
                if is_repeated:
                    self._held = [_without_repetition("".join(self._held))]
                self._send()
            if self.is_sent:
                self._blocks.close()
                self.count += 1
        self._reset()

    def send_drafts(self) -> None:
        """The model ended its turn with these calls."""
        drafts, self.drafts, self.is_drafting = self.drafts, [], False
        for name, tool, arguments in drafts:
            self._name, self.tool = name, tool
            self.finish(arguments)

    def _show_as_text(self) -> None:
        """The tool is not offered. Show the client what the model wanted."""
        self._warn(self._name)
        name, arguments = msgspec.json.encode(self._name).decode(), "".join(self._held)
        self._visible.mark_gap()
        self._visible.show(self.kind, self._remove_tags(f'{{"name": {name}, "arguments": {arguments}}}'))

    def _warn(self, name: str | None) -> None:
        self.warnings.append(f"the model called {name!r}, which was not offered: passed on as text")

    def expect_evidence(self, unknown: UnknownTool, rest: str) -> None:
        """A call without markers was shown as text at once. What follows decides whether it needs a warning."""
        self._unknown, self._after_unknown = unknown, ""
        self.feed_evidence(rest)

    def feed_evidence(self, text: str) -> None:
        """More of the text that follows the name of a tool that is not offered."""
        self._after_unknown += text
        if self._unknown and self._unknown.evidence.match(self._after_unknown):
            self._warn(self._unknown.name)
            self._unknown = None
        elif len(self._after_unknown) > _EVIDENCE_LIMIT:
            self._unknown = None
        self.expects_evidence = self._unknown is not None

    def show_message(self, kind: VisibleKind, text: str) -> None:
        """Show a block of text or reasoning, such as a message to an unknown recipient, in place of the open call."""
        self._visible.end_block()
        self._visible.show(kind, self._remove_tags(text))
        if self.is_open:
            self._reset()

    def is_cut(self, text: str, *, is_bare: bool) -> bool:
        """Whether the output ended inside of a call and this is its raw `text` so far, not prose: its name is known,
        or the family writes so. Behind a bare marker the name must have begun, unless calls came before in the list."""
        if self.is_open and self.is_offered and (self._held or self.is_sent):
            return not (is_bare and (self.is_drafting or self._tools is None))
        if self.writes(text, is_bare and not self.count):
            return True
        word = _AROUND_BRACKETS.sub("", self._remove_tags(text)).strip()
        if self.is_open and self.is_offered:
            is_word = _CALL_BEGUN.fullmatch(word.replace("\n", "")) is not None
            return is_word and not (is_bare and (self.is_drafting or self._tools is None))
        if is_bare:
            return False
        if _JSON_BEGUN.search(word):  # up to its name
            return _CALL_BEGUN.fullmatch(word) is not None and word.count('"') < 4
        if self._tools is None:  # any word can be a name; after a call it is one
            return not word or (self.count > 0 and word.isidentifier())
        name = word.removeprefix("functions.")
        return any(known.startswith(name) for known in ("functions.", *self._tools))

    def writes(self, text: str, with_name: bool = False) -> bool:
        """Whether the family writes this in calls of the offered tools. Without a list of tools any word may be a name,
        but a word alone only after a call. `with_name`: as far as the name, at least."""
        text = _WHITE_SPACE.sub("", text)
        words = _WORD.findall(text)
        if not 1 < len(text) < _HEAD_LIMIT or (self._tools is None and not self.count and words == [text]):
            return False  # a single character may be anything
        for name in _begun(self._tools, words) if self._tools is not None else (*words, "a"):
            tool = self._tools.get(name) if self._tools is not None else None
            keys = _begun(tool.parameters.get("properties") or (), words) if tool else ()
            examples = [(name, {key: value}) for key in keys for value in ("", 0)]
            each = ([(name, {}), (name, {}), *examples], *([one] for one in examples))
            written = _WHITE_SPACE.sub("", "\0".join(self._write(calls, json.dumps) for calls in each))
            at = written.find(text)
            if at >= 0 and not (with_name and at + len(text) <= written.find(name, at)):
                return True
        return False

    def abort(self, is_cut: bool) -> bool:
        """The open call cannot be completed. True: part of it was sent and has ended as an incomplete call. `is_cut`:
        the output ended inside of it."""
        is_begun = self._buffer.truncated or (bool(self._held) and self._tools is not None)
        is_begun = is_cut or (self._buffer.ended and is_begun)
        if is_begun and self.is_open and self.is_offered and not (self.is_done or self.is_sent or self.is_drafting):
            if self.is_custom:
                self._held = [cut_input("".join(self._held))]
            self._send()
        was_sent = self.is_sent
        if was_sent:
            self._blocks.close(complete=False)
        self._reset()
        return was_sent

    def _reset(self) -> None:
        self._name, self.tool, self.is_sent = None, None, False
        self._held = []
        self._buffer.commit()


def _begun(names: Iterable[str], words: Sequence[str]) -> list[str]:
    """The first of these names, and those that one of the words begins."""
    known = list(names)
    return [name for at, name in enumerate(known) if not at or name.startswith(tuple(words))][:_CANDIDATES]


def _plain_name(name: str) -> str:
    """The name without the namespace that some models invent: `functions.name`, `name.name`."""
    plain = name.rpartition("functions.")[2]
    namespace, _, member = plain.rpartition(".")
    return member if namespace == member else plain


def _without_repetition(arguments: str) -> str:
    """If a key comes twice, its last value counts. Arguments that are already sent keep both, and parsers agree."""
    return json.dumps(json.loads(arguments), ensure_ascii=False)


def tools_by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Tools by every name a model may use for them. Server tools run in another cloud and cannot be called here."""
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.kind != "server":
            found.setdefault(tool.name, tool)
            if tool.namespace:
                found[f"{tool.namespace}.{tool.name}"] = found[f"{tool.namespace}__{tool.name}"] = tool
    return found


def accepts(tool: Tool, arguments: object) -> bool:
    """The tool knows every argument, and no required one is missing."""
    known, required = tool.parameters.get("properties"), tool.parameters.get("required")
    return isinstance(arguments, dict) and set(required or ()) <= set(arguments) <= set(known or ())


# A string, alone or as the first value of an object, up to where it was cut; the end of an escape may be missing.
_CUT_STRING = re.compile(
    r'\s*(?:\{\s*"(?:[^"\\]|\\.)*"\s*:\s*)?("(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)', re.DOTALL
)
_LAST_ESCAPE = re.compile(r"\\u[0-9a-fA-F]{4}\Z")


def cut_input(arguments: str) -> str:
    """The beginning of a custom tool's input, from the beginning of the JSON around it."""
    found = _CUT_STRING.match(arguments)
    if found is None:
        return "" if arguments.lstrip()[:1] in ("{", "") else arguments
    for text in (found[1], _LAST_ESCAPE.sub("", found[1])):  # half of a pair of surrogates is no character
        try:
            return str(msgspec.json.decode(text + '"'))
        except msgspec.DecodeError:
            continue
    return ""


def custom_input(arguments: str) -> str:
    """The input of a custom tool: the only string inside the JSON in which the model had to wrap it."""
    try:
        value: Any = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    if isinstance(value, dict) and len(value) == 1:
        value = next(iter(value.values()))
    return value if isinstance(value, str) else arguments
