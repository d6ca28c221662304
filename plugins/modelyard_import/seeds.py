"""Configurations of Llama-Bridge, Infer Server and llm-pool: `modelyard serve` reads them as they are, too.

The import writes them under our names, with what these programs do and Modelyard does only if it is told to.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from modelyard.config.load import merge_tables
from modelyard.config.normalize import normalize_layer
from modelyard.config.problems import ConfigError, Table
from modelyard.config.sources import read_file
from modelyard.core.errors import InvalidRequest
from modelyard_import.draft import Draft

# What Infer Server's table of parameters says for a request that sets none.
_INFER_SERVER_DECODING = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 1024}


def source_name(table: Table) -> str:
    """The program whose configuration it is, by its sections."""
    if "engine" in table or "service" in table:
        return "llm-pool"
    model = table.get("model")
    if isinstance(model, dict) and model.keys() & {"model_name", "tokenizer_path"}:
        return "Infer Server"
    return "Llama-Bridge"


def read_seeds(files: Sequence[Path]) -> tuple[str, Draft]:
    """Of several files a later one overrides earlier ones, as local.json does with settings.json."""
    tables = [read_file(file) for file in files]
    name = next((found for found in map(source_name, tables) if found != "Llama-Bridge"), "Llama-Bridge")
    draft, pool_models = Draft(), set[str]()
    for file, table in zip(files, tables, strict=True):
        layer, problems = normalize_layer(str(file), table)
        if problems:
            raise ConfigError(problems)
        draft.data = merge_tables(draft.data, layer.data)
        pool_models |= layer.pool_models
    if not isinstance(draft.data.setdefault("models", {}), dict):
        raise InvalidRequest("models must be a table of models by name")
    _place_defaults(draft, pool_models)
    {"Llama-Bridge": _llama_bridge, "Infer Server": _infer_server, "llm-pool": _llm_pool}[name](draft)
    return name, draft


def _place_defaults(draft: Draft, pool_models: set[str]) -> None:
    """`engine.backend` and `model.tokenizer_path` are of no section of ours; llm-pool loads what is enabled only."""
    engine, model = draft.data.pop("engine", {}), draft.data.pop("model", {})
    name = draft.data.get("default_model")
    if isinstance(name, str) and name not in draft.data["models"]:
        draft.data["models"][name] = {}
    for model_name, table in draft.data["models"].items():
        if engine.get("backend") and not table.get("backend"):
            table["backend"] = engine["backend"]
        if model_name in pool_models:
            table.setdefault("enabled", False)
    if (path := model.get("tokenizer_path")) is not None:
        draft.set(path, "models", str(name), "tokenizer_path")
    draft.data = _without_null(draft.data)


def _without_null(value: Any) -> Any:
    """TOML has no null: it means that a key is not set."""
    if isinstance(value, dict):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, list) else value


def _llama_bridge(draft: Draft) -> None:
    for name, cache in draft.data.get("caches", {}).items():
        if "overflow" not in cache:
            cache["overflow"] = "strict"
            text = 'refused if prompt and max_tokens exceed n_ctx together, as before; "clamp" would shorten the answer'
            draft.tell("changed", ("caches", name, "overflow"), text)
    for name, model in draft.data["models"].items():
        if "tool_stream" not in model:
            model["tool_stream"] = False
            text = "a tool call is sent when it is complete, as before; true streams its arguments"
            draft.tell("changed", ("models", name, "tool_stream"), text)


def _infer_server(draft: Draft) -> None:
    draft.data["http"] = {"chat_dialect": "infer_server"} | draft.data.get("http", {})
    text = 'answers stream unless a client says "stream": false, and a failure is finish_reason "error", as before'
    draft.tell("changed", "http.chat_dialect", f'"infer_server": {text}; clients of OpenAI get their own defaults')
    draft.data["decoding"] = _INFER_SERVER_DECODING | draft.data.get("decoding", {})
    draft.tell("changed", "decoding", "the defaults of Infer Server's parameters, for requests that set none")
    if endpoint := draft.data.get("scheduler", {}).get("endpoint"):
        text = f"{endpoint} must be a Modelyard scheduler: start modelyard scheduler there, with the model in its file"
        draft.tell("to do", "scheduler.endpoint", text)


def _llm_pool(draft: Draft) -> None:
    draft.data["http"] = {"responses_dialect": "pool"} | draft.data.get("http", {})
    text = "clients that send neither OpenAI's nor the SDKs' headers get llm-pool's replies, with metrics, as before"
    draft.tell("changed", "http.responses_dialect", f'"pool": {text}')
    if "port" not in draft.data["http"]:
        draft.tell("changed", "service.port", "is not set: modelyard serve listens on 8000, or on --port")
    for name, model in draft.data["models"].items():
        size = model.get("exllama_cache_size")
        if size is not None and "n_ctx" not in model:
            draft.tell("changed", ("models", name, "exllama_cache_size"), f"{size} tokens are also the window")
