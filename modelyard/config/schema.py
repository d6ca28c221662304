"""The JSON Schema of a configuration file, from the settings classes."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from modelyard import plugins
from modelyard.config.problems import ConfigPath
from modelyard.config.settings import FOREIGN_SECTIONS, Config, field_aliases, type_at
from modelyard.router.settings import CacheSettings, ModelSettings


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
