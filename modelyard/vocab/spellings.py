"""One pattern for the spellings of all control tokens: the longest wins, and thousands cost no more than a few."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_END = ""  # the mark in a trie node that says «a spelling may end here»


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
