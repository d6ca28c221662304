"""Log probabilities on their way through the scanner: each stays with the text in which its token ends.

Tokens that are markers, or that end inside a call, have no visible text and therefore no log probability outside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from modelyard.core.engine import IdLogprob
from modelyard.core.events import TokenLogprob

Spell = Callable[[int], tuple[str, bytes]]


class Trail:
    """Positions count characters: first on the tape, then in what was shown."""

    def __init__(self, spell: Spell) -> None:
        self._spell = spell
        self._raw: deque[tuple[int, IdLogprob]] = deque()
        self._shown: deque[tuple[int, IdLogprob]] = deque()

    def note(self, end: int, logprob: IdLogprob) -> None:
        self._raw.append((end, logprob))

    def pass_over(self, end: int) -> None:
        """The tape up to `end` was no visible text."""
        while self._raw and self._raw[0][0] <= end:
            self._raw.popleft()

    def show(self, start: int, end: int, seen: int) -> None:
        """The tape from `start` to `end` is visible text, and `seen` characters were visible before it."""
        while self._raw and self._raw[0][0] <= end:
            at, logprob = self._raw.popleft()
            self._shown.append((seen + max(0, at - start), logprob))

    def drop(self, cuts: Sequence[tuple[int, int]]) -> None:
        """Visible characters from one position to another turned out to be a marker."""
        self._shown = deque(each for each in self._shown if not any(one < each[0] <= other for one, other in cuts))

    def take(self, said: int) -> list[TokenLogprob]:
        """Of all tokens that end within the first `said` visible characters."""
        taken = []
        while self._shown and self._shown[0][0] <= said:
            taken.append(self._named(self._shown.popleft()[1]))
        return taken

    def _named(self, one: IdLogprob) -> TokenLogprob:
        token, raw = self._spell(one.id)
        return TokenLogprob(token, one.logprob, raw, tuple(self._alternative(i, lp) for i, lp in one.top))

    def _alternative(self, token: int, logprob: float) -> TokenLogprob:
        text, raw = self._spell(token)
        return TokenLogprob(text, logprob, raw)
