"""LiteLLM's config.yaml: model_list becomes remote models, router settings become routes with fallbacks."""

from __future__ import annotations

import os
import re
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


_LIMITS = "limits are of API keys, not of deployments: see keys"
_NONE = "has no counterpart"
_OF_THE_PROXY = {
    **dict.fromkeys(("rpm", "tpm", "max_parallel_requests"), _LIMITS),
    **dict.fromkeys(("stream_timeout", "weight", "order", "use_in_pass_through", "tags"), _NONE),
    "drop_params": "a parameter that a model does not support is ignored and named in the header x-modelyard-ignored",
}
# Of a name without a provider: whose models begin so.
_NAMES = {"claude": "anthropic", "gpt": "openai", "chatgpt": "openai", "o1": "openai", "o3": "openai", "o4": "openai"}
_NAMES |= {"whisper": "openai", "tts": "openai", "text-embedding": "openai"}
_MEDIA = ("image_generation", "image_edit", "video_generation")  # nothing here answers them
_SERVED = (
    "chat",
    "completion",
    "responses",
    "embedding",
    "rerank",
    "moderation",
    "audio_transcription",
    "audio_speech",
)
_SECRET = re.compile(r"secret|token|password|api_?key|credentials", re.IGNORECASE)
_MOST_RETRIES = 10


def is_litellm(table: Table) -> bool:
    return isinstance(table.get("model_list"), list)


def read_litellm(table: Table) -> Draft:
    draft, rest = Draft(), dict(table)
    router, settings = dict(rest.pop("router_settings", None) or {}), dict(rest.pop("litellm_settings", None) or {})
    credentials = {
        str(entry.get("credential_name")): entry.get("credential_values") or {}
        for entry in rest.pop("credential_list", None) or []
    }
    groups = _groups(draft, rest.pop("model_list"), _common(draft, router, settings), credentials)
    fallbacks = _fallbacks(draft, router, settings)
    usual = fallbacks.pop("*", [])
    for name in sorted({*fallbacks, *(each for names in fallbacks.values() for each in names), *usual} - groups.keys()):
        draft.tell("dropped", "fallbacks", f"there is no model {name!r}")
    for name, models in groups.items():
        route: Table = {"match": name, "model": models[0], "allow_remote": True}
        others = [model for other in (fallbacks.get(name) or usual) if other != name for model in groups.get(other, [])]
        if then := list(dict.fromkeys([*models[1:], *others])):
            route["fallback"] = then
        draft.add("routes", route)
    draft.tell("changed", "model_list", "requests may leave this machine: each route says allow_remote")
    _aliases(draft, groups, router.pop("model_group_alias", {}))
    if (strategy := router.pop("routing_strategy", None)) is not None:
        text = f"{strategy}: the first deployment answers, the others are fallbacks in their order"
        draft.tell("changed", "router_settings.routing_strategy", text)
    _general(draft, dict(rest.pop("general_settings", None) or {}))
    _logs(draft, settings)
    for file in rest.pop("include", None) or []:
        draft.tell("to do", "include", f"{file} is not read: put its sections into the file that is imported")
    for name, server in (rest.pop("mcp_servers", None) or {}).items():
        _mcp_server(draft, str(name), dict(server))
    for name in rest.pop("environment_variables", None) or {}:
        draft.tell("to do", ("environment_variables", name), "set it in the environment of modelyard serve")
    for section, left in (("router_settings", router), ("litellm_settings", settings)):
        draft.drop_rest((section,), left)
    draft.drop_rest((), rest)
    draft.tell("changed", "the port", "LiteLLM listens on 4000 by default, modelyard serve on 8000 (or --port)")
    return draft


def _common(draft: Draft, router: Table, settings: Table) -> Table:
    """Time limit and retries of every deployment that sets none."""
    found: Table = {}
    for key, names in (("timeout", ("timeout", "request_timeout")), ("max_retries", ("num_retries",))):
        for table in (settings, router):
            for name in names:
                if (value := table.pop(name, None)) is not None:
                    found[key] = value
    if found.get("max_retries", 0) > _MOST_RETRIES:
        draft.tell("changed", "num_retries", f"{_MOST_RETRIES} are the most, in place of {found['max_retries']}")
        found["max_retries"] = _MOST_RETRIES
    return found


def _groups(draft: Draft, entries: list[Table], common: Table, credentials: dict[str, Table]) -> dict[str, list[str]]:
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
        if (mode := (entry.get("model_info") or {}).get("mode")) in _MEDIA:
            draft.tell("dropped", setting, f"{name}: {mode} is not served")
            continue
        named = entry["litellm_params"].get("litellm_credential_name")
        if named is not None and named not in credentials:
            draft.tell("dropped", f"{setting}.litellm_params.litellm_credential_name", f"{named!r} is not in the file")
        params = common | credentials.get(str(named), {}) | entry["litellm_params"]
        params.pop("litellm_credential_name", None)
        models = groups.setdefault(name, [])
        models.append(name if not models else f"{name}-{len(models) + 1}")
        if len(models) == 2:
            draft.tell(
                "changed", setting, f"{name} has several deployments: not balanced, but fallbacks in their order"
            )
        draft.set(_model(draft, setting, entry | {"litellm_params": params}), "models", models[-1])
    if not groups:
        raise InvalidRequest("model_list has no model that can be imported")
    return groups


