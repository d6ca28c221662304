"""The JSON Schema of a configuration file, for editors that complete and check while typing."""

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
from modelyard.config.settings import FOREIGN_SECTIONS, Config, field_aliases, type_at, without_none
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


# The tables of fields for the documentation, made from the settings classes: `python -m modelyard.config.schema`.

_TITLES = {"keys": "[[keys]]", "routes": "[[routes]]", "models": "[models.NAME]", "caches": "[caches.NAME]"}


def field_tables() -> str:
    """One table for each section, and one for what stands at the top."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    top = {name: info for name, info in Config.model_fields.items() if _section(info.annotation) is None}
    yield from _table("Top level", "What stands before the first section.", top, {})
    for name, info in Config.model_fields.items():
        if (section := _section(info.annotation)) is not None:
            title = f"`{_TITLES.get(name, f'[{name}]')}`"
            yield from _table(title, info.description or "", section.model_fields, field_aliases(section))


def _section(annotation: Any) -> type[BaseModel] | None:
    inner = get_args(annotation)[-1] if get_origin(annotation) in (dict, list) else annotation
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def _table(title: str, text: str, fields: dict[str, FieldInfo], others: dict[str, str]) -> Iterator[str]:
    yield from (f"### {title}", "", text, "")
    yield from field_rows(fields, others)
    yield ""


def field_rows(fields: Mapping[str, FieldInfo], others: Mapping[str, str] = {}) -> Iterator[str]:
    """One table; `others` are further names of a field."""
    yield from ("| field | type | default | meaning |", "|---|---|---|---|")
    for name, info in fields.items():
        names = [name, *(other for other, own in others.items() if own == name)]
        spelled = " or ".join(f"`{n}`" for n in names)
        yield f"| {spelled} | {_type(info.annotation)} | {_default_value(info)} | {info.description} |"


def _type(annotation: Any) -> str:
    kind = without_none(annotation)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {_type(get_args(kind)[0])}"
    if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "table"
    return {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}.get(kind, "value")


def _default_value(info: FieldInfo) -> str:
    if info.is_required():
        return "needed"
    value = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel | NoneType) or value in ({}, []):
        return ""
    return f"`{json.dumps(value)}`"


def main() -> None:
    sys.stdout.write(field_tables())


if __name__ == "__main__":
    main()
