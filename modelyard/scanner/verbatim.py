"""Text that ends where a certain other text stands, taken exactly and as it comes."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from modelyard.scanner.lexer import Steps, Tape


def verbatim(tape: Tape, ends: tuple[str, ...], say: Callable[[str], None]) -> Steps[str]:
    """Say everything before the first of `ends`, which is returned but not taken; empty: the output is over."""
    pattern = _any_of(ends)
    while True:
        found = pattern.search(tape.text, tape.at)
        until = found.start() if found else len(tape.text) if tape.ended else _certain(tape, ends)
        if until > tape.at:
            say(tape.take(until))
        if found or tape.ended:
            return found.group() if found else ""
        yield


def _certain(tape: Tape, ends: tuple[str, ...]) -> int:
    """Where the shortest suffix begins that may become one of the ends."""
    reach = max(map(len, ends)) - 1
    for start in range(max(tape.at, len(tape.text) - reach), len(tape.text)):
        if any(end.startswith(tape.text[start:]) for end in ends):
            return start
    return len(tape.text)


@lru_cache(maxsize=256)
def _any_of(ends: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, ends)))
