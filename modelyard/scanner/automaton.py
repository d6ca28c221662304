"""An Aho-Corasick automaton: which of several texts end here, and which may have begun.

Building takes time and memory in proportion to the texts, and reading takes constant time per character, however long
the texts are. A state is the longest end of what was read that begins one of the texts; state 0 is none.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache


class Automaton:
    """`next`, `fallback`, `depth` and `found` are indexed by state."""

    __slots__ = ("depth", "fallback", "found", "next")

    def __init__(self, texts: Collection[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]  # how many characters the state stands for
        self.found: list[str | None] = [None]  # the longest text that ends in the state
        for text in texts:
            if text:
                self._add(text)
        self.fallback = [0] * len(self.next)  # the state of the next shorter end
        self._link()

    def _add(self, text: str) -> None:
        state = 0
        for char in text:
            following = self.next[state]
            if char not in following:
                following[char] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = following[char]
        self.found[state] = text

    def _link(self) -> None:
        """By depth: the fallback of a state is less deep than the state."""
        queue = list(self.next[0].values())
        for state in queue:
            for char, child in self.next[state].items():
                fallback = self.fallback[state]
                while fallback and char not in self.next[fallback]:
                    fallback = self.fallback[fallback]
                self.fallback[child] = self.next[fallback].get(char, 0)
                self.found[child] = self.found[child] or self.found[self.fallback[child]]
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        following = self.next[state].get(char)
        while following is None:
            if not state:
                return 0
            state = self.fallback[state]
            following = self.next[state].get(char)
        return following

    def begun(self, text: str, start: int = 0) -> int:
        """How long the end of `text[start:]` is that begins one of the texts and is shorter than it."""
        state = 0
        for at in range(start, len(text)):
            state = self.step(state, text[at])
        while state and not self.next[state]:
            state = self.fallback[state]
        return self.depth[state]


@lru_cache(maxsize=16)
def automaton(texts: tuple[str, ...]) -> Automaton:
    """A client's stop strings are the same in many requests."""
    return Automaton(texts)
