"""The shape of the settings as data: which keys exist where, under which other names."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel

from modelyard.config.problems import Loc
from modelyard.config.root import Config

# Sections of the two other styles, and where their keys live with us. A target of None is settled after merging.
FOREIGN: Final[dict[str, dict[str, Loc | None]]] = {
    "service": {"host": ("http", "host"), "port": ("http", "port"), "log_level": ("log", "level")},
    "engine": {"backend": None, "decoding": ("decoding",), "models": ("models",)},
    "model": {"model_name": ("default_model",), "tokenizer_path": None},
}


def bare(annotation: Any) -> Any:
    """The type without `| None`."""
    if get_origin(annotation) in (Union, UnionType):
        rest = [arg for arg in get_args(annotation) if arg is not NoneType]
        return rest[0] if len(rest) == 1 else annotation
    return annotation


def below(annotation: Any, key: str | int) -> Any:
    """The type of what lies under `key`, or None where nothing does."""
    kind = bare(annotation)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        found = kind.model_fields.get(str(key))
        return found.annotation if found else None
    if get_origin(kind) in (dict, list):
        return get_args(kind)[-1]
    return None


def at(loc: Loc) -> Any:
    kind: Any = Config
    for key in loc:
        kind = below(kind, key)
    return bare(kind)


def aliases(kind: type[BaseModel]) -> dict[str, str]:
    """Other names of its fields, each with the field's own."""
    return {
        str(other): name
        for name, info in kind.model_fields.items()
        if isinstance(info.validation_alias, AliasChoices)
        for other in info.validation_alias.choices
        if other != name
    }


def keys_of(kind: Any) -> Iterator[str]:
    """Every key that a section takes, aliases included."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield from kind.model_fields
        yield from aliases(kind)


def section_keys() -> dict[str, list[str]]:
    """Fields by section, of every style; what has no fields of its own (lists, tables by name) has none here."""
    ours = {name: list(keys_of(bare(info.annotation))) for name, info in Config.model_fields.items()}
    return ours | {name: list(moves) for name, moves in FOREIGN.items()}
