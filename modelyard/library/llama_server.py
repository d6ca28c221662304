"""The native llama-server that `python setup/llama_server.py` has fetched into the user's cache folder."""

from __future__ import annotations

from pathlib import Path

from modelyard.library.cache_dir import cache_dir

PROGRAM = "llama-server"


def binary_path(folder: Path | None = None) -> Path:
    """The path of the program after it was fetched."""
    return (folder or cache_dir() / "llama-server") / "bin" / PROGRAM
