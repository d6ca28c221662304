"""The shield: client text that spells a control token is marked, so that it never becomes one.

The mark is U+FDD0, a permanent Unicode noncharacter: no keyboard, font or vocabulary has it, yet it is legal in UTF-8
and JSON and survives normalisation and templates. A spelling with the mark inside does not match its control token; the
token cache removes the mark and encodes that stretch as ordinary text. A mark sent by a client is removed first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

_MAX_INITIALS = 4  # searching for more is slower than the pattern
_END = ""  # marks a trie node where a spelling may end


class TokenSpellings:
    """Whether a text contains a spelling. Spellings begin with a handful of characters that few texts contain;
    searching for those first takes a tenth of the time."""

    def __init__(self, spellings: Iterable[str]) -> None:
        spellings = tuple(spellings)
        self.pattern = spelling_pattern(spellings)
        initials = tuple({s[:1] for s in spellings}) if self.pattern is not None else ()
        self._initials = initials if len(initials) <= _MAX_INITIALS else ("",)  # contained in every text

    def found_in(self, text: str) -> bool:
        for initial in self._initials:
            if initial in text:
                return self.pattern is not None and self.pattern.search(text) is not None
        return False


def spelling_pattern(spellings: Iterable[str], *, group: bool = False) -> re.Pattern[str] | None:
    """Leftmost-longest match of any spelling, as tokenizers match their added tokens; None without spellings.

    A plain alternation tries every spelling at every "<", and some vocabularies have thousands; hence the trie.
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
    """A run without forks is one literal, which avoids deep recursion."""
    run = [character]
    while len(child) == 1 and _END not in child:
        ((character, child),) = child.items()
        run.append(character)
    return re.escape("".join(run)) + _source(child)


SENTINEL = "\ufdd0"


class Shield:
    """Marks the spellings of the given control tokens; returns text without any unchanged."""

    def __init__(self, specials: Iterable[str]) -> None:
        # A mark cannot go inside a single character.
        self._spellings = TokenSpellings(s for s in specials if len(s) > 1)

    def __call__(self, text: str) -> str:
        if SENTINEL in text:
            text = text.replace(SENTINEL, "")
        if not self._spellings.found_in(text):
            return text
        found, pattern = 1, self._spellings.pattern
        while found and pattern is not None:  # spellings may overlap, and one pass marks only the first
            text, found = pattern.subn(_break_up, text)
        return text

    def deep(self, value: Any) -> Any:
        """Mark all strings inside lists and dictionaries, including keys."""
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
    """Shield one text. Keep a `Shield` for many."""
    return _shield(tuple(specials))(text)


def unshield(text: str) -> str:
    """The text without marks."""
    return text.replace(SENTINEL, "")


def well_formed(text: str) -> str:
    """Replace lone surrogates, which JSON can express and UTF-8 cannot, by U+FFFD; join pairs to their character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
