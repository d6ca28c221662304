"""Whether a folder's weights are whole, by the heads of its files: vLLM finds out late, and in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from modelyard.core.errors import InvalidRequest

_LONGEST_HEAD = 100 << 20


def check(folder: Path) -> None:
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
