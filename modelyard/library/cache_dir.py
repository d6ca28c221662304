"""Modelyard's folders: the user's cache, the user's data, and a private one for sockets and keys; locks between
processes."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from modelyard.core.errors import InvalidRequest

try:
    import fcntl
except ImportError:  # Windows: concurrent downloads both run, and the later one writes the same bytes
    fcntl = None  # type: ignore[assignment]


def cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """$MODELYARD_CACHE, else `modelyard` in $XDG_CACHE_HOME, else ~/.cache/modelyard."""
    if configured := env.get("MODELYARD_CACHE"):
        return Path(configured).expanduser()
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "modelyard"


def data_dir(env: Mapping[str, str] = os.environ, platform: str = sys.platform) -> Path:
    """In $XDG_DATA_HOME, else in the platform's folder for data: for what must outlive the cache, which may be
    deleted."""
    if configured := env.get("XDG_DATA_HOME"):
        folder = Path(configured)
    elif platform == "win32":
        folder = Path(env.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif platform == "darwin":
        folder = Path.home() / "Library" / "Application Support"
    else:
        folder = Path.home() / ".local" / "share"
    return folder / "modelyard"


def models_dir(env: Mapping[str, str] = os.environ) -> Path:
    return cache_dir(env) / "models"


def run_dir(env: Mapping[str, str] = os.environ) -> Path:
    """The folder of sockets and keys, which no other user can enter. It is created if it is missing."""
    folder = cache_dir(env) / "run"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if sys.platform == "win32":
        return folder  # in the user's profile, which other users cannot enter
    if folder.stat().st_uid == os.geteuid():
        folder.chmod(0o700)  # older versions created it with the umask's mode
    check_private(folder)
    return folder


def check_private(folder: Path) -> None:
    """Raise if another user can enter this folder or replace what is in it."""
    try:
        found = folder.lstat()
    except OSError as error:
        raise InvalidRequest(f"cannot use the folder {folder}: {error.strerror}", code="folder_unusable") from None
    if not stat.S_ISDIR(found.st_mode):
        reason = "it is not a folder (a link is not followed)"
    elif found.st_uid != os.geteuid():
        reason = "it belongs to another user; choose a folder of your own"
    elif found.st_mode & 0o077:
        reason = f"other users can enter it: chmod 700 {folder}"
    else:
        return
    raise InvalidRequest(f"sockets in {folder} would not be private: {reason}", code="folder_not_private")


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
