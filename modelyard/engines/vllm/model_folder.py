"""Where a model that vLLM is to run lies on this machine, and what its config.json says of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.engines.vllm.options import VllmOptions
from modelyard.library import model_files

S = TypeVar("S", bound=VllmOptions)
_CONFIG = "config.json"
_BESIDE = ("vllm_tokenizer", "vllm_speculative_model")


def find_folder(name: str) -> Path | None:
    """A folder as it is written or of the library, else what the hub's own cache holds under that name."""
    for place in model_files.candidate_paths(name):
        if (place / _CONFIG).is_file():
            return place.absolute()
    return _cached(name)


def resolve_model(settings: VllmOptions) -> str:
    """What vLLM is told: the folder, where there is one; else it looks the name up on the hub itself."""
    found = find_folder(settings.model_name)
    return str(found) if found is not None else settings.model_name


def resolve_companions(settings: S) -> S:
    """With the folders of what belongs to the model, too: its tokenizer, and the checkpoint that guesses."""
    named = {field: getattr(settings, field) for field in _BESIDE}
    found = {field: find_folder(name) for field, name in named.items() if name is not None}
    return settings.model_copy(update={field: str(place) for field, place in found.items() if place is not None})


def require_folder(name: str) -> Path:
    if (found := find_folder(name)) is not None:
        return found
    raise NotFound(
        f"the model {name!r} is not on this machine yet: what is asked of its files is known once they are here",
        code="model_file_missing",
    )


def read_folder_config(folder: Path) -> dict[str, Any]:
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


# Whether a folder's weights are whole, by the heads of its files: vLLM finds out late, and in a process of its own.

_LONGEST_HEAD = 100 << 20


def check_weights(folder: Path) -> None:
    """Only the format that tells its own size; others are vLLM's to judge."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            expected = _expected(file)
        except (ValueError, TypeError, KeyError, msgspec.MsgspecError) as error:
            raise _broken(file, f"it is no safetensors file ({error})") from error
        if expected != file.stat().st_size:
            raise _broken(file, f"it has {file.stat().st_size} bytes and should have {expected}")


def _expected(file: Path) -> int:
    """Eight bytes for the length of the head, the head, and as much as its last tensor says."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= _LONGEST_HEAD:
            raise ValueError("its head has no sensible length")
        head = msgspec.json.decode(stream.read(length), type=dict[str, dict[str, Any]])
    ends = [int(tensor["data_offsets"][1]) for name, tensor in head.items() if name != "__metadata__"]
    return 8 + length + max(ends, default=0)


def _broken(file: Path, why: str) -> InvalidRequest:
    return InvalidRequest(f"{file} cannot be loaded: {why}", code="model_unreadable")
