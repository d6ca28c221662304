"""The raw text as readers see it: where markers are, and how much of its end must be held back.

A marker that is a token of the vocabulary is encoded as ONE lone surrogate. Detokenized text never contains one, so a
marker that the model quotes in ordinary tokens is not misread. A marker without such a token is matched as text. Inside
of a call every other control token has a surrogate, too: in an argument it is text, elsewhere it is not shown.

`MarkerFilter` removes markers that the model did not write: dropping one marker can join its neighbours to another.
`<|inner_` `<|tools_prefix|>` `prefix|>` is text around a marker, but a client that joins its deltas would read
`<|inner_prefix|>`. The rule: **such a marker is dropped without any effect, except for what was already shown**.

- Only the shortest possible end of the text is held back. The first half of a marker waits for what follows the gap.
- What was shown before stays: the block ended between the halves, another marker began there, or the marker is a
  token of the vocabulary, whose spelling is shown at once.
- The first marker to be complete is removed first. What it leaves side by side is checked again, so nested markers are
  removed from the inside out. Nothing else is lost.

A marker that is a token of the vocabulary is a quotation if uninterrupted ordinary text spells it. It stays.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeVar

from modelyard.core.output_format import Dumps, NamedCalls, OutputFormat, StartReader
from modelyard.scanner.automaton import Automaton

if TYPE_CHECKING:
    from modelyard.scanner.output import CallBuilder


# --- markers that appear because another one was dropped --------------------------------------------------------------


class MarkerSpellings:
    """How the markers look as text. `tokens` are removed only across a gap, `plain` markers everywhere."""

    __slots__ = ("all", "all_begun", "first", "first_char", "last", "plain", "plain_begun", "reach")

    def __init__(self, plain: Collection[str], tokens: Collection[str]) -> None:
        self.plain, self.all = frozenset(plain), frozenset((*plain, *tokens))
        self.plain_begun, self.all_begun = Automaton(self.plain), Automaton(self.all)
        self.first, self.last = frozenset(m[0] for m in self.all), frozenset(m[-1] for m in self.all)
        self.first_char = re.compile(f"[{''.join(map(re.escape, sorted(self.first)))}]" if self.first else r"(?!)")
        self.reach = max(map(len, self.all), default=1) - 1

    def partial_start(self, text: str, begun: Automaton) -> int:
        """Where the longest suffix begins that is the prefix of a marker."""
        first = self.first_char.search(text, max(0, len(text) - self.reach))
        return len(text) if first is None else len(text) - begun.begun(text, first.start())


class MarkerFilter:
    """Filters all text of one kind, in every block. `mark_gap` says that something was dropped here."""

    __slots__ = ("_before", "_gap", "_shown", "_spellings", "_tail", "removed")

    def __init__(self, spellings: MarkerSpellings) -> None:
        self._spellings = spellings
        self._before = ""  # the text before the tail, as far as a marker reaches
        self._tail = ""  # the longest suffix that may become a marker
        self._shown = 0  # how much of the tail was shown
        self._gap = 0  # where in the tail the last gap is; 0: nowhere
        self.removed: list[tuple[int, int]] = []  # what the last feed removed, as positions in its text

    @property
    def is_idle(self) -> bool:
        """No marker has begun."""
        return not self._tail

    @property
    def held(self) -> int:
        """The number of characters that are held back."""
        return len(self._tail) - self._shown

    def mark_gap(self) -> None:
        self._gap = len(self._tail)

    def feed(self, text: str) -> str:
        """The text that may be shown now."""
        self.removed.clear()
        if not self._tail and not self._spellings.first_char.search(text):
            return text  # the usual case
        out, pos = [], 0
        while pos < len(text) and (self._gap or self.held):
            out.append(self._add(text[pos], pos))
            pos += 1
        if pos < len(text):  # nothing is held and there is no gap: a marker can only begin here
            whole = self._before + self._tail + text[pos:]
            out.append(self._keep(whole, len(self._before) + len(self._tail), gap=0))
        return "".join(out)

    def flush(self) -> str:
        """The block is over. Show what was held back."""
        rest, self._shown = self._tail[self._shown :], len(self._tail)
        return rest

    def _add(self, char: str, pos: int) -> str:
        before, tail = len(self._before), self._tail + char
        start = self._complete_marker(tail) if char in self._spellings.last else None
        if start is None:
            return self._keep(self._before + tail, before + self._shown, before + self._gap)
        left = max(start, self._shown)
        self.removed.append((pos + 1 - len(tail) + left, pos + 1))
        kept = self._before + tail[:left]
        return self._keep(kept, before + self._shown, gap=len(kept))

    def _complete_marker(self, tail: str) -> int | None:
        """Where the longest marker begins that ends here and must not be shown."""
        for start in range(len(tail)):
            if tail[start:] in (self._spellings.all if start < self._gap else self._spellings.plain):
                return start
        return None

    def _keep(self, text: str, shown: int, gap: int) -> str:
        """Make this the end of the text. `shown` and `gap` are positions in it. Returns what need not be held back."""
        spellings = self._spellings
        start = spellings.partial_start(text, spellings.all_begun)
        self._gap = max(0, gap - start)
        holds_all = self._gap or start == len(text)
        end = start if holds_all else spellings.partial_start(text, spellings.plain_begun)
        self._before = text[max(0, start - spellings.reach) : start] if start < len(text) else ""
        self._tail, self._shown = text[start:], max(shown, end) - start
        return text[shown:end]


def remove_markers(text: str, pattern: re.Pattern[str], markers: Collection[str]) -> str:
    """A complete text without markers, including those that appear when others are removed. `pattern` matches any."""
    text = pattern.sub("", text)
    if not pattern.search(text):
        return text
    last, longest = {m[-1] for m in markers}, max(map(len, markers))
    out: list[str] = []
    for char in text:
        out.append(char)
        if char in last:
            end = "".join(out[-longest:])
            size = max((len(m) for m in markers if end.endswith(m)), default=0)
            del out[len(out) - size :]
    return "".join(out)


# --- the text as readers see it ---------------------------------------------------------------------------------------

T = TypeVar("T")
Incremental = Generator[None, None, T]  # yields when it needs more input

SURROGATES = "\ud800-\udfff"
NAME_LIMIT = 128  # characters of a function or parameter name
_FIRST_CODE = 0xDC00
FOREIGN = "\ud800-\udbff"  # control tokens that are no markers of the family
_FIRST_FOREIGN, _MAX_FOREIGN = 0xD800, 0x400
_ANY_CODE, _ANY_FOREIGN = re.compile(f"[{SURROGATES}]"), re.compile(f"[{FOREIGN}]")
_SPACE = re.compile(rf"[\s{FOREIGN}]*")
_SPACE_LIMIT = 512
_HEADER = re.compile(rf"[^<\n{SURROGATES}]*")
_ELEMENT = re.compile(r"<([^\s=<>/]+)[^<>]*=\Z")  # the name in a marker that is the beginning of a tag
_WHOLE_TAG = re.compile(r"</?[\w:]+>\Z")
_TAG_END = re.compile(rf"[>\n<{SURROGATES}]")
_ATTRIBUTE = re.compile(r"""[\s"']*(?:name)?[\s="']*([\w.:/-]*)""")


class ParseError(Exception):
    """The input is not what the reader reads. `depth` counts the brackets that are still open.

    If one member of a list failed, `read_rest` reads the members after it, once its own `member_depth` brackets are
    closed.
    """

    depth = 0
    member_depth = 0
    read_rest: Callable[..., Incremental[str | None]] | None = None


class UnknownTool(ParseError):
    """The input looks like a call of a tool that is not offered. It is one if `evidence` matches what follows."""

    def __init__(self, name: str, evidence: re.Pattern[str]) -> None:
        super().__init__(f"the tool {name!r} is not offered")
        self.name, self.evidence = name, evidence


class _InsideBracket:
    """A context manager that counts an open bracket in every ParseError that passes through it."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ParseError):
            error.depth += 1


INSIDE_BRACKET = _InsideBracket()


class TextBuffer:
    """Input text that arrives in chunks, with a read position.

    `uncommitted` collects what was taken since the last commit. If the reader fails, it is shown as text.
    """

    __slots__ = (
        *(
            "_encoded",
            "_foreign",
            "_spellings",
            "closing",
            "codes",
            "dropped",
            "ended",
            "openings",
            "pos",
            "recorded",
            "text",
        ),
        *("token_codes", "truncated", "turn_ends", "uncommitted"),
    )

    def __init__(
        self,
        codes: dict[str, str],
        spellings: Mapping[int, str] | None = None,
        turn_ends: tuple[str, ...] = (),
        openings: tuple[str, ...] = (),
    ) -> None:
        self.codes, self.turn_ends, self.openings = codes, turn_ends, openings
        self._spellings = spellings or {}
        self.token_codes = frozenset(map(chr, self._spellings))
        self._foreign: dict[str, str] = {}
        self._encoded: dict[str, str] = {}
        self.closing: tuple[str, ...] = turn_ends  # what ends the open call
        self.text = ""
        self.pos = 0
        self.dropped = 0  # the number of characters before `text`
        self.ended = False
        self.truncated = False  # a limit ended the output, not the model
        self.uncommitted: list[str] | None = None
        self.recorded: list[str] | None = None  # everything that is taken, for a call that may be a quotation

    def push(self, text: str) -> None:
        self.dropped += self.pos
        self.text = self.text[self.pos :] + text if self.pos < len(self.text) else text
        self.pos = 0

    def end(self, truncated: bool = False) -> None:
        """Nothing follows."""
        self.ended, self.truncated = True, truncated

    def move_to(self, pos: int) -> None:
        """Go on from there. What is skipped is no part of a call."""
        self.pos = pos

    @property
    def is_empty(self) -> bool:
        return self.pos >= len(self.text)

    def begin_reading(self, marker: str = "", recorded: str | None = None) -> None:
        """A reader begins behind a marker, which is shown with the rest if it fails. `recorded` begins the record."""
        self.uncommitted, self.recorded = [marker], None if recorded is None else [recorded]

    def end_reading(self) -> None:
        self.uncommitted = self.recorded = None

    def commit(self) -> None:
        self.uncommitted = []

    def drop_marker(self) -> None:
        """The marker before the reader is not shown, whatever comes."""
        if self.uncommitted:
            self.uncommitted[0] = ""

    def encoded(self, marker: str) -> str:
        """How this marker, or a text that contains one, is spelled in `text`."""
        found = self.codes.get(marker) or self._encoded.get(marker)
        if found is None:
            found = marker
            for code, text in self._spellings.items():
                found = found.replace(text, chr(code))
            self._encoded[marker] = found
        return found

    def foreign_code(self, token: str) -> str:
        """How a control token that is no marker of the family is spelled in `text`."""
        if token not in self._foreign and len(self._foreign) < _MAX_FOREIGN:
            code = _FIRST_FOREIGN + len(self._foreign)
            self._foreign[token], self._spellings = chr(code), {**self._spellings, code: token}
        return self._foreign.get(token, "")

    def spelled(self, text: str) -> str:
        """A part of `text` as an argument contains it: with the texts of all tokens."""
        return text if text.isascii() or not _ANY_CODE.search(text) else text.translate(self._spellings)

    def without_foreign(self, text: str) -> str:
        return _ANY_FOREIGN.sub("", text) if self._foreign else text

    def begin_call(self, closing: tuple[str, ...]) -> None:
        self.closing = (*map(self.encoded, closing), *self.turn_ends)

    def is_call_end(self, offset: int = 0) -> Incremental[bool]:
        """Whether a marker comes next that ends the call, and after it only the end of the output or the next call.
        Any other marker inside of an argument is text."""
        if not self.closing or not (yield from self.match(self.closing, offset)):
            return False
        return (yield from self.is_output_end(offset))

    def is_output_end(
        self, offset: int, ends: tuple[str, ...] = (), openings: tuple[str, ...] = (), *, may_repeat: bool = True
    ) -> Incremental[bool]:
        """Whether only markers that end a call come before the end of the output or, if it `may_repeat`, the next call.
        `ends` and `openings` are those of the call's tags."""
        openings = (*openings, *self.openings)
        options = _longest((*ends, *self.closing, *openings))
        while True:
            offset = yield from self.skip_space_ahead(offset)
            if self.ended and self.pos + offset >= len(self.text):
                return True
            found = (yield from self.match(options, offset)) if options else None
            if found is None or found in openings:
                return found is not None and may_repeat
            offset, may_repeat = offset + len(found), may_repeat and found not in self.turn_ends

    def skip_space_ahead(self, offset: int) -> Incremental[int]:
        """Where the white space at `offset` ends. Nothing is taken."""
        while offset < _SPACE_LIMIT:
            if self.pos + offset < len(self.text):
                if not self.text[self.pos + offset].isspace():
                    break
                offset += 1
            elif self.ended:
                break
            else:
                yield
        return offset

    def take_to(self, end: int) -> str:
        chunk = self.text[self.pos : end]
        self.pos = end
        if self.uncommitted is not None:
            self.uncommitted.append(chunk)
            if self.recorded is not None:
                self.recorded.append(chunk)
        return chunk

    def skip(self, count: int) -> str:
        return self.take_to(self.pos + count)

    def take_match(self, pattern: re.Pattern[str]) -> str:
        """Take what the pattern matches here. It must match the empty string, too."""
        found = pattern.match(self.text, self.pos)
        return self.take_to(found.end()) if found and found.end() > self.pos else ""

    def peek(self) -> Incremental[str]:
        """The next character; empty at the end."""
        while self.pos >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.pos]

    def lookahead(self, count: int) -> Incremental[str]:
        """The next `count` characters without taking them; fewer only at the end."""
        while len(self.text) - self.pos < count and not self.ended:
            yield
        return self.text[self.pos : self.pos + count]

    def read_run(self, pattern: re.Pattern[str], limit: int = sys.maxsize) -> Incremental[str]:
        """Take everything that matches a pattern of repeated characters. More than `limit` is a ParseError."""
        taken = ""
        while True:
            taken += self.take_match(pattern)
            if len(taken) > limit:
                raise ParseError(f"longer than {limit} characters")
            if not self.is_empty or self.ended:
                return taken
            yield

    def skip_space(self) -> Incremental[str]:
        return self.read_run(_SPACE)

    def match(self, options: tuple[str, ...], offset: int = 0) -> Incremental[str | None]:
        """Which of these texts comes next; nothing is taken. No option may be a prefix of another."""
        longest = max(map(len, options))
        while True:
            start = self.pos + offset
            if self.text.startswith(options, start):
                return next(option for option in options if self.text.startswith(option, start))
            if self.ended or len(self.text) - start >= longest:
                return None
            rest = self.text[start:]
            if not any(option.startswith(rest) for option in options):
                return None
            yield

    def is_next(self, *markers: str) -> Incremental[bool]:
        """Whether one of these markers or texts comes next."""
        return (yield from self.match(tuple(map(self.encoded, markers)))) is not None

    def skip_if(self, *markers: str) -> Incremental[bool]:
        """Skip one of these markers or texts if it comes next."""
        found = yield from self.match(tuple(map(self.encoded, markers)))
        self.skip(len(found or ""))
        return found is not None

    def read_until(self, stop: re.Pattern[str], limit: int = NAME_LIMIT, *, may_end: bool = False) -> Incremental[str]:
        """Take everything before the first match of a one-character pattern, or before the end if that is allowed.

        More than `limit` characters are a ParseError.
        """
        taken, size = [], 0
        while True:
            found = stop.search(self.text, self.pos)
            taken.append(self.take_to(found.start() if found else len(self.text)))
            size += len(taken[-1])
            if size > limit or (self.ended and not found and not may_end):
                raise ParseError(f"expected {stop.pattern} within {limit} characters")
            if found or self.ended:
                return "".join(taken)
            yield

    def read_header(self, markers: tuple[str, ...], limit: int) -> Incremental[tuple[str, str]]:
        """Take the text before the next of these markers, and return both. The marker is empty if the output is over.

        The text must fit into one line and `limit` characters.
        """
        text = ""
        while True:
            text += self.take_match(_HEADER)
            char = yield from self.peek()
            found = (yield from self.match(markers)) if char else ""
            if found is not None and len(text) <= limit:
                return text, found
            if len(text) >= limit or char == "\n":
                raise ParseError("expected a header")
            text += self.skip(1)

    def read_verbatim(self, ends: tuple[str, ...], emit: Callable[[str], None] | None = None) -> Incremental[str]:
        """Take everything before the first of `ends` and emit it exactly, as it arrives.

        Returns the end that was found, which is not taken; empty if the output is over.
        """
        finder = text_finder(ends)
        while True:
            found = finder.pattern.search(self.text, self.pos)
            end = found.start() if found else len(self.text) if self.ended else finder.partial_start(self)
            if end > self.pos:
                chunk = self.take_to(end)
                if emit is not None:
                    emit(chunk)
            if found or self.ended:
                return found.group() if found else ""
            yield


