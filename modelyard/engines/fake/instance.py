"""A minimal JSON value that a JSON Schema accepts, so that clients' structured-output helpers work with the fake."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from modelyard.core.errors import InvalidRequest
from modelyard.engines.fake.sample import sample

Schema = dict[str, Any]

_FORMATS = {
    "date-time": "2026-01-01T00:00:00Z",
    "date": "2026-01-01",
    "time": "00:00:00Z",
    "duration": "P1D",
    "email": "user@example.com",
    "hostname": "example.com",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_NODES = 10_000


def instance(schema: Schema | bool) -> Any:
    """Raises InvalidRequest where a schema is none, asks for something endless, or refers to what it does not hold."""
    try:
        return _Maker(schema if isinstance(schema, dict) else {}).make(schema, ())
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise InvalidRequest(f"the JSON schema is not valid: {error}", code="invalid_json_schema") from None


class _Endless(InvalidRequest):
    default_code = "invalid_json_schema"


def _bounded(count: int) -> int:
    if count > _NODES:
        raise _Endless("the JSON schema asks for a value that is too large to make up")
    return count


class _Maker:
    def __init__(self, root: Schema) -> None:
        self._root = root
        self._made = 0
        self._kinds: dict[str, Callable[[Schema, tuple[str, ...]], Any]] = {
            "object": self._object,
            "array": self._array,
            "string": _string,
            "integer": lambda schema, _: math.ceil(_number(schema, 1)),
            "number": lambda schema, _: _number(schema, 0),
            "boolean": lambda *_: True,
            "null": lambda *_: None,
        }

    def make(self, schema: Schema | bool, path: tuple[str, ...]) -> Any:
        """`path` holds the references being followed: coming back to one of them would never end."""
        self._made += 1
        _bounded(self._made)
        if not isinstance(schema, dict):
            return "text"
        if "$ref" in schema:
            return self._follow(schema, path)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return schema["enum"][0]
        return self._combined(schema, path)

    def _follow(self, schema: Schema, path: tuple[str, ...]) -> Any:
        ref = schema["$ref"]
        if ref in path:
            raise _Endless(f"every value of {ref} in the JSON schema holds another one: it never ends")
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        return self.make(_merge(self._find(ref), beside), (*path, ref))

    def _find(self, ref: str) -> Schema:
        at: Any = self._root
        for step in ref.removeprefix("#").strip("/").split("/"):
            key = step.replace("~1", "/").replace("~0", "~")
            at = at if key == "" else at.get(key) if isinstance(at, dict) else None
        if not isinstance(at, dict):
            raise InvalidRequest(f"the JSON schema refers to {ref}, which it does not hold", code="invalid_json_schema")
        return at

    def _combined(self, schema: Schema, path: tuple[str, ...]) -> Any:
        if all_of := schema.get("allOf"):
            rest = {key: value for key, value in schema.items() if key != "allOf"}
            return self.make(_merged(rest, [self._resolved(part) for part in all_of]), path)
        for word in ("anyOf", "oneOf"):
            if options := schema.get(word):
                rest = {key: value for key, value in schema.items() if key != word}
                return self._first(rest, options, path)
        return self._kinds[_kind(schema)](schema, path)

    def _resolved(self, schema: Schema) -> Schema:
        return self._find(schema["$ref"]) if "$ref" in schema else schema

    def _first(self, rest: Schema, options: Sequence[Schema], path: tuple[str, ...]) -> Any:
        problem: InvalidRequest = _Endless("the JSON schema has an empty choice")
        for option in options:
            try:
                return self.make(_merge(rest, option), path)
            except _Endless as error:
                problem = error
        raise problem

    def _object(self, schema: Schema, path: tuple[str, ...]) -> Any:
        properties = schema.get("properties", {})
        made = {name: self.make(properties.get(name, {}), path) for name in map(_word, schema.get("required", ()))}
        missing = _bounded(max(0, schema.get("minProperties", 0) - len(made)))
        spare = [name for name in properties if name not in made]
        spare += [f"key{i}" for i in range(missing)] if len(spare) < missing else []
        return made | {name: self.make(properties.get(name, {}), path) for name in spare[:missing]}

    def _array(self, schema: Schema, path: tuple[str, ...]) -> Any:
        first = list(schema.get("prefixItems", ()))
        count = _bounded(max(schema.get("minItems", 0), 0))
        kinds = (first + [schema.get("items", {})] * max(0, count - len(first)))[: max(count, len(first))]
        kinds = kinds[: schema.get("maxItems", len(kinds))]
        if not schema.get("uniqueItems"):
            return [self.make(kind, path) for kind in kinds]
        return [_other(self._resolved(kind), self.make(kind, path), i) for i, kind in enumerate(kinds)]


def _kind(schema: Schema) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0] if kind else None
    if isinstance(kind, str) and kind in ("object", "array", "string", "integer", "number", "boolean", "null"):
        return kind
    if "properties" in schema or "required" in schema:
        return "object"
    if "items" in schema or "prefixItems" in schema:
        return "array"
    return "number" if "minimum" in schema or "maximum" in schema else "string"


def _string(schema: Schema, _: tuple[str, ...]) -> str:
    if schema.get("format") in _FORMATS:
        return _FORMATS[schema["format"]]
    if "pattern" in schema:
        return sample(schema["pattern"])
    text = "text"[: schema.get("maxLength", 4)]
    return text.ljust(_bounded(schema.get("minLength", 0)), "x")


def _number(schema: Schema, step: int) -> float | int:
    """The lowest allowed, or 0. `step` is what lies above an exclusive bound: 1 for integers."""
    low = schema.get("minimum")
    if "exclusiveMinimum" in schema:
        low = math.floor(schema["exclusiveMinimum"]) + 1 if step else _above(schema)
    high = schema.get("maximum", schema.get("exclusiveMaximum", math.inf) - (step or 1))
    value: float | int = low if low is not None else min(0, high)
    multiple: float | int | None = schema.get("multipleOf")
    return math.ceil(value / multiple) * multiple if multiple else value


def _above(schema: Schema) -> float:
    low = schema["exclusiveMinimum"]
    high = min(schema.get("maximum", math.inf), schema.get("exclusiveMaximum", math.inf))
    return float(low + 1 if high > low + 1 else (low + high) / 2)


def _other(schema: Schema, value: Any, nth: int) -> Any:
    """The n-th of several values that must differ."""
    if "enum" in schema:
        return schema["enum"][nth % len(schema["enum"])]
    if isinstance(value, bool):
        return nth % 2 == 0
    if isinstance(value, int | float):
        return value + nth * schema.get("multipleOf", 1)
    return f"{value[: len(value) - len(str(nth))]}{nth}" if isinstance(value, str) and nth else value


def _merge(base: Schema, over: Schema | bool) -> Schema:
    if not isinstance(over, dict):
        return base
    merged = base | over
    if "properties" in base and "properties" in over:
        merged["properties"] = base["properties"] | over["properties"]
    if "required" in base and "required" in over:
        merged["required"] = list(dict.fromkeys([*base["required"], *over["required"]]))
    return merged


def _merged(base: Schema, parts: Sequence[Schema]) -> Schema:
    for part in parts:
        base = _merge(base, part)
    return base


def _word(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is not the name of a property")
    return name
