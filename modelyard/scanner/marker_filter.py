"""Remove markers that the model did not write: dropping one marker can join its neighbours to another.

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
from collections.abc import Collection

from modelyard.scanner.automaton import Automaton


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
