"""The JSON Schema of a configuration file, for editors that complete and check while typing."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from modelyard import plugins
from modelyard.config.settings import FOREIGN_SECTIONS, Config, field_aliases, type_at
from modelyard.router.settings import CacheSettings, ModelSettings


def json_schema() -> dict[str, Any]:
    """All names of all three styles; a model's table also offers the fields of every engine in this build."""
    schema = Config.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Modelyard configuration"
    for kind in (ModelSettings, CacheSettings):
        _add_aliases(schema["$defs"][kind.__name__], kind)
    _add_engine_fields(schema)
    schema["properties"] |= {name: _foreign(name, schema) for name in FOREIGN_SECTIONS} | {
        "$schema": {"type": "string"}
    }
    return schema


def _add_aliases(table: dict[str, Any], kind: type[BaseModel]) -> None:
    for other, name in field_aliases(kind).items():
        table["properties"][other] = table["properties"][name] | {"description": f"Another name of {name}."}


def _add_engine_fields(schema: dict[str, Any]) -> None:
    table = schema["$defs"]["ModelSettings"]
    table["additionalProperties"] = True  # the fields of engines that this build does not have
    for backend in plugins.names("engines"):
        try:
            options: type[BaseModel] = plugins.load("engines", backend).Options
        except plugins.MissingLibrary:
            continue  # its fields are not known without its library, and additional ones are welcome anyway
        own = options.model_json_schema()
        schema["$defs"] |= own.get("$defs", {})
        for name, field in own.get("properties", {}).items():
            if name not in ModelSettings.model_fields:
                table["properties"][name] = _either(table["properties"].get(name), field)


def _either(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    """Two engines may give one name to different things."""
    return other if one is None or one == other else {"anyOf": [one, other]}


def _foreign(section: str, schema: dict[str, Any]) -> dict[str, Any]:
    text = {"type": "string"}
    moved = {key: _property(target, schema) if target else text for key, target in FOREIGN_SECTIONS[section].items()}
    return {"type": "object", "additionalProperties": False, "properties": moved}


def _property(loc: tuple[str | int, ...], schema: dict[str, Any]) -> dict[str, Any]:
    table = schema
    if len(loc) > 1:
        table = schema["$defs"][type_at(loc[:-1]).__name__]
    found: dict[str, Any] = table["properties"][str(loc[-1])]
    return found
