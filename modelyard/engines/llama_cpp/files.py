"""Which file a model path means: itself, or the first GGUF file of a folder."""

from __future__ import annotations

from pathlib import Path

from modelyard.core.errors import NotFound


def find(path: str) -> Path:
    place = Path(path).expanduser()
    if place.is_dir():
        files = sorted(place.glob("*.gguf"))
        if not files:
            raise NotFound(f"{place} holds no GGUF file", code="model_file_missing")
        return files[0]
    if not place.exists():
        raise NotFound(f"there is no model file {place}", code="model_file_missing")
    return place
