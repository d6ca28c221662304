"""Stop strings: found in visible text however it is cut, and never shown."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """The string whose LAST character comes first wins, the longer one of two that end together.

    That is the answer of a reader who sees one character at a time, so every cutting of the text gets it.
    """

    __slots__ = ("_prefixes", "_reach", "_stops", "held")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._prefixes = frozenset(s[:i] for s in self._stops for i in range(1, len(s)))
        self._reach = max(map(len, self._stops), default=1) - 1
        self.held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """What may be shown, and the stop string that ends it all."""
        text = self.held + text
        self.held = ""
        if hit := self._first(text):
            return text[: hit[0]], hit[1]
        cut = self._hold(text)
        self.held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text

    def _first(self, text: str) -> tuple[int, str] | None:
        found = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        return min(found)[1:] if found else None

    def _hold(self, text: str) -> int:
        for start in range(max(0, len(text) - self._reach), len(text)):
            if text[start:] in self._prefixes:
                return start
        return len(text)
