"""Three styles of names become one, before anything is validated.

llama-bridge style is ours already. llm-pool style says `service`, `engine` and `model_path`; infer-server style says
`model.model_name` and `model.tokenizer_path`. What one source alone cannot settle (it may name the model, another the
tokenizer) waits until all are merged: `settle`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from modelyard.config.engine_options import infer_backend
from modelyard.config.problems import ConfigPath, ConfigProblem, format_path, suggest
from modelyard.config.settings import FOREIGN_SECTIONS, field_aliases, keys_by_section
from modelyard.config.sources import ConfigLayer, Table, problem_at
from modelyard.router.settings import CacheSettings, ModelSettings


def normalize_layer(
    source: str, raw: Table, variables: dict[ConfigPath, str] | None = None
) -> tuple[ConfigLayer, list[ConfigProblem]]:
    """The layer of one source under our names, and what could not be understood."""
    layer = ConfigLayer(source, deepcopy(raw), variables=variables or {})
    problems = [*_foreign_sections(layer), *_aliases(layer), *_unknown_sections(layer)]
    return layer, problems


def _foreign_sections(layer: ConfigLayer) -> Iterator[ConfigProblem]:
    for section, moves in FOREIGN_SECTIONS.items():
        table = layer.data.get(section)
        if table is None:
            layer.data.pop(section, None)
        elif not isinstance(table, dict):
            del layer.data[section]
            yield ConfigProblem(layer.source, section, f"must be a table with {', '.join(moves)}")
        else:
            yield from _foreign_keys(layer, section, table)


def _foreign_keys(layer: ConfigLayer, section: str, table: Table) -> Iterator[ConfigProblem]:
    moves = FOREIGN_SECTIONS[section]
    for key in list(table):
        if key not in moves:
            value = table.pop(key)
            plural = isinstance(value, dict) and section == "model"
            hint = f" Did you mean 'models.{key}'?" if plural else suggest(key, moves)
            yield ConfigProblem(layer.source, format_path((section, key)), f"unknown key.{hint}")
        elif (target := moves[key]) is not None:
            yield from _move_section(layer, (section, key), target, table.pop(key))
    if not table:
        layer.data.pop(section, None)


def _move_section(layer: ConfigLayer, old: ConfigPath, new: ConfigPath, value: Any) -> Iterator[ConfigProblem]:
    layer.names_model |= old == ("model", "model_name") and value is not None
    if old != ("engine", "models") or not isinstance(value, dict):
        yield from _move(layer, old, new, value)
        return
    for name, model in value.items():
        layer.pool_models.add(name)
        yield from _move(layer, (*old, name), (*new, name), model)


def _move(layer: ConfigLayer, old: ConfigPath, new: ConfigPath, value: Any) -> Iterator[ConfigProblem]:
    place: Any = layer.data
    for key in new[:-1]:
        place = place.setdefault(key, {}) if isinstance(place, dict) else None
    if not isinstance(place, dict) or new[-1] in place:
        yield ConfigProblem(
            layer.source, format_path(old), f"is given twice: {format_path(new)} means the same. Keep one of them."
        )
        return
    place[new[-1]] = value
    layer.written[new] = old


def _aliases(layer: ConfigLayer) -> Iterator[ConfigProblem]:
    for section, kind in (("models", ModelSettings), ("caches", CacheSettings)):
        tables = layer.data.get(section)
        for name, table in tables.items() if isinstance(tables, dict) else ():
            for other in field_aliases(kind).keys() & table.keys() if isinstance(table, dict) else ():
                here = layer.original((section, name))
                value = table.pop(other)
                yield from _move(layer, (*here, other), (section, name, field_aliases(kind)[other]), value)


def _unknown_sections(layer: ConfigLayer) -> Iterator[ConfigProblem]:
    known = keys_by_section()
    for key in [key for key in layer.data if key not in known and key != "$schema"]:
        del layer.data[key]
        owners = [section for section, keys in known.items() if key in keys]
        hint = f" It belongs into [{owners[0]}]." if owners else suggest(key, known)
        yield ConfigProblem(layer.source, key, f"unknown key.{hint}")
    layer.data.pop("$schema", None)  # editors put it there to find the schema


def resolve_defaults(merged: Table, layers: Sequence[ConfigLayer]) -> list[ConfigProblem]:
    """Fill in what only all sources together tell: the named model, backends, what is enabled. Changes `merged`."""
    engine, model = merged.pop("engine", {}), merged.pop("model", {})
    models = merged.setdefault("models", {})
    if not isinstance(models, dict):
        return []
    problems = list(_settle_named(merged, model, layers))
    tables = {name: table for name, table in models.items() if isinstance(table, dict)}
    _settle_enabled(tables, layers)
    return problems + list(_settle_backends(tables, engine.get("backend"), layers))


def _settle_named(merged: Table, model: Table, layers: Sequence[ConfigLayer]) -> Iterator[ConfigProblem]:
    models, name = merged["models"], merged.get("default_model")
    name = _by_alias(models, name) or name
    if isinstance(name, str) and name not in models and any(layer.names_model for layer in layers):
        models[name] = {}
    if (path := model.get("tokenizer_path")) is None:
        return
    if name is None and len(models) == 1:
        name = next(iter(models))
    if isinstance(name, str) and isinstance(models.get(name), dict):
        models[name]["tokenizer_path"] = path
    else:
        yield problem_at(layers, ("model", "tokenizer_path"), "whose tokenizer is it? Set model.model_name too.")


def _by_alias(models: Table, alias: Any) -> str | None:
    for name, table in models.items():
        listed = table.get("aliases") if isinstance(table, dict) else None
        if alias is not None and alias in (listed if isinstance(listed, list) else [listed]):
            return name
    return None


def _settle_enabled(models: dict[str, Table], layers: Sequence[ConfigLayer]) -> None:
    for name, table in models.items():
        if table.get("enabled") is None:
            # The source that brings a model in decides; a later one only overrides parts of it.
            first = next((layer for layer in layers if layer.holds(("models", name))), None)
            table["enabled"] = first is None or name not in first.pool_models


def _settle_backends(models: dict[str, Table], general: Any, layers: Sequence[ConfigLayer]) -> Iterator[ConfigProblem]:
    for name, table in models.items():
        if table.get("backend") is None:
            table["backend"] = general if general is not None else infer_backend(table.get("path"))
        if table["backend"] is None:
            message = "no engine is named and path does not tell one. Set backend, here or for all in engine.backend."
            yield problem_at(layers, ("models", name, "backend"), message)
