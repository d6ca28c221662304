"""Globs on names and paths: matching them, and telling when one leaves nothing for another."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase, translate

_SPECIAL = frozenset("?[")


def compile_globs(patterns: Iterable[str]) -> re.Pattern[str]:
    """One expression for all of them; match it against lower-cased text where case shall not count."""
    return re.compile("|".join(translate(p) for p in patterns))


def covers(wide: str, narrow: str) -> bool:
    """Whether everything that `narrow` matches is certain to match `wide`. False where it is hard to tell."""
    if wide in ("*", narrow):
        return True
    if _SPECIAL & set(wide) or "[" in narrow:
        return False
    # With `*` as its only magic, `wide` may read the wildcards of `narrow` as ordinary letters: only its own `*` can
    # take them in, and that takes in whatever they stand for.
    return fnmatchcase(narrow, wide)
