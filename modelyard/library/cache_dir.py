"""The library's folder in the user's cache, and how several processes share it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: two fetches at once are both done, and the later one replaces the same bytes
    fcntl = None  # type: ignore[assignment]


def cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """$MODELYARD_CACHE, else `modelyard` in $XDG_CACHE_HOME, else ~/.cache/modelyard."""
    if own := env.get("MODELYARD_CACHE"):
        return Path(own).expanduser()
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelyard"


def models_dir(env: Mapping[str, str] = os.environ) -> Path:
    return cache_dir(env) / "models"


@contextmanager
def file_lock(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """One process at a time; the system frees the lock of one that dies. `on_wait` is called where another has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        if fcntl is not None:
            _acquire(file.fileno(), on_wait)
        yield


def _acquire(handle: int, on_wait: Callable[[], None] | None) -> None:
    with suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    if on_wait is not None:
        on_wait()
    fcntl.flock(handle, fcntl.LOCK_EX)
