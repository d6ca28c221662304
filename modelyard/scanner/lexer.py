"""The raw text as readers see it: where markers stand, and how much of the end must wait.

A marker that is a special token in the model's vocabulary is spelled inside the scanner as ONE lone surrogate. No
detokenized text holds one, so a model that merely quotes the marker's text in ordinary tokens is never misread. Where
the vocabulary has no such token, the marker is its own spelling and is found in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

from modelyard.core.output_format import OutputFormat
from modelyard.scanner.sieve import Spellings, purge

T = TypeVar("T")
Steps = Generator[None, None, T]

SURROGATES = "\ud800-\udfff"
_FIRST_CODE = 0xDC00
_SPACE = re.compile(r"\s*")


class Unreadable(Exception):
    """What stands on the tape is not what this reader reads. `depth` counts the brackets that it left open.

    Where it was one member of a list, `further` reads those that follow, once the member's own `inner` brackets are
    closed.
    """

    depth = 0
    inner = 0
    further: Callable[..., Steps[str | None]] | None = None


class Unoffered(Unreadable):
    """It looks like a call of a tool that nobody offered, and is one if `evidence` follows."""

    def __init__(self, name: str, evidence: re.Pattern[str]) -> None:
        super().__init__(f"nobody offered {name!r}")
        self.name, self.evidence = name, evidence


class _Bracket:
    """Around the reading of what stands inside a bracket: whatever breaks there leaves it open."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Unreadable):
            error.depth += 1


BRACKET = _Bracket()


class Tape:
    """Text that arrives in bits, with a reading head. Readers take from it; `kept` can give back what they took."""

    __slots__ = ("at", "base", "codes", "cut", "ended", "kept", "special", "text")

    def __init__(self, codes: dict[str, str], special: frozenset[str] = frozenset()) -> None:
        self.codes, self.special = codes, special
        self.text = ""
        self.at = 0
        self.base = 0  # how many characters were dropped in front of `text`
        self.ended = False
        self.cut = False  # it ended at a limit, not by the model's will
        self.kept: list[str] | None = None

    def push(self, text: str) -> None:
        self.base += self.at
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0

    @property
    def is_empty(self) -> bool:
        return self.at >= len(self.text)

    def mark(self, marker: str) -> str:
        """How this marker is spelled on the tape."""
        return self.codes.get(marker, marker)

    def take(self, end: int) -> str:
        chunk = self.text[self.at : end]
        self.at = end
        if self.kept is not None:
            self.kept.append(chunk)
        return chunk

    def skip(self, count: int) -> str:
        return self.take(self.at + count)

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def ahead(self, count: int) -> Steps[str]:
        """The next `count` characters without taking them; fewer only at the end."""
        while len(self.text) - self.at < count and not self.ended:
            yield
        return self.text[self.at : self.at + count]

    def space(self) -> Steps[str]:
        """Take all white space that stands here."""
        taken: list[str] = []
        while True:
            end = _end(_SPACE, self)
            if end > self.at:
                taken.append(self.take(end))
            if not self.is_empty or self.ended:
                return "".join(taken)
            yield

    def stands(self, options: tuple[str, ...], offset: int = 0) -> Steps[str | None]:
        """Which of these texts stands here (none is the beginning of another); nothing is taken."""
        longest = max(map(len, options))
        while True:
            rest = self.text[self.at + offset : self.at + offset + longest]
            for option in options:
                if rest.startswith(option):
                    return option
            if self.ended or not any(option.startswith(rest) for option in options):
                return None
            yield

    def until(self, stop: re.Pattern[str], limit: int) -> Steps[str]:
        """Take everything before the first match of one character; too much or no match at all is unreadable."""
        taken, size = [], 0
        while True:
            found = stop.search(self.text, self.at)
            taken.append(self.take(found.start() if found else len(self.text)))
            size += len(taken[-1])
            if size > limit or (self.ended and not found):
                raise Unreadable(f"no {stop.pattern} within {limit} characters")
            if found:
                return "".join(taken)
            yield


def _end(pattern: re.Pattern[str], tape: Tape) -> int:
    found = pattern.match(tape.text, tape.at)
    return found.end() if found else tape.at


