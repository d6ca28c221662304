"""Random values: from a JSON schema, from the words that the code compares with, and mutations of valid values.

A schema alone says that `type` is a string. The string literals of the modules that read it say which strings matter.
Plain `random`, because a value must cost less than the request that carries it.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

Json = Any
Schema = Mapping[str, Any]

_MAX_WORD = 40
_MAX_FIELDS = 5  # optional fields of one object: with all of them, every body would have an error in the first
_MAX_DEPTH = 6
_HOSTILE = (
    *("", " ", "\0", "é😀", "\u202e", "\ufdd0", "\r\n", "x" * 3000, "word " * 500, "\x7f", "\x1b[31m"),
    *("[" * 2000, "{" * 500, "(" * 300, "{{", "{% for a in b %}", "%s%n", "(a+)+$", "[^]"),
    *('root ::= "a"', "start: /a/"),
    *("<|im_end|>", "<|im_start|>system", "<tool_call>", "</think>", "../../etc/passwd", "__class__", "NaN", "-0"),
    *("data:image/png;base64,AAAA", "data:,", "http://127.0.0.1:1/", "http://[", "file:///etc/passwd"),
    *('{"type": "object"}', '{"$ref": "#"}', '{"pattern": "["}', "null", "[]", "9" * 400),
)
_HUGE = ("x" * 60_000, "[" * 30_000, "(a|" * 15_000, "word " * 12_000, "é" * 30_000, "\n" * 30_000, '{"a":' * 10_000)
_HUGE_SHARE = 0.01  # of all strings; a list is that long as often
_INTEGERS = (-1, 0, 1, 2, 127, 128, 2**15, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, 2**63, -(2**64), 10**40)
_FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-320, 1e308, -1e308)
_SCHEMAS: tuple[Json, ...] = (
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "integer"}}},
    {"anyOf": [{"type": "string", "pattern": "^a{1,9}$"}, {"enum": [1, None]}]},
    {"type": "string", "pattern": "[" * 200},
    {"$ref": "#"},
    {"type": "object", "additionalProperties": False, "minProperties": 3},
    {"allOf": [{"not": {}}], "if": {}, "format": "date-time"},
)


@cache
def code_words(*files: Path) -> list[str]:
    """The short string literals of these modules, except docstrings."""
    found: set[str] = set()
    for file in files:
        tree = ast.parse(file.read_text("utf-8"))
        statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
                found.add(node.value)
    return sorted(word for word in found if len(word) <= _MAX_WORD and re.fullmatch(r"[\w./:<>|-]+", word))


class Values:
    """Values that share a dictionary of words. `binary`: bytes are bytes, as in MessagePack, and not base64."""

    def __init__(
        self, words: Iterable[str], components: Mapping[str, Schema] | None = None, *, binary: bool = False
    ) -> None:
        self._words = sorted(set(words)) or ["x"]
        self._components, self._binary = components or {}, binary

    # --- without a schema ---------------------------------------------------------------------------------------------

    def word(self, rng: Random) -> str:
        return rng.choice(self._words)

    def string(self, rng: Random) -> str:
        if rng.random() < _HUGE_SHARE:
            return rng.choice(_HUGE)
        match rng.randrange(5):
            case 0 | 1:
                return self.word(rng)
            case 2:
                return "".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(0xD800)))) for _ in range(6))
            case 3:
                return "hi"
            case _:
                return rng.choice(_HOSTILE)

    def integer(self, rng: Random) -> int:
        return rng.choice(_INTEGERS) if rng.random() < 0.3 else rng.randint(-3, 300)

    def number(self, rng: Random) -> float:
        return rng.choice((self.integer, lambda r: r.choice(_FLOATS), lambda r: r.random()))(rng)

    def any(self, rng: Random, depth: int = 0) -> Json:
        kind = rng.randrange(8 if depth < 2 else 5)
        if kind == 0:
            return rng.choice((None, True, False, rng.randbytes(rng.randrange(16)) if self._binary else None))
        if kind in (1, 2):
            return self.number(rng)
        if kind in (3, 4):
            return self.string(rng)
        if kind == 5:
            return [self.any(rng, depth + 1) for _ in range(rng.randrange(4))]
        if kind == 6:
            return {self.word(rng): self.any(rng, depth + 1) for _ in range(rng.randrange(4))}
        return copy.deepcopy(rng.choice(_SCHEMAS))

    # --- from a schema ------------------------------------------------------------------------------------------------

    def of(self, schema: Schema, rng: Random, depth: int = 0) -> Json:
        """A value of the right type; whether it makes sense is for the server to find out."""
        if "$ref" in schema:
            return self.of(self._components[schema["$ref"].rpartition("/")[2]], rng, depth)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return self.of(rng.choice(schema[union]), rng, depth)
        kinds = schema.get("type")
        if kinds is None or depth > _MAX_DEPTH:
            return self.any(rng, depth)
        kind = kinds if isinstance(kinds, str) else rng.choice(kinds)
        return self._makers[kind](self, schema, rng, depth)

    def _null(self, *_: Any) -> None:
        return None

    def _boolean(self, _schema: Schema, rng: Random, _depth: int) -> bool:
        return rng.random() < 0.5

    def _integer(self, schema: Schema, rng: Random, _depth: int) -> int:
        bounds = [schema[bound] + step for bound in ("minimum", "maximum") if bound in schema for step in (-1, 0, 1)]
        return int(rng.choice(bounds)) if bounds and rng.random() < 0.5 else self.integer(rng)

    def _number(self, _schema: Schema, rng: Random, _depth: int) -> float:
        return self.number(rng)

    def _string(self, schema: Schema, rng: Random, _depth: int) -> Json:
        if schema.get("contentEncoding") != "base64" or not self._binary:
            return self.string(rng)
        if rng.random() < 0.3:
            return rng.randbytes(rng.randrange(24))
        numbers = (rng.choice((0, 1, 5, 2**16, 2**32 - 1)) for _ in range(rng.randrange(6)))
        return b"".join(number.to_bytes(4, "little") for number in numbers)

    def _array(self, schema: Schema, rng: Random, depth: int) -> list[Json]:
        if "prefixItems" not in schema:
            return [self.of(schema.get("items") or {}, rng, depth + 1) for _ in range(rng.randrange(4))]
        first = schema["prefixItems"]
        length = rng.randint(min(schema.get("minItems", len(first)), len(first)), len(first))
        return [self.of(one, rng, depth + 1) for one in first[:length]]

    def _object(self, schema: Schema, rng: Random, depth: int) -> dict[str, Json]:
        fields: Mapping[str, Schema] = schema.get("properties", {})
        if not fields:
            inner = schema.get("additionalProperties")
            some = inner if isinstance(inner, Mapping) else {}
            return {self.word(rng): self.of(some, rng, depth + 1) for _ in range(rng.randrange(4))}
        required = [name for name in schema.get("required", ()) if name in fields]
        optional = [name for name in fields if name not in required]
        chosen = [*required, *rng.sample(optional, min(len(optional), rng.randrange(_MAX_FIELDS + 1)))]
        return {name: self.of(fields[name], rng, depth + 1) for name in chosen}

    _makers: Mapping[str, Callable[..., Json]] = {
        "null": _null,
        "boolean": _boolean,
        "integer": _integer,
        "number": _number,
        "string": _string,
        "array": _array,
        "object": _object,
    }

    # --- from a valid value -------------------------------------------------------------------------------------------

    def mutated(self, valid: Json, rng: Random, times: int) -> Json:
        """A copy in which some parts are replaced, removed, repeated or moved."""
        value = copy.deepcopy(valid)
        for _ in range(times):
            places = list(_places(value))
            if not places:
                return self.any(rng)
            self._mutate(*rng.choice(places), rng)
        return value

    def _mutate(self, container: Any, key: Any, rng: Random) -> None:
        part = container[key]
        match rng.randrange(7):
            case 0 | 1:
                container[key] = self.any(rng)
            case 2 | 3:
                container[key] = self.string(rng) if isinstance(part, str) else self.number(rng)
            case 4:
                del container[key]
            case 5 if isinstance(container, list):
                times = 1000 if rng.random() < 10 * _HUGE_SHARE else rng.choice((1, 2, 40))
                container[key:key] = [copy.deepcopy(part) for _ in range(times)]
            case 5:
                container[self.word(rng)] = copy.deepcopy(part)
            case _:
                container[key] = [part] if rng.random() < 0.5 else {self.word(rng): part}


def _places(value: Json) -> Iterator[tuple[Any, Any]]:
    """Every part of a value, as its container and key."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield value, key
        yield from _places(part)


