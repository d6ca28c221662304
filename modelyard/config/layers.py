"""Layers of raw settings: merging them, and finding the layer that a value came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from modelyard.config.problems import Level, Loc, Problem, spell

Table = dict[str, Any]


class Layer(Struct):
    """One source. `written` tells what its author called a value that now has our name."""

    source: str
    data: Table
    written: dict[Loc, Loc] = field(default_factory=dict)
    pool_models: set[str] = field(default_factory=set)  # models defined under engine.models: not enabled by default
    variables: dict[Loc, str] = field(default_factory=dict)  # by the path that each variable spells
    names_model: bool = False  # it said model.model_name, which also brings that model into being

    def holds(self, loc: Loc) -> bool:
        return reaches(self.data, loc)

    def original(self, loc: Loc) -> Loc:
        for cut in range(len(loc), 0, -1):
            if (old := self.written.get(loc[:cut])) is not None:
                return old + loc[cut:]
        return loc

    def spell(self, loc: Loc) -> str:
        """The place in its author's words: a path in a file, the name of a variable."""
        path = self.original(loc)
        cuts = (path[:cut] for cut in range(len(path), 0, -1))
        return next((self.variables[cut] for cut in cuts if cut in self.variables), spell(path))


def reaches(data: Any, loc: Loc) -> bool:
    for key in loc:
        inside = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
        if key not in inside:
            return False
        data = data[key]
    return True


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Table:
    """Tables merge key by key; anything else, lists too, is replaced as a whole."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(value, dict):
            merged[key] = merge(old if isinstance(old, dict) else {}, value)
        else:
            merged[key] = value
    return merged


def merge_all(layers: Iterable[Layer]) -> Table:
    merged: Table = {}
    for layer in layers:
        merged = merge(merged, layer.data)
    return merged


def problem_at(layers: Sequence[Layer], loc: Loc, message: str, level: Level = "error") -> Problem:
    """A problem in the words of the layer that holds `loc`, or the nearest place above it; the last layer wins."""
    for cut in range(len(loc), 0, -1):
        for layer in reversed(layers):
            if layer.holds(loc[:cut]):
                return Problem(layer.source, layer.spell(loc), message, level)
    return Problem(layers[-1].source if layers else "", spell(loc), message, level)
