"""Markers that nobody wrote: where one is dropped, what stood before and after it may read as another.

`<|inner_` `<|tools_prefix|>` `prefix|>` is text around a marker, but a client that joins what it gets would read
`<|inner_prefix|>`. The rule: **such a marker is dropped without any effect, as far as it was not shown yet**. Its first
half waits for what follows the dropped marker, and both go. Only the shortest end of the text waits: what was shown
before (the block ended between the halves, or another marker began there, or the marker is a token in this vocabulary,
whose spelling flows at once) stays, and the rest goes. The first marker to be complete goes first, and what it leaves
side by side is looked at again, so that markers in markers go from the inside out. Nothing else is lost.

A marker that is a token in the vocabulary is a quotation where ordinary text spells it in one go, and stays.
"""

from __future__ import annotations

import re
from collections.abc import Collection


class Spellings:
    """How the markers look that nobody may see: `plain` ones as text, `tokens` only where something was dropped."""

    __slots__ = ("beginnings", "both", "first", "held", "last", "plain", "reach", "starters")

    def __init__(self, plain: Collection[str], tokens: Collection[str]) -> None:
        self.plain, self.both = frozenset(plain), frozenset((*plain, *tokens))
        self.held, self.beginnings = _beginnings(self.plain), _beginnings(self.both)
        self.first, self.last = frozenset(m[0] for m in self.both), frozenset(m[-1] for m in self.both)
        self.starters = re.compile(f"[{''.join(map(re.escape, sorted(self.first)))}]" if self.first else r"(?!)")
        self.reach = max(map(len, self.both), default=1) - 1

    def open_end(self, text: str, beginnings: frozenset[str]) -> int:
        """Where the longest end of the text begins that is the beginning of a marker."""
        for start in range(max(0, len(text) - self.reach), len(text)):
            if text[start] in self.first and text[start:] in beginnings:
                return start
        return len(text)


class Sieve:
    """All text of one kind goes through, whatever block it is in; `seam` says that something was dropped here."""

    __slots__ = ("_joint", "_of", "_past", "_said", "_tail", "cuts")

    def __init__(self, of: Spellings) -> None:
        self._of = of
        self._past = ""  # what stands before the tail, as far as a marker reaches
        self._tail = ""  # the longest end of the text that may become a marker
        self._said = 0  # how much of the tail was shown
        self._joint = 0  # where in the tail something was dropped last; 0: nowhere
        self.cuts: list[tuple[int, int]] = []  # what the last feed dropped, as positions in its text

    @property
    def is_idle(self) -> bool:
        """What comes next cannot be part of a marker that has begun."""
        return not self._tail

    @property
    def waiting(self) -> int:
        return len(self._tail) - self._said

    def seam(self) -> None:
        self._joint = len(self._tail)

    def feed(self, text: str) -> str:
        """What of all text may be shown now."""
        self.cuts.clear()
        if not self._tail and not self._of.starters.search(text):
            return text  # nearly always
        out, at = [], 0
        while at < len(text) and (self._joint or self.waiting):
            out.append(self._add(text[at], at))
            at += 1
        if at < len(text):
            out.append(self._flow(text[at:] if at else text))
        return "".join(out)

    def flush(self) -> str:
        """The block is over: what waited is shown."""
        rest, self._said = self._tail[self._said :], len(self._tail)
        return rest

    def _flow(self, text: str) -> str:
        """Nothing waits and nothing was dropped: there is no marker in this but one that it begins."""
        whole, shown = self._tail + text, len(self._tail)
        return self._keep(self._past + whole, len(self._past) + shown, joint=0)

    def _add(self, char: str, at: int) -> str:
        tail = self._tail + char
        start = self._complete(tail) if char in self._of.last else None
        if start is None:
            return self._keep(self._past + tail, len(self._past) + self._said, len(self._past) + self._joint)
        left = max(start, self._said)
        self.cuts.append((at + 1 - len(tail) + left, at + 1))
        kept = self._past + tail[:left]
        return self._keep(kept, len(self._past) + self._said, joint=len(kept))

    def _complete(self, tail: str) -> int | None:
        """Where the longest marker begins that ends here and may not be shown."""
        for start in range(len(tail)):
            if tail[start:] in (self._of.both if start < self._joint else self._of.plain):
                return start
        return None

    def _keep(self, whole: str, said: int, joint: int) -> str:
        """This is the end of the text now; `said` and `joint` are positions in it. Shows what need not wait."""
        start = self._of.open_end(whole, self._of.beginnings)
        self._joint = max(0, joint - start)
        waits = self._joint or start == len(whole)
        until = start if waits else self._of.open_end(whole, self._of.held)
        self._past = whole[max(0, start - self._of.reach) : start] if start < len(whole) else ""
        self._tail, self._said = whole[start:], max(said, until) - start
        return whole[said:until]


def purge(text: str, pattern: re.Pattern[str], markers: Collection[str]) -> str:
    """A whole text without markers, those included that come about when others are gone. `pattern` finds any."""
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


def _beginnings(markers: Collection[str]) -> frozenset[str]:
    return frozenset(m[:i] for m in markers for i in range(1, len(m)))