class TextFinder:
    """Finds any of several texts in a buffer."""

    __slots__ = ("_begun", "_first_chars", "_reach", "pattern")

    def __init__(self, texts: Sequence[str]) -> None:
        self.pattern = _any_text(texts)
        self._begun = Automaton(texts)
        self._reach = max(map(len, texts), default=1) - 1
        self._first_chars = any_char(frozenset(text[0] for text in texts if len(text) > 1))

    def find(self, buffer: TextBuffer) -> re.Match[str] | None:
        """The next match, unless more input could make it longer or part of an earlier one."""
        found = self.pattern.search(buffer.text, buffer.pos)
        if found and not buffer.ended and self.partial_start(buffer) <= found.start():
            return None
        return found

    def partial_start(self, buffer: TextBuffer) -> int:
        """Where the longest suffix begins that more input may complete to a match."""
        text = buffer.text
        first = self._first_chars.search(text, max(buffer.pos, len(text) - self._reach))
        if first is None:
            return len(text)  # the usual case
        return len(text) - self._begun.begun(text, first.start())


class MarkerTable:
    """The markers of a format as one vocabulary spells them."""

    def __init__(self, form: OutputFormat, specials: frozenset[str]) -> None:
        known = all_markers(form)
        self.codes = _codes(known, specials)
        never_shown = [*form.markers, *(m for m in form.inner_markers if m in specials)]
        stray = stray_tags(form, specials)
        self.bare = frozenset((*form.bare_markers, *(self.codes.get(m, m) for m, a in stray.items() if a.bare)))
        spelled = [*(self.codes[m] for m in never_shown), *self.bare]
        self.actions = {
            name: {self.codes.get(marker, marker): action for marker, action in (stray | region.markers).items()}
            for name, region in form.regions.items()
        }
        openings = [_ELEMENT.match(self.codes.get(m, m)) for m in (*known, *form.bare_markers)]
        names = "|".join(sorted({re.escape(found[1]) for found in openings if found}))
        self._tag_starts = frozenset(f"<{found[1]}" for found in openings if found)
        self._tag = re.compile(rf"</?(?:{names})(?=[\s=/>])[^<>\n]*>" if names else r"(?!)")
        self._opening = re.compile(rf"<({names})(?=[\s=/>])[^<>\n]*(?<!/)>" if names else r"(?!)")
        self.turn_ends = tuple(self.codes[m] for m in form.stop_tokens if m in self.codes)
        self.turn_end_codes = frozenset(self.turn_ends)
        self.spelled = {ord(code): m for m, code in self.codes.items() if len(code) == 1 and code >= "\udc00"}
        # In a message of its own every call begins like any other message, which a text may quote.
        self.call_openings = () if form.has_messages else tuple(self.codes[m] for m in form.call_markers)
        self._finder = TextFinder(spelled)
        self.find, self.partial_start = self._finder.find, self._finder.partial_start
        self._longest_first = sorted(self.codes, key=len, reverse=True)
        self._all_spellings = frozenset((*known, *self.codes.values()))
        self._any_spelling = _any_text(self._all_spellings, f"[{FOREIGN}]")
        self._shown_never = frozenset((*never_shown, *(self.codes[m] for m in never_shown)))
        self._any_shown_never = _any_text(self._shown_never, f"[{FOREIGN}]")
        as_text = [m for m in never_shown if self.codes[m] == m]
        as_token = [m for m in known if m not in as_text]
        self.spellings = MarkerSpellings(as_text, as_token)
        inside = [m for m in form.inner_markers if m not in specials]
        tags = {m for m in self.bare if m.startswith("<")}  # the others are brackets and words
        quotable = {self.codes[m] for m in known}.difference(form.bare_markers) | tags
        self.quotable = quotable.difference(self.turn_ends)
        self._can_be_cut = Automaton([self.codes[m] for m in (*never_shown, *inside) if len(self.codes[m]) > 1])
        self.write = form.writer.write if form.writer else _write_objects
        newline = frozenset("\n" if form.trims_newlines else "")
        self._first_chars = frozenset(s[0] for s in spelled) | self.spellings.first | newline
        self.any_first_char = any_char(self._first_chars)

    def without_cut_marker(self, text: str, at_least: int = 1) -> str:
        """The end of an output that a limit cut off, without the beginning of a marker there. A marker that is a token
        cannot be cut, and a single character may be anything: more than `at_least` characters are a beginning."""
        while (begun := self._can_be_cut.begun(text, 0)) > at_least:
            text = text[:-begun]
        return text

    def first_char(self, stop: Sequence[str]) -> re.Pattern[str]:
        """Text in which it finds nothing contains no part of a marker or stop string, in any spelling."""
        return any_char(self._first_chars | frozenset(s[0] for s in stop if s)) if stop else self.any_first_char

    def inside_call(self, closing: tuple[str, ...]) -> TextFinder:
        """Finds what is not shown as text between the tags of a call that `closing` ends."""
        return text_finder(tuple(dict.fromkeys((*self.codes.values(), *closing, *self._tag_starts))))

    def skip_tag(self, buffer: TextBuffer, found: re.Match[str]) -> Incremental[bool]:
        """Skip what `inside_call` found; the whole tag if it is the beginning of one that ends on its line.

        False: it is the beginning of another element, and nothing was skipped.
        """
        text, size = found.group(), len(found.group())
        buffer.move_to(found.start())
        if text.endswith("=") or text in self._tag_starts:
            limit = size + NAME_LIMIT
            while not (end := _TAG_END.search(buffer.text, buffer.pos + size, buffer.pos + limit)):
                if buffer.ended or len(buffer.text) - buffer.pos >= limit:
                    break
                yield
            if end and end.group() == ">" and self._tag.match(buffer.text, buffer.pos):
                size = end.end() - buffer.pos
            elif text in self._tag_starts:
                return False
        buffer.move_to(buffer.pos + size)
        return True

    def is_at_marker(self, buffer: TextBuffer) -> bool:
        """Whether a marker comes next that also counts outside of calls."""
        found = self._finder.pattern.match(buffer.text, buffer.pos)
        return found is not None and found.group() not in self.bare

    def remove_markers(self, text: str) -> str:
        """Ordinary text without markers. It may quote the tags of a call."""
        return remove_markers(text, self._any_shown_never, self._shown_never)

    def remove_tags(self, text: str) -> str:
        """The words of a call that cannot be read: without its markers and its complete tags."""
        return remove_markers(self._tag.sub("", text), self._any_spelling, self._all_spellings)

    def openings(self, text: str) -> list[str]:
        """The names of the call's tags that this text opens."""
        return self._opening.findall(text)

    def encode(self, text: str) -> str:
        """Encode the tail of a prompt, where every marker is a token."""
        for marker in self._longest_first:
            text = text.replace(marker, self.codes[marker])
        return text


