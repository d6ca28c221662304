"""Text of clients that spells a control token is marked, so that it never becomes one.

The mark is U+FDD0. Unicode keeps it as a noncharacter for ever: no keyboard, font or vocabulary has it, yet it is legal
in UTF-8 and JSON and survives normalisation and templates. A control token's spelling with the mark inside matches no
control token any more; the token cache takes the mark out again and encodes that stretch as ordinary text. A mark that
a client sends is removed first, so nobody can write one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

# One pattern for the spellings of all control tokens: the longest wins, and thousands cost no more than a few.

_FEW = 4  # to look for more of them takes longer than the pattern
_END = ""  # the mark in a trie node that says «a spelling may end here»


class Spellings:
    """Whether a text holds one of them. They begin with a handful of characters, which few texts hold: to look for
    those takes a tenth of what the pattern does."""

    def __init__(self, spellings: Iterable[str]) -> None:
        spellings = tuple(spellings)
        self.pattern = spelling_pattern(spellings)
        initials = tuple({s[:1] for s in spellings}) if self.pattern is not None else ()
        self._initials = initials if len(initials) <= _FEW else ("",)  # which every text holds

    def are_in(self, text: str) -> bool:
        for initial in self._initials:
            if initial in text:
                return self.pattern is not None and self.pattern.search(text) is not None
        return False


def spelling_pattern(spellings: Iterable[str], *, group: bool = False) -> re.Pattern[str] | None:
    """Leftmost-longest match of any spelling, as tokenizers match their added tokens; None where there are none.

    A plain alternation tries every spelling at every «<», and some vocabularies have thousands: hence the trie.
    """
    trie: dict[str, Any] = {}
    for spelling in spellings:
        node = trie
        for character in spelling:
            node = node.setdefault(character, {})
        node[_END] = {}
    if not trie or _END in trie:
        return None
    source = _source(trie)
    return re.compile(f"({source})" if group else source)


def _source(node: dict[str, Any]) -> str:
    branches = [_branch(character, child) for character, child in node.items() if character != _END]
    if not branches:
        return ""
    if len(branches) == 1 and _END not in node:
        return branches[0]
    body = "(?:" + "|".join(branches) + ")"
    return body + "?" if _END in node else body


def _branch(character: str, child: dict[str, Any]) -> str:
    """A run without forks is one literal: deep recursion would limit the length of a spelling."""
    run = [character]
    while len(child) == 1 and _END not in child:
        ((character, child),) = child.items()
        run.append(character)
    return re.escape("".join(run)) + _source(child)


SENTINEL = "\ufdd0"


class Shield:
    """Marks the spellings of the given control tokens; text without any comes back as the same object."""

    def __init__(self, specials: Iterable[str]) -> None:
        # One character cannot be broken up by a mark inside it.
        self._spellings = Spellings(s for s in specials if len(s) > 1)

    def __call__(self, text: str) -> str:
        return self.marked(text)

    def marked(self, text: str) -> str:
        if SENTINEL in text:
            text = text.replace(SENTINEL, "")
        return self._mark(text) if self._spellings.are_in(text) else text

    def _mark(self, text: str) -> str:
        found, pattern = 1, self._spellings.pattern
        while found and pattern is not None:  # once more: spellings may overlap, and only the first was broken up
            text, found = pattern.subn(_break_up, text)
        return text

    def deep(self, value: Any) -> Any:
        """The same inside lists and dictionaries, keys included."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, dict):
            return {self.deep(key): self.deep(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.deep(item) for item in value]
        return value


def _break_up(match: re.Match[str]) -> str:
    spelling = match[0]
    return spelling[0] + SENTINEL + spelling[1:]


@lru_cache(maxsize=64)
def _shield(specials: tuple[str, ...]) -> Shield:
    return Shield(specials)


def shield(text: str, specials: Iterable[str]) -> str:
    """One text, shielded. Hold a `Shield` where there are many."""
    return _shield(tuple(specials))(text)


def unshield(text: str) -> str:
    """The text as people and engines may see it."""
    return text.replace(SENTINEL, "")


def well_formed(text: str) -> str:
    """Replace lone surrogates, which JSON can express and UTF-8 cannot, by U+FFFD; join pairs to their character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
