"""Google's schemas ⇄ JSON Schema, and its JSON with field names in snake case.

Google's `Schema` is OpenAPI's: types in capitals, `nullable`, integers as strings, and `propertyOrdering`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from modelyard.protocols.common.json import decode, encode

_INTEGERS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_TYPES = ("string", "number", "integer", "boolean", "array", "object", "null")
_DROPPED = frozenset({"nullable", "propertyOrdering", "property_ordering", "example"})
_SNAKE = {
    "any_of": "anyOf",
    "min_items": "minItems",
    "max_items": "maxItems",
    "min_length": "minLength",
    "max_length": "maxLength",
    "min_properties": "minProperties",
    "max_properties": "maxProperties",
    "additional_properties": "additionalProperties",
}


def read_schema(schema: Any) -> Any:
    """A JSON schema. What is one already stays the same."""
    if not isinstance(schema, dict):
        return schema
    out: dict[str, Any] = {}
    for given, value in schema.items():
        name = str(_SNAKE.get(given, given))
        if name == "type":
            out[name] = _read_type(value)
        elif name in ("properties", "$defs", "defs") and isinstance(value, dict):
            out[name] = {key: read_schema(one) for key, one in value.items()}
        elif name in ("items", "additionalProperties", "not"):
            out[name] = read_schema(value)
        elif name in ("anyOf", "allOf", "oneOf", "prefixItems") and isinstance(value, list):
            out[name] = [read_schema(one) for one in value]
        elif name in _INTEGERS and isinstance(value, str) and value.isdecimal():
            out[name] = int(value)
        elif name not in _DROPPED:
            out[name] = value
    _order_properties(out, schema.get("propertyOrdering") or schema.get("property_ordering"))
    return _nullable(out) if schema.get("nullable") is True else out


def _read_type(value: Any) -> Any:
    if isinstance(value, list):
        return [_read_type(one) for one in value]
    return value.lower() if isinstance(value, str) and value.lower() in _TYPES else value


def _order_properties(schema: dict[str, Any], order: Any) -> None:
    """The model writes properties in the order of the schema."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and isinstance(order, list):
        first = [name for name in order if isinstance(name, str) and name in properties]
        schema["properties"] = {name: properties[name] for name in (*first, *(n for n in properties if n not in first))}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type")
    if "enum" in schema or not isinstance(kind, str):
        return {"anyOf": [schema, {"type": "null"}]}
    return schema | {"type": [kind, "null"]}


# --- field names in snake case ----------------------------------------------------------------------------------------

T = TypeVar("T")


@cache
def _names(cls: type) -> Mapping[str, tuple[str, inspect.Type]]:
    info = inspect.type_info(cls)
    if not isinstance(info, inspect.StructType):
        raise TypeError(f"{cls} is no Struct")
    return {field.name: (field.encode_name, field.type) for field in info.fields}


def decode_proto(decoder: msgspec.json.Decoder[T], cls: type[T], body: bytes) -> T:
    """Decode a body whose fields may be in camel or snake case, as protocol buffers in JSON. Only bodies with an
    underscore in a name of ours are read twice; the names in free JSON stay as they are."""
    names: tuple[bytes, ...] = _quoted_names(cls)  # type: ignore[arg-type]  # a class is hashable
    if any(name in body for name in names):
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the decoder says what is wrong
            body = encode(_camel(msgspec.json.decode(body), inspect.type_info(cls)))
    return decode(decoder, body)


@cache
def _quoted_names(cls: type) -> tuple[bytes, ...]:
    found: set[bytes] = set()
    seen: set[type] = set()

    def visit(kind: inspect.Type) -> None:
        for inner in _inner_types(kind):
            visit(inner)
        if isinstance(kind, inspect.StructType) and kind.cls not in seen:
            seen.add(kind.cls)
            for name, (wire, inner) in _names(kind.cls).items():
                if name != wire:
                    found.add(f'"{name}"'.encode())
                visit(inner)

    visit(inspect.type_info(cls))
    return tuple(found)


def _inner_types(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    if isinstance(kind, inspect.Metadata):
        return (kind.type,)
    if isinstance(kind, inspect.UnionType):
        return kind.types
    return (kind.item_type,) if isinstance(kind, inspect.ListType) else ()


def _camel(value: Any, kind: inspect.Type) -> Any:
    if isinstance(kind, inspect.StructType) and isinstance(value, dict):
        names = _names(kind.cls)
        by_wire = {wire: (wire, inner) for wire, inner in names.values()}
        out: dict[str, Any] = {}
        for key, one in value.items():
            wire, inner = by_wire.get(key) or names.get(key) or (key, inspect.AnyType())
            out[wire] = _camel(one, inner)
        return out
    if isinstance(kind, inspect.ListType) and isinstance(value, list):
        return [_camel(one, kind.item_type) for one in value]
    for inner in _inner_types(kind):
        if not isinstance(kind, inspect.ListType) and (changed := _camel(value, inner)) is not value:
            return changed
    return value