# --- tags of a call outside of calls ----------------------------------------------------------------------------------


def _write_objects(calls: NamedCalls, dumps: Dumps) -> str:
    """For formats without calls of their own: as most families write them."""
    return "".join(dumps({"name": name, "arguments": arguments}) for name, arguments in calls)


def stray_tags(form: OutputFormat, specials: frozenset[str]) -> dict[str, StartReader]:
    """What to do with the tags of a call where no call is open: they are what is left of a call that broke.

    Families that call in XML share the names of their elements with other documents, which a model may quote. An inner
    tag is a quotation if it names no parameter and no tool that is offered, or closes such a tag. If only a token of
    the vocabulary can begin a call, every tag in ordinary text is one.
    """
    acting = {marker: action for region in form.regions.values() for marker, action in region.markers.items()}
    starting = {m: action for m, action in acting.items() if isinstance(action, StartReader)}
    if specials.issuperset(starting):
        return {}
    readers = [m for m, action in starting.items() if not action.bare]
    is_quoted = form.has_messages  # calls are in messages of their own
    found = {
        m: StartReader(partial(_skip_marker, is_tag=not is_quoted and bool(_WHOLE_TAG.match(m))), bare=True)
        for m in form.inner_markers
        if not m.startswith(tuple(readers))
    }
    for marker in dict.fromkeys((*acting, *form.hidden_markers, *form.inner_markers)):
        element = _ELEMENT.match(marker)
        if element is None:
            continue
        name, closing = element[1], f"</{element[1]}>"
        if any(f"<{name}".startswith(reader) for reader in readers):
            continue
        skip = partial(_skip_opening, is_quoted=is_quoted)
        found[f"<{name}"] = StartReader(partial(skip, is_whole=False, is_marker=False), bare=True)
        if marker not in acting:
            is_marker = marker in form.hidden_markers
            found[marker] = StartReader(partial(skip, is_whole=True, is_marker=is_marker), bare=not is_marker)
        if closing in form.inner_markers and not is_quoted:
            found[closing] = StartReader(partial(_skip_closing, name=name), bare=True)
    return found


