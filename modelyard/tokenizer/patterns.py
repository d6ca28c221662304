r"""Which patterns of a tokenizer.json take time that is linear in the text. Pure.

Oniguruma and Python's `re` try again from every place where a repetition could have ended: `(a+)+$` takes 2^n steps
for n letters, `a*$` n². A pattern is linear if every alternative is a sequence of characters and classes, and nothing
has to match behind a repetition: it cannot fail any more then. That holds for all alternatives of the common tokenizers
but two kinds, of which another one matches what they leave: white space before `\s+`, and letters of two cases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

_ATOM = re.compile(
    r"""(\\[pP]\{\^?\w+\} | \\[sSdDwWhHrntf] | \\[^\w\s] | \[\^?(?:\\.|[^\]\\\[])+\]
      | \((?:\?i:|\?:)? (?: [^()\[\]\\*+?{}] | \[[^\]\\\[]*\] )* \) | [^\\()\[\]|*+?{}^$.])
    ([*+?]|\{\d+(?:,\d*)?\})? \+?""",
    re.VERBOSE,
)
_BEFORE_SPACES = (r"\s+(?!\S)", r"\s*[\r\n]+", r"\s*[\r\n]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def regexes(part: Any) -> Iterator[str]:
    """Of a normalizer, pre-tokenizer or decoder, with all of its parts."""
    if isinstance(part, dict):
        if isinstance(found := part.get("Regex"), str):
            yield found
        part = list(part.values())
    for each in part if isinstance(part, list) else ():
        yield from regexes(each)


def is_linear(pattern: str) -> bool:
    if pattern.endswith(r"|\s+"):
        for known in _BEFORE_SPACES:
            pattern = pattern.replace(f"|{known}|", r"|\s+|")
    if f"{_UPPER}+{_LOWER}*" in pattern:
        pattern = pattern.replace(f"{_UPPER}*{_LOWER}+", r"\p{L}+")
    at, repeated = 0, False
    while at < len(pattern):
        if pattern[at] == "|":
            at, repeated = at + 1, False
            continue
        found = _ATOM.match(pattern, at)
        if found is None:
            return False
        atom, times, at = found[1], found[2] or "", found.end()
        is_repetition = times in ("*", "+") or times.endswith(",}")
        if (repeated and times not in ("*", "?")) or (atom.startswith("(") and times not in ("", "?")):
            return False
        repeated = repeated or is_repetition
    return True


def probes(pattern: str) -> Iterator[str]:
    """Texts with which a pattern that is not linear is likely to take long: runs of what occurs in it."""
    letters = re.sub(r"\\[pPsSdDwWrnt](?:\{\^?\w+\})?|[\\()\[\]|*+?{}^$.]", "", pattern)[:64]
    runs = [*dict.fromkeys([*letters, *"aA0 _-\n\u00e9\u4e2d", *map("".join, pairwise(letters))])]
    for length in (30, 20_000):
        for run in runs:
            yield run * (length // len(run))
            yield run * (length // len(run)) + "!"
