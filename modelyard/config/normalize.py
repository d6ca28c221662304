"""Converts the three styles of configuration to ours, before validation.

The llama-bridge style is ours. The llm-pool style uses `service`, `engine` and `model_path`; the infer-server style
uses `model.model_name` and `model.tokenizer_path`. `resolve_defaults` handles what depends on several sources: one may
name the model, another its tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from modelyard.config.problems import ConfigLayer, ConfigPath, ConfigProblem, Table, format_path, problem_at, suggest
from modelyard.config.settings import FOREIGN_SECTIONS, field_aliases, infer_backend, keys_by_section
from modelyard.library.model_files import candidate_paths
from modelyard.router.settings import CacheSettings, ModelSettings


def normalize_layer(
    source: str, data: Table, variables: dict[ConfigPath, str] | None = None
) -> tuple[ConfigLayer, list[ConfigProblem]]:
    """The layer of one source under our names, and its unknown or duplicate keys."""
    layer = ConfigLayer(source, deepcopy(data), variables=variables or {})
    problems = [*_move_foreign_sections(layer), *_move_aliases(layer), *_drop_unknown_sections(layer)]
    return layer, problems


def _move_foreign_sections(layer: ConfigLayer) -> Iterator[ConfigProblem]:
    for section, keys in FOREIGN_SECTIONS.items():
        table = layer.data.get(section)
        if table is None:
            layer.data.pop(section, None)
        elif not isinstance(table, dict):
            del layer.data[section]
            yield ConfigProblem(layer.source, section, f"must be a table with {', '.join(keys)}")
        else:
            yield from _move_foreign_keys(layer, section, table)


def _move_foreign_keys(layer: ConfigLayer, section: str, table: Table) -> Iterator[ConfigProblem]:
    known = FOREIGN_SECTIONS[section]
    for key in list(table):
        if key not in known:
            value = table.pop(key)
            means_models = isinstance(value, dict) and section == "model"
            hint = f" Did you mean 'models.{key}'?" if means_models else suggest(key, known)
            yield ConfigProblem(layer.source, format_path((section, key)), f"unknown key.{hint}")
        elif (target := known[key]) is not None:
            value = table.pop(key)
            if (section, key) == ("engine", "models") and isinstance(value, dict):
                for name, model in value.items():
                    layer.pool_models.add(name)
                    yield from _move(layer, (section, key, name), (*target, name), model)
            else:
                layer.names_model |= (section, key) == ("model", "model_name") and value is not None
                yield from _move(layer, (section, key), target, value)
    if not table:
        layer.data.pop(section, None)


def _move(layer: ConfigLayer, old: ConfigPath, new: ConfigPath, value: Any) -> Iterator[ConfigProblem]:
    table: Any = layer.data
    for key in new[:-1]:
        table = table.setdefault(key, {}) if isinstance(table, dict) else None
    if not isinstance(table, dict) or new[-1] in table:
        message = f"is given twice: {format_path(new)} means the same. Keep one of them."
        yield ConfigProblem(layer.source, format_path(old), message)
        return
    table[new[-1]] = value
    layer.original_paths[new] = old


def _move_aliases(layer: ConfigLayer) -> Iterator[ConfigProblem]:
    for section, kind in (("models", ModelSettings), ("caches", CacheSettings)):
        aliases, tables = field_aliases(kind), layer.data.get(section)
        for name, table in tables.items() if isinstance(tables, dict) else ():
            for alias in [key for key in table if key in aliases] if isinstance(table, dict) else ():
                old = (*layer.original_path((section, name)), alias)
                yield from _move(layer, old, (section, name, aliases[alias]), table.pop(alias))


def _drop_unknown_sections(layer: ConfigLayer) -> Iterator[ConfigProblem]:
    layer.data.pop("$schema", None)  # editors write it to find the schema
    known = keys_by_section()
    for key in [key for key in layer.data if key not in known]:
        del layer.data[key]
        owners = [section for section, keys in known.items() if key in keys]
        hint = f" It belongs into [{owners[0]}]." if owners else suggest(key, known)
        yield ConfigProblem(layer.source, key, f"unknown key.{hint}")


def resolve_defaults(merged: Table, layers: Sequence[ConfigLayer]) -> list[ConfigProblem]:
    """Set what depends on all sources: the named model, `enabled`, backends, and the dialect of llm-pool's clients.
    Changes `merged`."""
    engine, model = merged.pop("engine", {}), merged.pop("model", {})
    models = merged.setdefault("models", {})
    if not isinstance(models, dict):
        return []
    problems = list(_resolve_named_model(merged, model, layers))
    http = merged.setdefault("http", {})
    if isinstance(http, dict) and any(layer.pool_models for layer in layers):
        http.setdefault("responses_dialect", "pool")
    scheduler = merged.get("scheduler")
    is_gateway = isinstance(scheduler, dict) and bool(scheduler.get("endpoint"))
    for name, table in models.items():
        if not isinstance(table, dict):
            continue
        if table.get("enabled") is None:
            # The source that defines a model decides; a later one only overrides some of its fields.
            first = next((layer for layer in layers if layer.has(("models", name))), None)
            table["enabled"] = first is None or name not in first.pool_models
        if isinstance(tokens := table.get("exllama_cache_size"), int) and not _has_cache(merged, name):
            table.setdefault("n_ctx", tokens - 1)  # llm-pool has no other window; one token is the engine's own
        if table.get("backend") is None:
            default = engine.get("backend")
            table["backend"] = default if default is not None else infer_backend(table.get("path"))
        if table["backend"] is None and not (is_gateway and table.get("path") is None):  # its scheduler has it
            problems.append(problem_at(layers, ("models", name, "backend"), _no_backend(table.get("path"))))
    return problems


def _has_cache(merged: Table, model: str) -> bool:
    caches = merged.get("caches")
    tables = caches.values() if isinstance(caches, dict) else ()
    return any(isinstance(cache, dict) and cache.get("model") == model for cache in tables)


def _no_backend(path: Any) -> str:
    hint = "Set backend, or engine.backend for all models."
    if not isinstance(path, str):
        return f"neither backend nor path is set, so no engine can be chosen. {hint}"
    if not any(found.exists() for found in candidate_paths(path)):
        return f"no engine is set, and there is no file or folder {path!r} that would imply one. {hint}"
    return f"no engine is set, and {path!r} does not imply one: it is no GGUF or CTranslate2 model. {hint}"


def _resolve_named_model(merged: Table, model: Table, layers: Sequence[ConfigLayer]) -> Iterator[ConfigProblem]:
    models, name = merged["models"], merged.get("default_model")
    name = _model_with_alias(models, name) or name
    if isinstance(name, str) and name not in models and any(layer.names_model for layer in layers):
        models[name] = {}
    if (path := model.get("tokenizer_path")) is None:
        return
    if name is None and len(models) == 1:
        name = next(iter(models))
    if isinstance(name, str) and isinstance(models.get(name), dict):
        models[name]["tokenizer_path"] = path
    else:
        message = "applies to no model. Set model.model_name too."
        yield problem_at(layers, ("model", "tokenizer_path"), message)


def _model_with_alias(models: Table, alias: Any) -> str | None:
    for name, table in models.items():
        aliases = table.get("aliases") if isinstance(table, dict) else None
        if alias is not None and alias in (aliases if isinstance(aliases, list) else [aliases]):
            return name
    return None