def _skip_opening(
    buffer: TextBuffer, calls: CallBuilder, *, is_whole: bool, is_marker: bool, is_quoted: bool
) -> Incremental[str | None]:
    """After the beginning of a tag. `is_whole`: the name that it gives comes next. `is_marker`: it is never text.
    `is_quoted`: it is text, except behind a broken call."""
    rest = yield from buffer.read_until(_TAG_END, may_end=True)
    is_closed = yield from buffer.skip_if(">")
    if not is_whole and (rest[:1] not in ("", "=", "/") and not rest[:1].isspace()):
        raise ParseError("another element")
    found = _ATTRIBUTE.match(rest)
    is_call = is_marker or calls.is_broken or (not is_quoted and calls.knows(found[1] if found else ""))
    is_cut = buffer.is_empty and " " not in rest  # the output ends inside the tag
    if is_whole and not is_closed:
        buffer.drop_marker()  # the beginning of a tag alone quotes nothing
    if not is_call or not (is_closed or is_cut):
        raise ParseError("a quoted tag")
    return None


def _skip_marker(_: TextBuffer, calls: CallBuilder, *, is_tag: bool) -> Incremental[str | None]:
    """A marker of the family, or what is one only between its tags."""
    yield from ()
    if not (is_tag or calls.is_broken):
        raise ParseError("ordinary text")
    return None


