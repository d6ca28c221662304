"""Tools whose schema a vendor publishes and whose calls the client runs: a request names them by their type alone.

A local model is offered them as functions; an upstream of the vendor gets the client's entry (`Tool.vendor`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

_SHAPES: Mapping[str, dict[str, Any]] = {
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "value": {"type": ["string", "number", "boolean"]},
    "strings": {"type": "array", "items": {"type": "string"}},
    "variables": {"type": "object", "additionalProperties": {"type": "string"}},
    "point": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    "range": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    "region": {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 4},
}


class ClientTool(Struct, frozen=True):
    """What a model reads of such a tool."""

    name: str
    description: str
    parameters: dict[str, Any]


def schema(fields: str = "", **shapes: Any) -> dict[str, Any]:
    """An object with these fields: `path:string count?:integer`, where `?` marks an optional one. A shape is one of the
    common ones or among `shapes`, where a tuple lists the values of a string."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    for field in fields.split():
        name, _, shape = field.partition(":")
        if not name.endswith("?"):
            required.append(name)
        found = shapes.get(shape) or _SHAPES[shape]
        properties[name.removesuffix("?")] = {"type": "string", "enum": [*found]} if isinstance(found, tuple) else found
    made = {"type": "object", "properties": properties, "additionalProperties": False}
    return made | {"required": required} if required else made