class Spelled:
    """A set of texts to be found on the tape."""

    __slots__ = ("_first", "_prefixes", "_reach", "pattern")

    def __init__(self, texts: Sequence[str]) -> None:
        self.pattern = _any_of(texts)
        self._prefixes = frozenset(s[:i] for s in texts for i in range(1, len(s)))
        self._reach = max(map(len, texts), default=1) - 1
        self._first = one_of(frozenset(prefix for prefix in self._prefixes if len(prefix) == 1))

    def find(self, tape: Tape) -> re.Match[str] | None:
        """The next one, unless more text could still make it a longer one, or part of one that began before it."""
        found = self.pattern.search(tape.text, tape.at)
        if found and not tape.ended and self.hold(tape) <= found.start():
            return None
        return found

    def hold(self, tape: Tape) -> int:
        """Where the shortest suffix begins that may still become one."""
        text = tape.text
        nearest = max(tape.at, len(text) - self._reach)
        if self._first.search(text, nearest) is None:
            return len(text)  # nearly always
        for start in range(nearest, len(text)):
            if text[start:] in self._prefixes:
                return start
        return len(text)


class Alphabet:
    """A format's markers as one vocabulary spells them, compiled once for each pair of the two."""

    def __init__(self, form: OutputFormat, specials: frozenset[str]) -> None:
        known = markers(form)
        self.codes = _codes(known, specials)
        shown_never = [*form.markers, *(m for m in form.inner if m in specials)]
        spelled = [*(self.codes[m] for m in shown_never), *form.naked]
        self.naked = frozenset(form.naked)
        self.actions = {
            name: {self.codes.get(mark, mark): act for mark, act in region.marks.items()}
            for name, region in form.regions.items()
        }
        self.special = frozenset(c for c in self.codes.values() if "\udc00" <= c <= "\udfff")
        self._marks = Spelled(spelled)
        self.find, self.hold = self._marks.find, self._marks.hold
        self._longest_first = sorted(self.codes, key=len, reverse=True)
        self._rubble = frozenset((*known, *self.codes.values()))
        self._any_rubble = _any_of(self._rubble)
        plain = [m for m in shown_never if self.codes[m] == m]
        self.spellings = Spellings(plain, [m for m in shown_never if m not in plain])
        line = frozenset("\n" if form.framed else "")
        self._first = frozenset(s[0] for s in spelled) | self.spellings.first | line

    def starters(self, stop: Sequence[str]) -> frozenset[str]:
        """A text without one of these characters can hold neither a marker nor a stop string, nor the beginning of one,
        not even that of a marker which only looks like one."""
        return self._first | frozenset(s[0] for s in stop if s) if stop else self._first

    def inside(self, close: tuple[str, ...]) -> Spelled:
        """What is no text between the tags of a call, of which the last is one of `close`."""
        return Spelled(list(dict.fromkeys((*self.codes.values(), *close))))

    def stands(self, tape: Tape) -> bool:
        """A marker stands here that counts outside of calls, too."""
        found = self._marks.pattern.match(tape.text, tape.at)
        return found is not None and found.group() not in self.naked

    def clean(self, text: str) -> str:
        """The text of a block that could not be read, without any marker of the family."""
        return purge(text, self._any_rubble, self._rubble)

    def encode(self, text: str) -> str:
        """A prompt's tail: there every marker is the token that it spells."""
        for marker in self._longest_first:
            text = text.replace(marker, self.codes[marker])
        return text


@lru_cache(maxsize=256)
def markers(form: OutputFormat) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*form.markers, *form.inner)))


@lru_cache(maxsize=256)
def alphabet(form: OutputFormat, specials: frozenset[str]) -> Alphabet:
    """`specials` may hold any tokens of the vocabulary: only the family's own markers count."""
    return Alphabet(form, specials.intersection(markers(form)))


def _codes(known: Sequence[str], specials: frozenset[str]) -> dict[str, str]:
    """How each marker is spelled. One that holds a token, as `<｜DSML｜invoke` does, has that token's code inside."""
    tokens = {m: chr(_FIRST_CODE + i) for i, m in enumerate(known) if m in specials}
    inside = _any_of(tokens)
    return {m: inside.sub(lambda found: tokens[found.group()], m) for m in known}


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(set(texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


@lru_cache(maxsize=256)
def one_of(chars: frozenset[str]) -> re.Pattern[str]:
    """Any of these characters."""
    return re.compile(f"[{''.join(map(re.escape, sorted(chars)))}]" if chars else r"(?!)")
