"""LiteLLM's config.yaml: model_list becomes remote models, router settings become routes with fallbacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from modelyard.config.problems import Table
from modelyard.core.errors import InvalidRequest
from modelyard_import.draft import Draft, add_key

_FROM_ENVIRONMENT = "os.environ/"
# Providers with an API that Modelyard speaks itself: its kind, its address, the variable of its key.
_DIRECT: dict[str, tuple[str, str | None, str | None]] = {
    "openai": ("chat_completions", "https://api.openai.com/v1", "OPENAI_API_KEY"),
    "hosted_vllm": ("chat_completions", None, "HOSTED_VLLM_API_KEY"),
    "lm_studio": ("chat_completions", None, "LM_STUDIO_API_KEY"),
    "llamafile": ("chat_completions", "http://127.0.0.1:8080/v1", None),
    "anthropic": ("anthropic_messages", "https://api.anthropic.com", "ANTHROPIC_API_KEY"),
    "gemini": ("gemini", "https://generativelanguage.googleapis.com", "GEMINI_API_KEY"),
    "ollama": ("ollama", "http://127.0.0.1:11434", None),
    "ollama_chat": ("ollama", "http://127.0.0.1:11434", None),
    "groq": ("chat_completions", "https://api.groq.com/openai/v1", "GROQ_API_KEY"),
    "mistral": ("chat_completions", "https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
    "deepseek": ("chat_completions", "https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "openrouter": ("chat_completions", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
}
_DECODING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "max_tokens", "seed", "stop", "presence_penalty")},
    "frequency_penalty": "frequency_penalty",
    "max_completion_tokens": "max_tokens",
}


def is_litellm(table: Table) -> bool:
    return isinstance(table.get("model_list"), list)


def read_litellm(table: Table) -> Draft:
    draft, rest = Draft(), dict(table)
    router, settings = dict(rest.pop("router_settings", None) or {}), dict(rest.pop("litellm_settings", None) or {})
    groups = _groups(draft, rest.pop("model_list"), _common(router, settings))
    fallbacks = dict(_fallbacks(draft, router, settings))
    for name, models in groups.items():
        route: Table = {"match": name, "model": models[0], "allow_remote": True}
        if then := [*models[1:], *fallbacks.pop(name, [])]:
            route["fallback"] = then
        draft.add("routes", route)
    for name in fallbacks:
        draft.tell("dropped", "fallbacks", f"there is no model {name!r}")
    draft.tell("changed", "model_list", "requests may leave this machine: each route says allow_remote")
    _aliases(draft, groups, router.pop("model_group_alias", {}))
    if (strategy := router.pop("routing_strategy", None)) is not None:
        text = f"{strategy}: the first deployment answers, the others are fallbacks in their order"
        draft.tell("changed", "router_settings.routing_strategy", text)
    _general(draft, dict(rest.pop("general_settings", None) or {}))
    _logs(draft, settings)
    for name in rest.pop("environment_variables", None) or {}:
        draft.tell("to do", ("environment_variables", name), "set it in the environment of modelyard serve")
    for section, left in (("router_settings", router), ("litellm_settings", settings)):
        draft.drop_rest((section,), left)
    draft.drop_rest((), rest)
    draft.tell("changed", "the port", "LiteLLM listens on 4000 by default, modelyard serve on 8000 (or --port)")
    return draft


def _common(router: Table, settings: Table) -> Table:
    """Time limit and retries of every deployment that sets none."""
    found: Table = {}
    for key, names in (("timeout", ("timeout", "request_timeout")), ("max_retries", ("num_retries",))):
        for table in (settings, router):
            for name in names:
                if (value := table.pop(name, None)) is not None:
                    found[key] = value
    return found


def _groups(draft: Draft, entries: list[Table], common: Table) -> dict[str, list[str]]:
    """The models of each name: several deployments of one name become several models."""
    groups: dict[str, list[str]] = {}
    for index, entry in enumerate(entries):
        if (
            not isinstance(entry, dict)
            or not entry.get("model_name")
            or not isinstance(entry.get("litellm_params"), dict)
        ):
            raise InvalidRequest(f"model_list[{index}] needs model_name and litellm_params")
        name, setting = str(entry["model_name"]), f"model_list[{index}]"
        if "*" in name or "*" in str(entry["litellm_params"].get("model")):
            draft.tell("dropped", setting, f"{name}: a wildcard has no counterpart; name each model")
            continue
        models = groups.setdefault(name, [])
        models.append(name if not models else f"{name}-{len(models) + 1}")
        if len(models) == 2:
            draft.tell(
                "changed", setting, f"{name} has several deployments: not balanced, but fallbacks in their order"
            )
        draft.set(_model(draft, setting, entry, common), "models", models[-1])
    if not groups:
        raise InvalidRequest("model_list has no model that can be imported")
    return groups


def _model(draft: Draft, setting: str, entry: Table, common: Table) -> Table:
    params = common | entry["litellm_params"]
    provider, _, upstream = (
        str(params.pop("model", "")).rpartition("/")
        if "/" in str(params.get("model"))
        else ("openai", "", str(params.pop("model", "")))
    )
    if provider.count("/"):  # openai/facebook/opt-125m
        first, _, owner = provider.partition("/")
        provider, upstream = first, f"{owner}/{upstream}"
    base, timeout, retries = params.pop("api_base", None), params.pop("timeout", None), params.pop("max_retries", None)
    variable = _variable(draft, setting, str(entry["model_name"]), params.pop("api_key", None))
    decoding = {_DECODING[key]: params.pop(key) for key in list(params) if key in _DECODING}
    for key in ("rpm", "tpm", "stream_timeout", "weight", "order", "max_parallel_requests"):
        if params.pop(key, None) is not None:
            why = (
                "limits are of API keys, not of deployments: see keys"
                if key in ("rpm", "tpm")
                else "has no counterpart"
            )
            draft.tell("dropped", f"{setting}.litellm_params.{key}", why)
    if provider in _DIRECT and not params:
        kind, address, usual = _DIRECT[provider]
        if (base := base or address) is None:
            raise InvalidRequest(f"{setting}.litellm_params needs api_base for {provider}")
        found: Table = {"backend": "openai_remote", "remote_base_url": base, "remote_model": upstream}
        if kind != "chat_completions":
            found["remote_api_kind"] = kind
        prefix, variable = "remote", variable or usual
    else:  # its library knows the provider
        found = {"backend": "litellm", "litellm_model": f"{provider}/{upstream}"}
        prefix = "litellm"
        found |= {"litellm_api_base": base} if base is not None else {}
        if params:
            found["litellm_params"] = {key: _environment(draft, setting, key, value) for key, value in params.items()}
    values = {"api_key_env": variable, "timeout_s": timeout, "max_retries": retries}
    found |= {f"{prefix}_{key}": value for key, value in values.items() if value is not None}
    found |= {"decoding": decoding} if decoding else {}
    return found | _info(draft, setting, dict(entry.get("model_info") or {}))


def _variable(draft: Draft, setting: str, model: str, key: Any) -> str | None:
    if key is None:
        return None
    if str(key).startswith(_FROM_ENVIRONMENT):
        return str(key).removeprefix(_FROM_ENVIRONMENT)
    variable = re.sub(r"\W+", "_", model).upper() + "_API_KEY"
    draft.tell("to do", f"{setting}.litellm_params.api_key", f"a secret is not copied: put it into {variable}")
    draft.variables.add(variable)
    return variable


def _environment(draft: Draft, setting: str, key: str, value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_FROM_ENVIRONMENT):
        variable = value.removeprefix(_FROM_ENVIRONMENT)
        draft.tell("to do", f"{setting}.litellm_params.{key}", f"write the value of {variable} into litellm_params")
    return value


def _info(draft: Draft, setting: str, info: Table) -> Table:
    """Prices are per million tokens here."""
    found: Table = {}
    costs = {
        "input": "input_cost_per_token",
        "output": "output_cost_per_token",
        "cached_input": "cache_read_input_token_cost",
    }
    price = {name: round(float(info.pop(key)) * 1e6, 6) for name, key in costs.items() if info.get(key) is not None}
    if price:
        found["price"] = price
    if (window := info.pop("max_input_tokens", None)) is not None:
        found["n_ctx"] = int(window)
    if info.pop("supports_vision", False):
        found["modalities"] = ["text", "image"]
    if info.pop("mode", "chat") not in ("chat", "completion", "responses", "embedding", "rerank"):
        draft.tell("dropped", f"{setting}.model_info.mode", "only language models are served")
    for key in info:
        if not key.startswith("supports_"):
            draft.tell("dropped", f"{setting}.model_info.{key}", "has no counterpart")
    return found


def _fallbacks(draft: Draft, router: Table, settings: Table) -> Iterator[tuple[str, list[str]]]:
    for section, table in (("litellm_settings", settings), ("router_settings", router)):
        for key in ("fallbacks", "context_window_fallbacks", "content_policy_fallbacks"):
            entries = table.pop(key, None) or []
            if entries and key != "fallbacks":
                text = "tried whenever the model cannot answer, not only in this case"
                draft.tell("changed", f"{section}.{key}", text)
            yield from ((str(name), list(names)) for entry in entries for name, names in entry.items())
        if table.pop("default_fallbacks", None):
            draft.tell("dropped", f"{section}.default_fallbacks", "name the fallbacks of each route")


def _aliases(draft: Draft, groups: dict[str, list[str]], aliases: Table) -> None:
    for alias, target in aliases.items():
        name = target["model"] if isinstance(target, dict) else target
        if name in groups:
            route = next(route for route in draft.data["routes"] if route["match"] == name)
            draft.add("routes", route | {"match": alias})
        else:
            draft.tell("dropped", ("router_settings", "model_group_alias", alias), f"there is no model {name!r}")


def _general(draft: Draft, general: Table) -> None:
    if (secret := general.pop("master_key", None)) is not None:
        variable = str(secret).removeprefix(_FROM_ENVIRONMENT) if str(secret).startswith(_FROM_ENVIRONMENT) else None
        add_key(draft, "general_settings.master_key", "master", variable, str(secret), role="owner")
    if general.pop("database_url", None) is not None:
        text = "keys that LiteLLM has created are not read: create them with modelyard keys create"
        draft.tell("to do", "general_settings.database_url", text)
    draft.drop_rest(("general_settings",), general)


def _logs(draft: Draft, settings: Table) -> None:
    if settings.pop("set_verbose", False):
        draft.set("debug", "log", "level")
    if settings.pop("json_logs", False):
        draft.set("json", "log", "format")
    if settings.pop("drop_params", None) is not None:
        text = "a parameter that a model does not support is ignored and named in the header x-modelyard-ignored"
        draft.tell("changed", "litellm_settings.drop_params", text)
