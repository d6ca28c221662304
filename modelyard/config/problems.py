"""Configuration problems, each with a source, a path in it and a message; and the layers that find the source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, field
from pydantic_core import ErrorDetails

from modelyard.core.errors import InvalidRequest

if TYPE_CHECKING:
    from modelyard.config.settings import LoadedConfig

ProblemLevel = Literal["error", "unavailable", "warning", "note"]
ConfigPath = tuple[str | int, ...]
Table = dict[str, Any]

_BARE_KEY = re.compile(r"[\w/@:+-]+")
_MAX_QUOTED = 60


class ConfigProblem(Struct, frozen=True):
    """An `error` stops loading, `unavailable` concerns a model that cannot run on this machine, a `warning` is advice,
    a `note` concerns a model that is not in use. `line` counts from 1; 0 means unknown."""

    source: str
    path: str
    message: str
    level: ProblemLevel = "error"
    line: int = 0

    def __str__(self) -> str:
        source = f"{self.source}:{self.line}" if self.line else self.source
        return ": ".join(part for part in (source, self.path, self.message) if part)


class ConfigError(InvalidRequest):
    """The configuration cannot be used. `problems` holds every error, not only the first; `rest` is what remains of the
    configuration without the invalid values."""

    default_code = "invalid_config"

    def __init__(self, problems: Sequence[ConfigProblem], rest: LoadedConfig | None = None) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)
        self.rest = rest


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


# the type of pydantic's error → what the value must be; for others its own message
_EXPECTED = {
    **dict.fromkeys(("int_type", "int_parsing", "int_parsing_size", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a table of settings"),
    **dict.fromkeys(("byte_size", "byte_size_unit"), 'a size such as "24GiB", or a number of bytes'),
    "string_type": "a text in quotes",
    "list_type": "a list",
    "string_too_short": "a text that is not empty",
}


def validation_message(error: ErrorDetails, *, secret: bool = False) -> str:
    """One of pydantic's validation errors as a sentence. A `secret` value is not quoted."""
    return validation_messages([error], secret=secret)


def validation_messages(errors: Sequence[ErrorDetails], *, secret: bool = False) -> str:
    """Several errors of one value, which has alternative types, as a sentence."""
    error = errors[0]
    match error["type"]:
        case "missing":
            return "is missing; it has no default."
        case "extra_forbidden":
            return "unknown key."
        case "value_error" | "assertion_error":
            return error["msg"].split(", ", 1)[-1] + "."
    alternatives = list(dict.fromkeys(map(_expected, errors)))
    expected = " or ".join([alternatives[0], *(text.removeprefix("must be ") for text in alternatives[1:])])
    value = repr(error["input"])
    got = "" if secret else f", got {value if len(value) <= _MAX_QUOTED else f'{value[:_MAX_QUOTED]}…'}"
    words = re.findall(r"'([^']+)'", expected) if isinstance(error["input"], str) and not secret else []
    return f"{expected}{got}.{suggest(str(error['input']).lower(), words)}"


def _expected(error: ErrorDetails) -> str:
    if (known := _EXPECTED.get(error["type"])) is not None:
        return f"must be {known}"
    message = error["msg"].replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    return re.sub("^Input should be ", "must be ", message)


def errors_by_setting(
    errors: Iterable[ErrorDetails], data: Any, start: ConfigPath = ()
) -> dict[ConfigPath, list[ErrorDetails]]:
    """The errors by the path of their setting. Pydantic adds the alternatives of a type to the path; such errors are
    about one value."""
    found: dict[ConfigPath, list[ErrorDetails]] = {}
    for error in errors:
        path = (*start, *error["loc"])
        while len(path) > len(start) and error["type"] != "missing" and not path_exists(data, path):
            path = path[:-1]
        found.setdefault(path if len(path) > len(start) else (*start, *error["loc"]), []).append(error)
    return found


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
