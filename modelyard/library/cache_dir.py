"""Modelyard's folder in the user's cache, and locks between processes that share it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: concurrent downloads both run, and the later one writes the same bytes
    fcntl = None  # type: ignore[assignment]


def cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """$MODELYARD_CACHE, else `modelyard` in $XDG_CACHE_HOME, else ~/.cache/modelyard."""
    if configured := env.get("MODELYARD_CACHE"):
        return Path(configured).expanduser()
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelyard"


def models_dir(env: Mapping[str, str] = os.environ) -> Path:
    return cache_dir(env) / "models"


@contextmanager
def file_lock(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """An exclusive lock; the system releases it if the process dies. `on_wait` is called if another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait is not None:
                    on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
