"""llama-swap's config.yaml: a command per model, which becomes the engine that the command would start."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from modelyard.config.problems import Table
from modelyard.core.errors import InvalidRequest
from modelyard_import.draft import Draft, add_key

_MACRO = re.compile(r"\$\{([A-Za-z0-9_.-]+)\}")
_LEVELS = {"debug": "debug", "info": "info", "warn": "warning", "error": "error"}
_PORT = 5800  # the first one, if startPort is not set

# llama-server's flags and our settings.
_LLAMA_SERVER: Mapping[str, str] = {
    **dict.fromkeys(("-m", "--model"), "path"),
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), "path"),
    **dict.fromkeys(("-c", "--ctx-size"), "n_ctx"),
    **dict.fromkeys(("-np", "--parallel"), "parallel"),
    **dict.fromkeys(("-ngl", "--gpu-layers", "--n-gpu-layers"), "llama_server_n_gpu_layers"),
    **dict.fromkeys(("-fa", "--flash-attn"), "llama_server_flash_attn"),
    **dict.fromkeys(("-t", "--threads"), "llama_server_n_threads"),
    **dict.fromkeys(("-tb", "--threads-batch"), "llama_server_n_threads_batch"),
    **dict.fromkeys(("-mm", "--mmproj"), "llama_server_mmproj_path"),
    **dict.fromkeys(("-md", "--model-draft"), "llama_server_draft_model_path"),
    **dict.fromkeys(("--draft", "--draft-n", "--draft-max"), "llama_server_spec_draft_n_max"),
    "--draft-p-min": "llama_server_spec_draft_p_min",
    **dict.fromkeys(("-ctk", "--cache-type-k"), "type_k"),
    **dict.fromkeys(("-ctv", "--cache-type-v"), "type_v"),
    **dict.fromkeys(("--temp", "--temperature"), "decoding.temperature"),
    "--top-p": "decoding.top_p",
    "--top-k": "decoding.top_k",
    "--min-p": "decoding.min_p",
    "--repeat-penalty": "decoding.repetition_penalty",
    "--presence-penalty": "decoding.presence_penalty",
    **dict.fromkeys(("-n", "--predict", "--n-predict"), "decoding.max_tokens"),
    **dict.fromkeys(("-s", "--seed"), "decoding.seed"),
}
_VLLM: Mapping[str, str] = {
    "--max-model-len": "n_ctx",
    "--dtype": "vllm_dtype",
    "--kv-cache-dtype": "vllm_kv_cache_dtype",
    "--gpu-memory-utilization": "vllm_gpu_memory_utilization",
    "--tensor-parallel-size": "vllm_tensor_parallel_size",
}
_UNLIMITED = ("decoding.max_tokens", "decoding.seed")  # where a negative number means none, which is the default here
_NOT_OURS = ("--host", "--port", "--api-key", "--alias", "-a", "--served-model-name")  # a gateway has its own
_IN_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed", "stop")


def is_llama_swap(table: Table) -> bool:
    models = table.get("models")
    return isinstance(models, dict) and any(isinstance(model, dict) and "cmd" in model for model in models.values())


def read_llama_swap(table: Table) -> Draft:
    draft, rest = Draft(), dict(table)
    macros, port = rest.pop("macros", None) or {}, int(rest.pop("startPort", _PORT))
    models = {str(name): _own(str(name), model, macros) for name, model in rest.pop("models").items()}
    with_port = sorted(name for name, model in models.items() if "${PORT}" in str(model))
    for name, model in models.items():
        number = port + with_port.index(name) if name in with_port else port
        expanded = _expanded(model, {"PORT": number})
        if unknown := sorted(set(_MACRO.findall(str(expanded)))):
            text = "is not set: its place is left as it is"
            draft.tell("to do", ("models", name), f"{', '.join(f'${{{each}}}' for each in unknown)} {text}")
        draft.set(_model(draft, name, expanded, number), "models", name)
    for index, secret in enumerate(rest.pop("apiKeys", []), 1):
        variable = re.fullmatch(r"\$\{env\.(\w+)\}", secret)
        add_key(draft, f"apiKeys[{index - 1}]", f"llama-swap-{index}", variable[1] if variable else None, secret)
    for name, peer in (rest.pop("peers", None) or {}).items():
        _peer(draft, str(name), dict(peer))
    _server(draft, rest, macros)
    draft.tell("changed", "the port", "llama-swap listens on 8080 by default, modelyard serve on 8000 (or --port)")
    return draft


def _own(name: str, model: Table, macros: Table) -> Table:
    """With all macros but the port, which only models that use it get. A comment is none of the command, whatever a
    macro in it stands for."""
    without = model | {"cmd": _without_comments(str(model.get("cmd", "")))}
    expanded: Table = _expanded(without, {**macros, **(model.get("macros") or {}), "MODEL_ID": name})
    return expanded


def _server(draft: Draft, rest: Table, macros: Table) -> None:
    """What is not of a model."""
    if (seconds := rest.pop("healthCheckTimeout", None)) is not None:
        draft.set(float(max(15, seconds)), "scheduler", "load_timeout_s")
    if (seconds := rest.pop("globalTTL", None)) is not None:
        draft.set(float(seconds), "scheduler", "idle_ttl_s")
    if (level := rest.pop("logLevel", None)) is not None:
        draft.set(_LEVELS.get(level, "info"), "log", "level")
    if (count := rest.pop("metricsMaxInMemory", None)) is not None:
        draft.set(count, "log", "history_requests")
        draft.tell("changed", "metricsMaxInMemory", "log.history_requests counts requests, with their metrics")
    for section in ("groups", "matrix", "routing"):
        if rest.pop(section, None) is not None:
            text = "models stay loaded side by side as long as the memory suffices, and the idle one goes first"
            draft.tell("changed", section, f"{text}; scheduler.memory_limit says how much they may use")
    hooks = _expanded(rest.pop("hooks", None) or {}, macros)
    names = {alias: name for name, model in draft.data["models"].items() for alias in (name, *model.get("aliases", []))}
    startup = hooks.pop("on_startup", None) or {}
    for name in startup.pop("preload", None) or []:
        if name in names:
            draft.set(True, "models", names[name], "enabled")
        else:
            draft.tell("dropped", "hooks.on_startup.preload", f"there is no model {name!r}")
    draft.drop_rest(("hooks", "on_startup"), startup)
    draft.drop_rest(("hooks",), hooks)
    draft.drop_rest((), rest)


def _peer(draft: Draft, name: str, peer: Table) -> None:
    """Models of another server."""
    models, proxy = peer.pop("models", None) or [], str(peer.pop("proxy", "")).rstrip("/")
    found: Table = {"backend": "openai_remote", "remote_base_url": f"{proxy}/v1"}
    if (secret := peer.pop("apiKey", None)) is not None:
        variable = re.fullmatch(r"\$\{env\.(\w+)\}", str(secret))
        found["remote_api_key_env"] = variable[1] if variable else re.sub(r"\W+", "_", name).upper() + "_API_KEY"
        if variable:
            draft.needs_variable(f"peers.{name}.apiKey", variable[1])
        else:
            text = f"a secret is not copied: put it into {found['remote_api_key_env']}"
            draft.variables.add(found["remote_api_key_env"])
            draft.tell("to do", f"peers.{name}.apiKey", text)
    for model in map(str, models):
        if model in draft.data["models"]:
            draft.tell("dropped", ("peers", name, "models"), f"{model} is also the name of a model here")
            continue
        draft.set(found | {"remote_model": model, "enabled": False, "autoload": True}, "models", model)
        draft.add("routes", {"match": model, "model": model, "allow_remote": True})
    draft.tell("changed", ("peers", name), "its models are remote ones; requests may leave this machine")
    draft.drop_rest(("peers", name), peer)


def _model(draft: Draft, name: str, model: Table, port: int) -> Table:
    rest = {key: value for key, value in model.items() if key != "macros"}
    proxy, upstream = rest.pop("proxy", None), rest.pop("useModelName", None)
    found = _engine(draft, name, rest.pop("cmd"), proxy or f"http://localhost:{port}", upstream)
    for key in ("cmdStop", "checkEndpoint"):
        if rest.pop(key, None) is not None:
            ours = found["backend"] != "openai_remote"
            text = (
                "Modelyard starts, watches and stops the program" if ours else "the program is not started by Modelyard"
            )
            draft.tell("dropped", ("models", name, key), text)
    if rest.get("unlisted") is False:
        del rest["unlisted"]
    found |= {"enabled": False, "autoload": True}
    if (ttl := rest.pop("ttl", None)) is not None and ttl >= 0:
        found["idle_ttl_s"] = float(ttl)
    if aliases := [each["id"] if isinstance(each, dict) else each for each in rest.pop("aliases", [])]:
        found["aliases"] = aliases
    title = rest.pop("name", None)
    if description := rest.pop("description", None) or title:
        found["description"] = description
    if (limit := rest.pop("concurrencyLimit", 0)) > 0:
        found["target_inflight"] = limit
        text = "target_inflight: further requests wait in the queue and are not refused with 429"
        draft.tell("changed", ("models", name, "concurrencyLimit"), text)
    _environment(draft, name, found, rest.pop("env", []))
    _filters(draft, name, found, rest.pop("filters", {}))
    draft.drop_rest(("models", name), rest)
    return found


def _environment(draft: Draft, name: str, found: Table, variables: list[str]) -> None:
    values = dict(variable.split("=", 1) for variable in variables)
    if not values:
        return
    if found["backend"] in ("llama_server", "vllm_serve"):
        found[f"{found['backend']}_env"] = values
    else:
        draft.tell("dropped", ("models", name, "env"), "the program is not started by Modelyard")


def _filters(draft: Draft, name: str, found: Table, filters: Table) -> None:
    path = ("models", name, "filters")
    for key, value in filters.pop("setParams", {}).items():
        if key in _IN_SETTINGS:
            found.setdefault("decoding", {})[key] = value
            draft.tell("changed", (*path, "setParams", key), "a default: a request that sets it overrides it")
        else:
            draft.tell("dropped", (*path, "setParams", key), "has no counterpart")
    draft.drop_rest(path, filters, "requests are not rewritten: what a client sets applies")


# --- commands ---------------------------------------------------------------------------------------------------------


def _without_comments(command: str) -> str:
    return "\n".join(line for line in command.splitlines() if not line.lstrip().startswith("#"))


def _engine(draft: Draft, name: str, command: str, proxy: str, upstream: str | None) -> Table:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InvalidRequest(f"models.{name}.cmd cannot be split into words: {error}") from error
    if not words:
        raise InvalidRequest(f"models.{name}.cmd is empty")
    program = Path(words[0]).name
    if "llama-server" in program:
        return _llama_server(draft, name, words)
    if program == "vllm" and words[1:2] == ["serve"]:
        return _vllm_serve(name, words)
    path = ("models", name, "cmd")
    text = f"{program} is no engine that Modelyard starts: start it yourself; requests go to its address"
    draft.tell("to do", path, text)
    draft.add("routes", {"match": name, "model": name, "allow_remote": True})
    return {"backend": "openai_remote", "remote_base_url": f"{proxy.rstrip('/')}/v1", "remote_model": upstream or name}


def _llama_server(draft: Draft, name: str, words: list[str]) -> Table:
    found: Table = {"backend": "llama_server"}
    if os.sep in words[0]:
        found["llama_server_binary"] = words[0]
    extra = _apply(found, words[1:], _LLAMA_SERVER)
    if "path" not in found:
        raise InvalidRequest(f"models.{name}.cmd names no model: -m or -hf is missing")
    if any(word in ("-hf", "-hfr", "--hf-repo") for word in words):
        draft.tell("to do", ("models", name, "cmd"), f"fetch it once: modelyard pull {found['path']}")
    if found.get("parallel", 1) < 1:
        del found["parallel"]  # as many as it thinks right, as here
    if (slots := found.get("parallel", 1)) > 1 and found.get("n_ctx"):
        found["n_ctx"] //= slots
        text = f"{found['n_ctx']} tokens: of one conversation, where --ctx-size is of all {slots} together"
        draft.tell("changed", ("models", name, "n_ctx"), text)
    if found.get("n_ctx") == 0:
        del found["n_ctx"]
        text = "0 means the model's own length, Modelyard's default is 4096 tokens: set n_ctx"
        draft.tell("changed", ("models", name, "n_ctx"), text)
    if "llama_server_mmproj_path" in found:
        found["modalities"] = ["text", "image"]
    if extra:
        found["llama_server_extra_args"] = extra
    return found


def _vllm_serve(name: str, words: list[str]) -> Table:
    flags = words[2:]
    model = flags.pop(0) if flags and not flags[0].startswith("-") else None
    found: Table = {"backend": "vllm_serve"}
    if os.sep in words[0]:
        found["vllm_serve_binary"] = words[0]
    extra = _apply(found, flags, {**_VLLM, "--model": "vllm_model"})
    if model is not None:
        found["vllm_model"] = model
    if "vllm_model" not in found:
        raise InvalidRequest(f"models.{name}.cmd names no model: vllm serve MODEL")
    if extra:
        found["vllm_serve_extra_args"] = extra
    return found


def _apply(found: Table, words: list[str], known: Mapping[str, str]) -> list[str]:
    """Set what the flags mean. The others, which go to the program as they are."""
    extra: list[str] = []
    for flag, values in _flags(words):
        if flag in _NOT_OURS:
            continue
        target = known.get(flag)
        if target is None:
            extra += [flag, *values]
        elif target.startswith("decoding."):
            if target in _UNLIMITED and str(_value(values, target)).startswith("-"):
                continue
            found.setdefault("decoding", {})[target.removeprefix("decoding.")] = _value(values, target)
        else:
            found[target] = _value(values, target)
    return extra


def _flags(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with its values: what follows and is no flag itself. A negative number is a value."""
    flag, values = "", list[str]()
    for word in words:
        if re.match(r"-{1,2}[A-Za-z]", word):
            if flag:
                yield flag, values
            flag, _, value = word.partition("=")
            values = [value] if value else []
        else:
            values.append(word)
    if flag:
        yield flag, values


def _value(values: list[str], target: str) -> Any:
    text = values[0] if values else "on"  # a flag alone, such as -fa
    if target in ("llama_server_n_gpu_layers", "llama_server_flash_attn", "path", "vllm_model"):
        return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _expanded(value: Any, macros: Table) -> Any:
    """With macros replaced, which may contain others; a value that is one macro keeps its type."""
    if isinstance(value, dict):
        return {_expanded(key, macros): _expanded(each, macros) for key, each in value.items() if key != "macros"}
    if isinstance(value, list):
        return [_expanded(each, macros) for each in value]
    for _ in range(len(macros) + 1):
        if not isinstance(value, str):
            return value
        if (whole := _MACRO.fullmatch(value)) is not None:
            value = _macro(whole, macros)
        elif (replaced := _MACRO.sub(lambda match: str(_macro(match, macros)), value)) != value:
            value = replaced
        else:
            break
    return value


def _macro(match: re.Match[str], macros: Table) -> Any:
    name = match[1]
    if name.startswith("env."):
        return os.environ.get(name.removeprefix("env."), match[0])
    return macros.get(name, match[0])
