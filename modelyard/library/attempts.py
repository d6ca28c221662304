"""How often a process has died with something that is resumed at a start: a model, saved KV. After two deaths it is set
aside, so that it cannot stop every start. Each has a small file while it is tried, and when it is set aside."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from modelyard.library.cache_dir import data_dir

MAX_DEATHS = 2


class Attempts:
    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or data_dir() / "attempts"

    def begin(self, name: str) -> bool:
        """Whether it may be tried. `end` follows, unless the process dies before."""
        deaths = min(self._deaths(self._file(name)), MAX_DEATHS)
        with suppress(OSError):  # without it a death is not counted
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file(name).write_text(f"{deaths + 1}\n{name}")
        return deaths < MAX_DEATHS

    def end(self, name: str) -> None:
        self._file(name).unlink(missing_ok=True)

    @contextmanager
    def trying(self, name: str) -> Iterator[bool]:
        may_try = self.begin(name)
        try:
            yield may_try
        finally:
            if may_try:
                self.end(name)

    def set_aside(self) -> list[str]:
        found = self._folder.glob("*.tried") if self._folder.is_dir() else ()
        return sorted(file.read_text().partition("\n")[2] for file in found if self._deaths(file) > MAX_DEATHS)

    def _deaths(self, file: Path) -> int:
        try:
            return int(file.read_text().partition("\n")[0])
        except (OSError, ValueError):
            return 0

    def _file(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}.tried"
