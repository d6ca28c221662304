"""Settings from environment variables: `MODELYARD_HTTP_PORT`, `MODELYARD_MODELS__DEMO__N_CTX`.

A name without `__` is a section and a field (or a top-level field); with `__` every part is a level. Lists are JSON or
separated by commas, tables are JSON. An empty value counts as not set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_origin

from msgspec import Struct
from pydantic import BaseModel

from modelyard.config.layers import Table
from modelyard.config.problems import Loc, Problem, suggest
from modelyard.config.shape import FOREIGN, at, keys_of, section_keys
from modelyard.router.settings import ModelSettings

PREFIX = "MODELYARD_"
SOURCE = "environment"
_NOT_SETTINGS = re.compile(r"MODELYARD_(GOLDEN|CACHE|WORKER_.*|URL|API_KEY|ADMIN_KEY)")
_NAMED = ("models", "caches")  # tables whose keys are chosen by the user


class Names(Struct, frozen=True):
    """The models and caches that files define: a variable's name cannot spell their case and punctuation."""

    models: Iterable[str] = ()
    caches: Iterable[str] = ()

    def find(self, section: str, spelled: str) -> str:
        known = self.caches if section == "caches" else self.models
        return next((name for name in known if _plain(name) == _plain(spelled)), spelled)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "_", name.lower())


class Variables(Struct):
    """What the variables say, in the names they use."""

    raw: Table
    names: dict[Loc, str]
    problems: list[Problem]


def read(env: Mapping[str, str], names: Names) -> Variables:
    found = Variables({}, {}, [])
    for name, value in sorted(env.items()):
        if not name.startswith(PREFIX) or _NOT_SETTINGS.fullmatch(name) or value == "":
            continue
        if (loc := _locate(name.removeprefix(PREFIX).lower(), names)) is None:
            message = f"unknown setting.{suggest(name, _known())}"
            found.problems.append(Problem(SOURCE, name, message))
        else:
            _put(found.raw, loc, _decode(value, _type_at(loc)))
            found.names[loc] = name
    return found


def _known() -> list[str]:
    sections = section_keys()
    single = [f"{section}_{key}" for section, keys in sections.items() for key in keys]
    return [PREFIX + name.upper() for name in [*single, *sections]]


def _locate(name: str, names: Names) -> Loc | None:
    if "__" in name:
        return _locate_levels(tuple(name.split("__")), names)
    sections = section_keys()
    if name in sections:
        return (name,)
    for section, keys in sections.items():
        if name.startswith(f"{section}_") and name.removeprefix(f"{section}_") in keys:
            return section, name.removeprefix(f"{section}_")
    return None


def _locate_levels(levels: tuple[str, ...], names: Names) -> Loc | None:
    if levels[0] == "engine" and levels[1] in ("models", "decoding"):
        inner = _locate_levels(levels[1:], names)  # these two are built like our own sections
        return ("engine", *inner) if inner else None
    if levels[0] in FOREIGN:
        return levels if len(levels) == 2 and levels[1] in FOREIGN[levels[0]] else None
    if levels[0] in _NAMED and len(levels) > 1:
        levels = (levels[0], names.find(levels[0], levels[1]), *levels[2:])
    return levels if _exists(levels) else None


def _exists(loc: Loc) -> bool:
    for depth, key in enumerate(loc):
        kind = at(loc[:depth])
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if str(key) not in keys_of(kind):
                return kind is ModelSettings  # the engine's own field, checked with the engine's Options
        elif get_origin(kind) is not dict:
            return False
    return True


def _type_at(loc: Loc) -> Any:
    """None for what has no fixed type: a foreign section's value, an engine's own field."""
    if loc[0] in FOREIGN:
        target = FOREIGN[str(loc[0])].get(str(loc[1])) if len(loc) > 1 else None
        return _type_at((*target, *loc[2:])) if target else None
    return at(loc)


def _decode(value: str, kind: Any) -> Any:
    if value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value  # a template or other text that happens to start like JSON
    if get_origin(kind) is list:
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _put(raw: Table, loc: Loc, value: Any) -> None:
    place = raw
    for key in loc[:-1]:
        if not isinstance(place.get(str(key)), dict):
            place[str(key)] = {}
        place = place[str(key)]
    last = str(loc[-1])
    held = place.get(last)
    place[last] = held | value if isinstance(held, dict) and isinstance(value, dict) else value


def keys(env: Mapping[str, str]) -> list[Table]:
    """The keys that two variables hold themselves. They add to the files' keys, where any other list replaces."""
    found = [("env", "MODELYARD_API_KEY", False), ("env-admin", "MODELYARD_ADMIN_KEY", True)]
    return [{"name": name, "env": variable, "admin": admin} for name, variable, admin in found if env.get(variable)]
