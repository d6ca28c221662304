"""The folder of a model that vLLM runs: where it is on this machine, and whether its weights are complete."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from modelyard.core.errors import NotFound
from modelyard.engines import option_faults
from modelyard.engines.hf_folder import CONFIG, read_config, read_tensors
from modelyard.engines.option_faults import OptionFault, try_options
from modelyard.engines.vllm.options import VllmOptions
from modelyard.library.model_files import candidate_paths

__all__ = ["check_weights", "find_folder", "read_config", "require_folder", "resolve_companions", "resolve_model"]

OptionsT = TypeVar("OptionsT", bound=VllmOptions)
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_COMPANIONS = ("vllm_tokenizer", "vllm_speculative_model")


def find_folder(name: str) -> Path | None:
    """A path, a name in the library, or a model in the Hugging Face hub's cache."""
    for place in candidate_paths(name):
        if (place / CONFIG).is_file():
            return place.absolute()
    return _find_in_hub_cache(name)


def require_folder(name: str) -> Path:
    if (folder := find_folder(name)) is not None:
        return folder
    raise NotFound(
        f"the model {name!r} is not on this machine: fetch it with modelyard pull {name}",
        code="model_file_missing",
    )


def resolve_model(options: VllmOptions) -> str:
    """The folder if the model is here; else its name, which vLLM looks up on the hub."""
    folder = find_folder(options.model_name)
    return str(folder) if folder is not None else options.model_name


def resolve_companions(options: OptionsT) -> OptionsT:
    """The options with the folders of the tokenizer and of the speculative model, if they are here."""
    names = {field: getattr(options, field) for field in _COMPANIONS}
    folders = {field: find_folder(name) for field, name in names.items() if name is not None}
    return options.model_copy(update={field: str(folder) for field, folder in folders.items() if folder is not None})


def folder_faults(options: VllmOptions) -> Iterator[OptionFault]:
    """Paths that lead nowhere. A name of the hub may still be downloaded."""
    named = {"vllm_model" if options.vllm_model else "path": options.model_name}
    named |= {field: name for field in _COMPANIONS if (name := getattr(options, field)) is not None}
    yield from try_options(*((field, require_folder, name) for field, name in named.items() if _is_path(name)))
    adapters = {name: path for name, path in options.lora.items() if _is_path(path)}
    yield from try_options(*((f"lora.{name}", option_faults.require_folder, path) for name, path in adapters.items()))


def _is_path(name: str) -> bool:
    return _HUB_NAME.fullmatch(name) is None


def check_weights(folder: Path) -> None:
    """Raises if a safetensors file is incomplete: vLLM notices it late, in another process. Other formats do not hold
    their own size."""
    for file in sorted(folder.glob("*.safetensors")):
        read_tensors(file)


def _find_in_hub_cache(name: str) -> Path | None:
    """Of several snapshots the newest."""
    if name.count("/") != 1 or name.startswith(("/", "~", ".")):
        return None
    snapshots = _hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots"
    found = [folder for folder in snapshots.glob("*") if (folder / CONFIG).is_file()]
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


def _hub_cache() -> Path:
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"
