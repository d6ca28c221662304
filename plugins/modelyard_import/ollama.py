"""Ollama: a Modelfile, or the folder of its models; and LM Studio's folder. GGUF files are used where they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from modelyard.config.problems import Table
from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.library import elsewhere
from modelyard.library.elsewhere import FoundModel
from modelyard_import.draft import Draft

_INSTRUCTION = re.compile(
    r"^\s*(FROM|PARAMETER|TEMPLATE|SYSTEM|ADAPTER|LICENSE|MESSAGE|REQUIRES|CAPABILITY|RENDERER|PARSER|DRAFT)\s+",
    re.IGNORECASE,
)
# Ollama's parameters and our settings, those of a model and those of its decoding.
_MODEL = {
    "num_ctx": "n_ctx",
    "num_gpu": "n_gpu_layers",
    "num_thread": "n_threads",
    "num_batch": "n_batch",
    "main_gpu": "main_gpu",
}
_DECODING = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "repeat_last_n")},
    **{name: name for name in ("mirostat", "mirostat_tau", "mirostat_eta", "presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
    "num_predict": "max_tokens",
}


def is_modelfile(text: str) -> bool:
    return any(re.match(r"\s*FROM\s+\S", line, re.IGNORECASE) for line in text.splitlines())


# --- a Modelfile ------------------------------------------------------------------------------------------------------


def read_modelfile(file: Path) -> Draft:
    """The model is named after the file, or after its folder if the file is called Modelfile."""
    plain = file.name.lower().startswith("modelfile") and not file.suffix
    name = file.resolve().parent.name if plain else file.stem
    draft, model, decoding = Draft(), Table(), Table()
    for word, text in instructions(file.read_text("utf-8")):
        setting = f"{file.name}: {word}"
        if word == "FROM":
            _from(draft, model, decoding, file, text)
        elif word == "PARAMETER":
            key, _, value = text.partition(" ")
            _parameter(draft, model, decoding, setting, key.lower(), _literal(value.strip()))
        elif word == "SYSTEM":
            model["system_prompt"] = text
        elif word == "ADAPTER" and "lora" in model:
            draft.tell("dropped", setting, f"{text}: only the first adapter is applied to every request")
        elif word == "ADAPTER":
            model["lora"] = {"adapter": str((file.parent / text).resolve())}
            model["lora_adapter"] = "adapter"
        elif word == "TEMPLATE":
            _tell_template(draft, setting)
        elif word not in ("LICENSE", "REQUIRES", "CAPABILITY"):
            draft.tell("dropped", setting, "has no counterpart")
    if "path" not in model:
        raise InvalidRequest(f"{file} has no FROM")
    draft.set(model | ({"decoding": decoding} if decoding else {}), "models", name)
    _tell_port(draft)
    return draft


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction with its argument, which triple quotes continue over lines."""
    lines = iter(text.splitlines())
    for line in lines:
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        argument = line[match.end() :].strip()
        if argument.startswith('"""'):
            while argument.count('"""') < 2 and (more := next(lines, None)) is not None:
                argument += f"\n{more}"
            argument = argument.strip().removeprefix('"""').removesuffix('"""')
        elif len(argument) > 1 and argument[0] == argument[-1] == '"':
            argument = argument[1:-1]
        yield match[1].upper(), argument


def _from(draft: Draft, model: Table, decoding: Table, file: Path, source: str) -> None:
    """A file or folder beside the Modelfile, else a model of Ollama's own folder, else one to fetch."""
    path = (file.parent / Path(source).expanduser()).resolve()
    if "path" in model:  # a second one is the projector of the first
        if "mmproj" in path.name.lower():
            model |= {"mmproj": str(path), "modalities": ["text", "image"]}
        else:
            draft.tell("dropped", f"{file.name}: FROM", f"{source}: a model has one file, and a projector")
        return
    if path.exists() or source.endswith(".gguf") or source.startswith((".", "/", "~")):
        model |= (
            {"backend": "llama_cpp", "path": str(path)}
            if not path.is_dir() or any(path.glob("*.gguf"))
            else {"path": str(path)}
        )
        return
    found = elsewhere.find(source)
    if found is not None:
        found_model, own = _model(draft, found)
        model |= found_model
        decoding |= own
        return
    model |= {"backend": "llama_cpp", "path": source}
    draft.tell("to do", f"{file.name}: FROM", f"{source} is not on this machine: fetch it with modelyard pull")


def _parameter(draft: Draft, model: Table, decoding: Table, setting: str, key: str, value: Any) -> None:
    if key == "stop":
        decoding.setdefault("stop", []).extend(value if isinstance(value, list) else [str(value)])
    elif key == "num_predict" and isinstance(value, int) and value < 0:
        return  # no limit, as here
    elif (key, value) in (("num_gpu", -1), ("num_thread", 0)):
        return  # as many as fit or pay, as here
    elif key in _MODEL:
        model[_MODEL[key]] = value
    elif key in _DECODING:
        decoding[_DECODING[key]] = value
    else:
        draft.tell("dropped", f"{setting} {key}", "has no counterpart")


def _literal(text: str) -> Any:
    """A number or true or false if it is one; else the text without its quotes."""
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip('"')
    if isinstance(value, float) and value.is_integer():
        return int(value)  # of top_k 40.0
    return value if isinstance(value, int | float | str | bool) else text


def _tell_template(draft: Draft, setting: str) -> None:
    draft.tell("changed", setting, "Ollama's template is not used: the model file has its own; else set chat_template")


def _tell_port(draft: Draft) -> None:
    draft.set(11434, "http", "ollama_port")
    draft.tell("changed", "the port", "Ollama's clients find this server at 11434 (http.ollama_port), others at 8000")


# --- folders ----------------------------------------------------------------------------------------------------------


def read_folder(folder: Path) -> tuple[str, Draft]:
    root = next((each for each in (folder, folder / "models") if (each / "manifests").is_dir()), None)
    draft = Draft()
    for found in elsewhere.ollama_models(root) if root is not None else elsewhere.lm_studio_models(folder):
        model, decoding = _model(draft, found)
        model |= {"decoding": decoding} if decoding else {}
        draft.set(model | {"enabled": False, "autoload": True}, "models", found.name)
    if not draft.data.get("models"):
        raise NotFound(f"there are no models in {folder}: neither Ollama's manifests nor owner/repository/FILE.gguf")
    if root is not None:
        _tell_port(draft)
        return "Ollama", draft
    draft.tell("changed", "the port", "LM Studio listens on 1234 by default, modelyard serve on 8000 (or --port)")
    return "LM Studio", draft


def _model(draft: Draft, found: FoundModel) -> tuple[Table, Table]:
    """The model's settings and those of its decoding."""
    decoding: Table = {}
    model: Table = {"backend": "llama_cpp", "path": str(found.path.resolve())}
    if found.projector is not None:
        model |= {"mmproj": str(found.projector.resolve()), "modalities": ["text", "image"]}
    for kind, file in found.layers.items():
        if kind == "adapter":
            model |= {"lora": {"adapter": str(file.resolve())}, "lora_adapter": "adapter"}
        elif kind == "system":
            model["system_prompt"] = file.read_text("utf-8")
        elif kind == "params":
            for key, value in json.loads(file.read_text("utf-8")).items():
                _parameter(draft, model, decoding, found.name, key, value)
        elif kind == "template":
            _tell_template(draft, f"{found.name}: template")
        elif kind == "messages":
            draft.tell("dropped", f"{found.name}: messages", "has no counterpart")
    return model, decoding