def _skip_closing(_: TextBuffer, calls: CallBuilder, *, name: str) -> Incremental[str | None]:
    yield from ()
    if calls.closes_quoted(name):
        raise ParseError("the end of a quoted tag")
    return None


@lru_cache(maxsize=256)
def all_markers(form: OutputFormat) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*form.markers, *form.inner_markers)))


@lru_cache(maxsize=256)
def marker_table(form: OutputFormat, specials: frozenset[str]) -> MarkerTable:
    """`specials` may contain any tokens of the vocabulary. Only the family's markers count."""
    return MarkerTable(form, specials.intersection(all_markers(form)))


def _codes(known: Sequence[str], specials: frozenset[str]) -> dict[str, str]:
    """The spelling of each marker. One that contains a token, as `<｜DSML｜invoke` does, contains that token's code."""
    tokens = {m: chr(_FIRST_CODE + i) for i, m in enumerate(known) if m in specials}
    token = _any_text(tokens)
    return {m: token.sub(lambda found: tokens[found.group()], m) for m in known}


def _any_text(texts: Iterable[str], more: str = "") -> re.Pattern[str]:
    longest_first = sorted(set(texts), key=len, reverse=True)
    return re.compile("|".join([*map(re.escape, longest_first), *filter(None, [more])]) or r"(?!)")


@lru_cache(maxsize=256)
def _longest(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Without those that another one begins with."""
    return tuple(t for t in dict.fromkeys(texts) if not any(o != t and o.startswith(t) for o in texts))


@lru_cache(maxsize=256)
def text_finder(texts: tuple[str, ...]) -> TextFinder:
    return TextFinder(texts)


@lru_cache(maxsize=256)
def any_char(chars: frozenset[str]) -> re.Pattern[str]:
    return re.compile(f"[{''.join(map(re.escape, sorted(chars)))}]" if chars else r"(?!)")
