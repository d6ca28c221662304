"""What is wrong with a configuration: every problem has a file, a path in it, and a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Literal

from msgspec import Struct

from modelyard.core.errors import InvalidRequest

Level = Literal["error", "unavailable", "warning"]
Loc = tuple[str | int, ...]

_BARE = re.compile(r"[\w/@:+-]+")


class Problem(Struct, frozen=True):
    """An `error` stops loading, `unavailable` concerns a model that this build cannot run, a `warning` is advice."""

    source: str
    path: str
    message: str
    level: Level = "error"

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.path, self.message) if part)


class ConfigError(InvalidRequest):
    """The configuration cannot be used. `problems` holds every reason, not only the first."""

    default_code = "invalid_config"

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


def suggest(word: str, candidates: Iterable[str]) -> str:
    """A question to append to a message, or nothing where nothing is near."""
    close = get_close_matches(word, list(candidates), 1)
    return f" Did you mean {close[0]!r}?" if close else ""


def spell(loc: Loc) -> str:
    """`("routes", 0, "match")` as `routes[0].match`; keys that TOML would quote are quoted."""
    text = ""
    for key in loc:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += ("." if text else "") + (key if _BARE.fullmatch(key) else f'"{key}"')
    return text
