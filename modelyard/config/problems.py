"""Configuration problems: each has a source, a path in it, and a message."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Literal

from msgspec import Struct
from pydantic_core import ErrorDetails

from modelyard.core.errors import InvalidRequest

ProblemLevel = Literal["error", "unavailable", "warning"]
ConfigPath = tuple[str | int, ...]

_BARE_KEY = re.compile(r"[\w/@:+-]+")
_MAX_QUOTED = 60


class ConfigProblem(Struct, frozen=True):
    """An `error` stops loading, `unavailable` concerns a model that this build cannot run, a `warning` is advice."""

    source: str
    path: str
    message: str
    level: ProblemLevel = "error"

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.path, self.message) if part)


class ConfigError(InvalidRequest):
    """The configuration cannot be used. `problems` holds every error, not only the first."""

    default_code = "invalid_config"

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


def suggest(word: str, candidates: Iterable[str]) -> str:
    """` Did you mean …?` to append to a message; empty if no candidate is similar."""
    close = get_close_matches(word, list(candidates), 1)
    return f" Did you mean {close[0]!r}?" if close else ""


def format_path(path: ConfigPath) -> str:
    """`("routes", 0, "match")` as `routes[0].match`; keys that TOML would quote are quoted."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += ("." if text else "") + (key if _BARE_KEY.fullmatch(key) else f'"{key}"')
    return text


def validation_message(error: ErrorDetails, *, secret: bool = False) -> str:
    """One of pydantic's validation errors as a sentence. A `secret` value is not quoted."""
    match error["type"]:
        case "missing":
            return "is missing; it has no default."
        case "extra_forbidden":
            return "unknown key."
        case "value_error" | "assertion_error":
            return error["msg"].split(", ", 1)[-1] + "."
    expected = error["msg"].removeprefix("Input should be ")
    value = repr(error["input"])
    got = "" if secret else f", got {value if len(value) <= _MAX_QUOTED else f'{value[:_MAX_QUOTED]}…'}"
    return f"must be {expected}{got}." if expected != error["msg"] else f"{expected}{got}."
