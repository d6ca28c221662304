"""The journal of a run: every outcome on a line of its own, so that a run that was broken off goes on where it was.

A search asks the same questions when it gets the same answers: those that stand here are given again, in their order,
and only what comes after them is measured.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.core.knobs import Setting
from modelyard.tune.order import Outcome

log = logging.getLogger(__name__)


class Entry(Struct, frozen=True):
    setting: Setting
    loss: bool
    outcome: Outcome


class Journal:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._kept: dict[tuple[Setting, bool], deque[Outcome]] = defaultdict(deque)
        for entry in _entries(file):
            self._kept[entry.setting, entry.loss].append(entry.outcome)

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def take(self, setting: Setting, loss: bool) -> Outcome | None:
        """An outcome of the broken-off run that was not given yet."""
        kept = self._kept.get((setting, loss))
        return kept.popleft() if kept else None

    def add(self, setting: Setting, loss: bool, outcome: Outcome) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as file:
            file.write(msgspec.json.encode(Entry(setting, loss, outcome)) + b"\n")

    def forget(self) -> None:
        """The run is over: the next one measures anew."""
        self._kept.clear()
        self._file.unlink(missing_ok=True)


def fingerprint(*parts: Any) -> str:
    """Of all that an outcome depends on: another model, goal or machine has another journal."""
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:16]


def _entries(file: Path) -> list[Entry]:
    lines = file.read_bytes().splitlines() if file.is_file() else []
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Entry))
        except msgspec.MsgspecError:  # the last line of a process that was killed while it wrote
            log.warning("%s has a line that is no outcome; it will be measured again", file)
    return found
