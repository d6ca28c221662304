"""What is wrong with a configuration: every problem has a file, a path in it, and a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Literal

from msgspec import Struct
from pydantic_core import ErrorDetails

from modelyard.core.errors import InvalidRequest

ProblemLevel = Literal["error", "unavailable", "warning"]
ConfigPath = tuple[str | int, ...]

_BARE = re.compile(r"[\w/@:+-]+")


class ConfigProblem(Struct, frozen=True):
    """An `error` stops loading, `unavailable` concerns a model that this build cannot run, a `warning` is advice."""

    source: str
    path: str
    message: str
    level: ProblemLevel = "error"

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.path, self.message) if part)


class ConfigError(InvalidRequest):
    """The configuration cannot be used. `problems` holds every reason, not only the first."""

    default_code = "invalid_config"

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


def suggest(word: str, candidates: Iterable[str]) -> str:
    """A question to append to a message, or nothing where nothing is near."""
    close = get_close_matches(word, list(candidates), 1)
    return f" Did you mean {close[0]!r}?" if close else ""


def format_path(loc: ConfigPath) -> str:
    """`("routes", 0, "match")` as `routes[0].match`; keys that TOML would quote are quoted."""
    text = ""
    for key in loc:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += ("." if text else "") + (key if _BARE.fullmatch(key) else f'"{key}"')
    return text


# Pydantic's findings as sentences.

_LONGEST = 60


def validation_message(fault: ErrorDetails, *, secret: bool = False) -> str:
    """What is wrong with a value. A `secret` value is not quoted."""
    match fault["type"]:
        case "missing":
            return "is missing; it has no default."
        case "extra_forbidden":
            return "unknown key."
        case "value_error" | "assertion_error":
            return fault["msg"].split(", ", 1)[-1] + "."
        case _:
            said = fault["msg"].removeprefix("Input should be ")
            got = "" if secret else f", got {_quote_value(fault['input'])}"
            return f"must be {said}{got}." if said != fault["msg"] else f"{said}{got}."


def _quote_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
