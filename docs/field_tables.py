"""Prints the field tables of docs/config.md from the settings classes; tests check that the pages are current."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from modelyard.config.settings import Config, field_aliases, without_none

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
            yield from _inner_tables(name, section)


def _inner_tables(section: str, kind: type[BaseModel]) -> Iterator[str]:
    """The tables by name of a section."""
    for name, info in kind.model_fields.items():
        if get_origin(info.annotation) is dict and (inner := _section(info.annotation)) is not None:
            yield from (f"### `[{section}.{name}.NAME]`", "", info.description or "", "")
            yield from (*field_rows(inner.model_fields, field_aliases(inner)), "")


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
