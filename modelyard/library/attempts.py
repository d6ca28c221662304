"""How often a process has died with something that is resumed at a start: a model, saved KV. After two deaths it is set
aside, so that it cannot stop every start. Each has a small file for each process that tries it, or has died with it."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from modelyard.library.cache_dir import data_dir

MAX_DEATHS = 2
_CLOCK_S = 5  # by which two readings of a process's start may differ


class Attempts:
    """`identity` tells things of one name apart: a model that was changed is tried again."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or data_dir() / "attempts"

    def begin(self, name: str, identity: str = "") -> bool:
        """Whether it may be tried. `end` or `stop` follows, unless the process dies before."""
        if self.deaths(name, identity) >= MAX_DEATHS:
            return False
        with suppress(OSError):  # without it a death is not counted
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            process = f"{os.getpid()}-{psutil.Process().create_time():.0f}"
            (self._folder / f"{_digest(name, identity)}.{process}").write_text(name)
        return True

    def deaths(self, name: str, identity: str = "") -> int:
        return sum(map(self._is_to_blame, self._files(name, identity)))

    def _is_to_blame(self, file: Path) -> bool:
        """Whether a process has died with it. A model is not to blame if saved KV was being read into it."""
        others = [each for each in self._folder.glob(f"*{file.suffix}") if each != file]
        return _is_dead(file) and not (
            file.read_text().startswith("model ") and any(each.read_text().startswith("kv ") for each in others)
        )

    def stop(self, name: str, identity: str = "") -> None:
        """This process has neither survived it nor died with it: it ends."""
        for file in self._files(name, identity):
            if file.suffix.startswith(f".{os.getpid()}-"):
                file.unlink(missing_ok=True)

    def end(self, name: str, identity: str = "") -> None:
        """It has not killed this process: earlier deaths do not count any more."""
        for file in self._files(name, identity):
            if file.suffix.startswith(f".{os.getpid()}-") or _is_dead(file):
                file.unlink(missing_ok=True)

    @contextmanager
    def trying(self, name: str) -> Iterator[bool]:
        may_try = self.begin(name)
        try:
            yield may_try
        finally:
            if may_try:
                self.end(name)

    def set_aside(self) -> list[str]:
        found = self._folder.glob("*.*") if self._folder.is_dir() else ()
        dead = [file for file in found if self._is_to_blame(file)]
        often = {stem for stem, deaths in Counter(file.stem for file in dead).items() if deaths >= MAX_DEATHS}
        return sorted({file.read_text() for file in dead if file.stem in often})

    def _files(self, name: str, identity: str) -> list[Path]:
        return list(self._folder.glob(f"{_digest(name, identity)}.*")) if self._folder.is_dir() else []


def _digest(name: str, identity: str) -> str:
    return hashlib.sha256(os.fsencode(f"{name}\n{identity}")).hexdigest()[:32]


def _is_dead(file: Path) -> bool:
    """The process that is named at the file's end, with the time of its start: ids are used again."""
    pid, _, started = file.suffix[1:].partition("-")
    try:
        return abs(psutil.Process(int(pid)).create_time() - int(started)) > _CLOCK_S
    except (psutil.Error, ValueError):
        return True
