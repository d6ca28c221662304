"""One pattern for the spellings of all control tokens: the longest wins, and thousands cost no more than a few."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

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
