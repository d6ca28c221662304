"""Models that are a folder, not a GGUF file: CTranslate2's and Hugging Face's, told apart by what lies in them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from modelyard.library import places

Kind = Literal["ct2", "hf"]


class Folder(Struct, frozen=True):
    """`quant` is empty where nobody has noted it."""

    path: Path
    kind: Kind
    quant: str = ""

    @property
    def size(self) -> int:
        return sum(file.stat().st_size for file in self.path.iterdir() if file.is_file())


class _Note(Struct, frozen=True):
    """What a conversion of ours leaves in its folder, as far as lists show it."""

    quantization: str = ""


def find(path: str) -> Folder | None:
    for place in places.candidates(path):
        if (kind := kind_of(place)) is not None:
            return Folder(place, kind, _quant(place))
    return None


def kind_of(place: Path) -> Kind | None:
    if not place.is_dir():
        return None
    if (place / "model.bin").is_file() and any(
        (place / f"vocabulary.{ending}").is_file() for ending in ("json", "txt")
    ):
        return "ct2"
    if (place / "config.json").is_file() and any(place.glob("*.safetensors")):
        return "hf"
    return None


def _quant(place: Path) -> str:
    try:
        return msgspec.json.decode((place / "modelyard.json").read_bytes(), type=_Note).quantization
    except (OSError, msgspec.MsgspecError):
        return ""
