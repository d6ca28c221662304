"""Configuration problems, each with a source, a path in it and a message; and the layers that find the source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Literal

from msgspec import Struct, field
from pydantic_core import ErrorDetails

from modelyard.core.errors import InvalidRequest

ProblemLevel = Literal["error", "unavailable", "warning"]
ConfigPath = tuple[str | int, ...]
Table = dict[str, Any]

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


# --- layers -----------------------------------------------------------------------------------------------------------


class ConfigLayer(Struct):
    """The settings of one source under our names. `original_paths` maps our paths to the ones that the source uses."""

    source: str
    data: Table
    original_paths: dict[ConfigPath, ConfigPath] = field(default_factory=dict)
    pool_models: set[str] = field(default_factory=set)  # defined under engine.models: not enabled by default
    variables: dict[ConfigPath, str] = field(default_factory=dict)  # environment variables by original path
    names_model: bool = False  # it sets model.model_name, which also defines that model

    def has(self, path: ConfigPath) -> bool:
        return path_exists(self.data, path)

    def original_path(self, path: ConfigPath) -> ConfigPath:
        for length in range(len(path), 0, -1):
            if (original := self.original_paths.get(path[:length])) is not None:
                return original + path[length:]
        return path

    def describe_path(self, path: ConfigPath) -> str:
        """The path as its author wrote it: a path in a file or the name of a variable."""
        original = self.original_path(path)
        prefixes = (original[:length] for length in range(len(original), 0, -1))
        return next((self.variables[p] for p in prefixes if p in self.variables), format_path(original))


def path_exists(data: Any, path: ConfigPath) -> bool:
    for key in path:
        keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
        if key not in keys:
            return False
        data = data[key]
    return True


def problem_at(
    layers: Sequence[ConfigLayer], path: ConfigPath, message: str, level: ProblemLevel = "error"
) -> ConfigProblem:
    """A problem with the source and the path of the last layer that sets `path`, or its nearest parent."""
    for length in range(len(path), 0, -1):
        for layer in reversed(layers):
            if layer.has(path[:length]):
                return ConfigProblem(layer.source, layer.describe_path(path), message, level)
    return ConfigProblem(layers[-1].source if layers else "", format_path(path), message, level)
