"""Where a model that vLLM is to run lies on this machine, and what its config.json says of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.engines.vllm.settings import VllmSettings
from modelyard.library import model_files

S = TypeVar("S", bound=VllmSettings)
_CONFIG = "config.json"
_BESIDE = ("vllm_tokenizer", "vllm_speculative_model")


def find(name: str) -> Path | None:
    """A folder as it is written or of the library, else what the hub's own cache holds under that name."""
    for place in model_files.candidate_paths(name):
        if (place / _CONFIG).is_file():
            return place.absolute()
    return _cached(name)


def written(settings: VllmSettings) -> str:
    """What vLLM is told: the folder, where there is one; else it looks the name up on the hub itself."""
    found = find(settings.model_name)
    return str(found) if found is not None else settings.model_name


def placed(settings: S) -> S:
    """With the folders of what belongs to the model, too: its tokenizer, and the checkpoint that guesses."""
    named = {field: getattr(settings, field) for field in _BESIDE}
    found = {field: find(name) for field, name in named.items() if name is not None}
    return settings.model_copy(update={field: str(place) for field, place in found.items() if place is not None})


def require(name: str) -> Path:
    if (found := find(name)) is not None:
        return found
    raise NotFound(
        f"the model {name!r} is not on this machine yet: what is asked of its files is known once they are here",
        code="model_file_missing",
    )


def config(folder: Path) -> dict[str, Any]:
    """The language model's own part of it: models that see have theirs inside."""
    try:
        told: Any = msgspec.json.decode((folder / _CONFIG).read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{folder / _CONFIG} cannot be read: {error}", code="model_unreadable") from error
    inner = told.get("text_config") or told.get("llm_config")
    return {**told, **inner} if isinstance(inner, dict) else told


def _cached(name: str) -> Path | None:
    """Of several snapshots the one that was fetched last."""
    if name.count("/") != 1 or name.startswith(("/", "~", ".")):
        return None
    snapshots = _hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots"
    found = [place for place in snapshots.glob("*") if (place / _CONFIG).is_file()]
    return max(found, key=lambda place: place.stat().st_mtime, default=None)


def _hub_cache() -> Path:
    if told := os.environ.get("HF_HUB_CACHE"):
        return Path(told).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(home).expanduser() / "hub"