def _model(draft: Draft, setting: str, entry: Table) -> Table:
    params = dict(entry["litellm_params"])
    provider, upstream = _provider(str(params.pop("model", "")))
    base, timeout, retries = params.pop("api_base", None), params.pop("timeout", None), params.pop("max_retries", None)
    variable = _variable(draft, setting, str(entry["model_name"]), params.pop("api_key", None))
    decoding = {_DECODING[key]: params.pop(key) for key in list(params) if key in _DECODING}
    for key, why in _OF_THE_PROXY.items():
        if params.pop(key, None) is not None:
            draft.tell("dropped", f"{setting}.litellm_params.{key}", why)
    is_elsewhere = base is not None
    if str(base).startswith(_FROM_ENVIRONMENT):
        base = os.environ.get(str(base).removeprefix(_FROM_ENVIRONMENT), base)
    is_known = base is None or not str(base).startswith(_FROM_ENVIRONMENT)
    if provider in _DIRECT and not params and is_known:
        kind, address, usual = _DIRECT[provider]
        if (base := base or address) is None:
            raise InvalidRequest(f"{setting}.litellm_params needs api_base for {provider}")
        found: Table = {"backend": "openai_remote", "remote_base_url": base, "remote_model": upstream}
        if kind != "chat_completions":
            found["remote_api_kind"] = kind
        prefix, variable = "remote", variable or (None if is_elsewhere else usual)  # no key for another address
    else:  # its library knows the provider
        found = {"backend": "litellm", "litellm_model": f"{provider}/{upstream}" if provider else upstream}
        prefix = "litellm"
        if base is not None:
            found["litellm_api_base"] = _environment(draft, setting, "api_base", base)
        if params:
            found["litellm_params"] = {key: _environment(draft, setting, key, value) for key, value in params.items()}
    if variable is not None and variable not in draft.variables:
        draft.needs_variable(f"{setting}.litellm_params.api_key", variable)
    values = {"api_key_env": variable, "timeout_s": timeout, "max_retries": retries}
    found |= {f"{prefix}_{key}": value for key, value in values.items() if value is not None}
    found |= {"decoding": decoding} if decoding else {}
    return found | _info(draft, setting, dict(entry.get("model_info") or {}))


def _provider(model: str) -> tuple[str, str]:
    """Of `provider/model`, or of a name that its vendor's models have; empty where only the library knows."""
    provider, slash, upstream = model.partition("/")
    if slash:
        return provider, upstream
    return next((owner for prefix, owner in _NAMES.items() if model.startswith(prefix)), ""), model


def _mcp_server(draft: Draft, name: str, server: Table) -> None:
    server.pop("description", None)
    url, transport = server.pop("url", None), server.pop("transport", "http")
    if url is None or transport != "http":
        draft.tell("dropped", ("mcp_servers", name), "only the address of a server with streamable HTTP is taken")
        return
    draft.set({"url": url}, "mcp", "servers", name)
    draft.drop_rest(("mcp_servers", name), server)


def _variable(draft: Draft, setting: str, model: str, key: Any) -> str | None:
    if key is None or str(key).lower() == "none":
        return None
    if str(key).startswith(_FROM_ENVIRONMENT):
        return str(key).removeprefix(_FROM_ENVIRONMENT)
    variable = re.sub(r"\W+", "_", model).upper() + "_API_KEY"
    draft.tell("to do", f"{setting}.litellm_params.api_key", f"a secret is not copied: put it into {variable}")
    draft.variables.add(variable)
    return variable


def _environment(draft: Draft, setting: str, key: str, value: Any) -> Any:
    """A reference to the environment stays one: the engine reads the variable. A secret becomes one."""
    where = f"{setting}.litellm_params.{key}"
    if isinstance(value, str) and value.startswith(_FROM_ENVIRONMENT):
        draft.needs_variable(where, value.removeprefix(_FROM_ENVIRONMENT))
    elif isinstance(value, str) and _SECRET.search(key) and not os.path.isabs(value):
        variable = re.sub(r"\W+", "_", f"{setting}.{key}").upper()
        draft.tell("to do", where, f"a secret is not copied: put it into {variable}")
        draft.variables.add(variable)
        return f"{_FROM_ENVIRONMENT}{variable}"
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
    if (mode := info.pop("mode", "chat")) not in _SERVED:
        draft.tell("dropped", f"{setting}.model_info.mode", f"{mode} is not served")
    for key in info:
        if not key.startswith("supports_"):
            draft.tell("dropped", f"{setting}.model_info.{key}", "has no counterpart")
    return found


def _fallbacks(draft: Draft, router: Table, settings: Table) -> dict[str, list[str]]:
    """By the name of a model; those of `*` are of every model that has none of its own."""
    found: dict[str, list[str]] = {}
    for section, table in (("litellm_settings", settings), ("router_settings", router)):
        for key in ("fallbacks", "context_window_fallbacks", "content_policy_fallbacks"):
            entries = table.pop(key, None) or []
            if entries and key != "fallbacks":
                text = "tried whenever the model cannot answer, not only in this case"
                draft.tell("changed", f"{section}.{key}", text)
            for name, names in ((name, names) for entry in entries for name, names in entry.items()):
                found.setdefault(str(name), []).extend(map(str, names))
        found.setdefault("*", []).extend(map(str, table.pop("default_fallbacks", None) or []))
    return found


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