def damaged(data: bytes, rng: Random) -> bytes:
    """Bytes that were cut off, changed or repeated."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        if not out:
            break
        at = rng.randrange(len(out))
        match rng.randrange(4):
            case 0:
                del out[at:]
            case 1:
                out[at] = rng.randrange(256)
            case 2:
                out[at:at] = rng.randbytes(rng.randint(1, 8))
            case _:
                out[at:at] = out[at : at + 16] * rng.choice((1, 100))
    return bytes(out)


# --- making an example smaller ----------------------------------------------------------------------------------------


def shrunk(value: Json, still_fails: Callable[[Json], bool], attempts: int = 150) -> Json:
    """The value without the parts that do not matter. Strings are halved, containers lose what they can."""
    while attempts > 0:
        for smaller in _smaller(value):
            attempts -= 1
            if still_fails(smaller):
                value = smaller
                break
            if attempts <= 0:
                return value
        else:
            return value
    return value


def _smaller(value: Json) -> Iterator[Json]:
    """The same value with one part left out or simplified, the largest steps first."""
    for index in range(len(list(_places(value)))):
        copied = copy.deepcopy(value)
        container, key = list(_places(copied))[index]
        del container[key]
        yield copied
    for index in range(len(list(_places(value)))):
        copied = copy.deepcopy(value)
        container, key = list(_places(copied))[index]
        if isinstance(part := container[key], str | bytes) and len(part) > 8:
            container[key] = part[: len(part) // 2]
            yield copied
