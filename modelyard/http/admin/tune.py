"""What the optimizer has found so far: one JSON file a run, read from its folder."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger(__name__)

_NEWEST = 50


def runs(folder: Path) -> list[dict[str, Any]]:
    """The newest first. A file that is no result is left out, with a word in the log."""
    files = sorted(folder.glob("*.json"), reverse=True)[:_NEWEST] if folder.is_dir() else []
    return [found for file in files if (found := _run(file)) is not None]


def _run(file: Path) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s is no result of the optimizer: %s", file, error)
        return None
    return {"id": file.stem, **found}
