"""The tables of fields for the documentation, made from the settings classes: `python -m modelyard.config.document`."""

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


def tables() -> str:
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
    yield from rows(fields, others)
    yield ""


def rows(fields: Mapping[str, FieldInfo], others: Mapping[str, str] = {}) -> Iterator[str]:
    """One table; `others` are further names of a field."""
    yield from ("| field | type | default | meaning |", "|---|---|---|---|")
    for name, info in fields.items():
        names = [name, *(other for other, own in others.items() if own == name)]
        spelled = " or ".join(f"`{n}`" for n in names)
        yield f"| {spelled} | {_type(info.annotation)} | {_default(info)} | {info.description} |"


def _type(annotation: Any) -> str:
    kind = without_none(annotation)
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if get_origin(kind) is list:
        return f"list of {_type(get_args(kind)[0])}"
    if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return "table"
    return {str: "text", int: "integer", float: "number", bool: "true or false", Path: "path"}.get(kind, "value")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "needed"
    value = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel | NoneType) or value in ({}, []):
        return ""
    return f"`{json.dumps(value)}`"


def main() -> None:
    sys.stdout.write(tables())


if __name__ == "__main__":
    main()
