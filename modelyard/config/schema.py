"""The JSON Schema of a configuration file, and the field tables of docs/config.md, from the settings classes.

`python -m modelyard.config.schema` prints the tables.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from modelyard import plugins
from modelyard.config.problems import ConfigPath
from modelyard.config.settings import FOREIGN_SECTIONS, Config, field_aliases, type_at, without_none
from modelyard.router.settings import CacheSettings, ModelSettings

# --- JSON Schema ------------------------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """All keys of all three styles. A model's table also has the fields of every engine in this build."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Modelyard configuration"
    for kind in (ModelSettings, CacheSettings):
        properties = schema["$defs"][kind.__name__]["properties"]
        for alias, name in field_aliases(kind).items():
            properties[alias] = properties[name] | {"description": f"Another name of {name}."}
    _add_engine_fields(schema)
    for section, keys in FOREIGN_SECTIONS.items():
        properties = {key: _property(path, schema) if path else {"type": "string"} for key, path in keys.items()}
        schema["properties"][section] = {"type": "object", "additionalProperties": False, "properties": properties}
    schema["properties"]["$schema"] = {"type": "string"}
    return schema


def _add_engine_fields(schema: dict[str, Any]) -> None:
    table = schema["$defs"]["ModelSettings"]
    table["additionalProperties"] = True  # fields of engines that this build lacks
    properties = table["properties"]
    for backend in plugins.names("engines"):
        try:
            options: type[BaseModel] = plugins.load("engines", backend).Options
        except plugins.MissingLibrary:
            continue  # its fields are unknown without its library; additional ones are accepted
        own = options.model_json_schema()
        schema["$defs"] |= own.get("$defs", {})
        for name, field in own.get("properties", {}).items():
            if name not in ModelSettings.model_fields:
                other = properties.get(name)  # another engine may use the name with a different type
                properties[name] = field if other in (None, field) else {"anyOf": [other, field]}


def _property(path: ConfigPath, schema: dict[str, Any]) -> dict[str, Any]:
    table = schema["$defs"][type_at(path[:-1]).__name__] if len(path) > 1 else schema
    found: dict[str, Any] = table["properties"][str(path[-1])]
    return found


# --- field tables -----------------------------------------------------------------------------------------------------

_TITLES = {"keys": "[[keys]]", "routes": "[[routes]]", "models": "[models.NAME]", "caches": "[caches.NAME]"}


def field_tables() -> str:
    """A table for the top level and one for each section."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    top = {name: info for name, info in Config.model_fields.items() if _section(info.annotation) is None}
    yield from ("### Top level", "", "Before the first section.", "", *field_rows(top), "")
    for name, info in Config.model_fields.items():
        if (section := _section(info.annotation)) is not None:
            yield from (f"### `{_TITLES.get(name, f'[{name}]')}`", "", info.description or "", "")
            yield from (*field_rows(section.model_fields, field_aliases(section)), "")


def _section(annotation: Any) -> type[BaseModel] | None:
    inner = get_args(annotation)[-1] if get_origin(annotation) in (dict, list) else annotation
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def field_rows(fields: Mapping[str, FieldInfo], aliases: Mapping[str, str] = {}) -> Iterator[str]:
    """The lines of one table; `aliases` maps other names to field names."""
    yield from ("| field | type | default | meaning |", "|---|---|---|---|")
    for name, info in fields.items():
        names = [name, *(alias for alias, field in aliases.items() if field == name)]
        shown = " or ".join(f"`{n}`" for n in names)
        yield f"| {shown} | {_type_name(info.annotation)} | {_default_value(info)} | {info.description} |"


def _type_name(annotation: Any) -> str:
    kind = without_none(annotation)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {_type_name(get_args(kind)[0])}"
    if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "table"
    return {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}.get(kind, "value")


def _default_value(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel | NoneType) or value in ({}, []):
        return ""
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    sys.stdout.write(field_tables())
