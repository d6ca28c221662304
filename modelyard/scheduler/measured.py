"""What each model really took when it was last loaded, remembered between runs in a small file."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
from msgspec import Struct

log = logging.getLogger(__name__)

_KEPT = 256  # of the newest


class Measured(Struct, frozen=True):
    """`bytes` is None where only the time is known: another load at the same time makes the bytes nobody's."""

    bytes: int | None
    load_s: float


class Ledger:
    """By the identity of a blueprint: another window or another file is another entry. No path: it forgets."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._entries: dict[str, Measured] = _read(path) if path is not None else {}

    def get(self, identity: str) -> Measured | None:
        return self._entries.get(identity)

    def put(self, identity: str, measured: Measured) -> None:
        old = self._entries.pop(identity, None)
        if measured.bytes is None and old is not None:
            measured = Measured(old.bytes, measured.load_s)
        self._entries[identity] = measured
        while len(self._entries) > _KEPT:
            del self._entries[next(iter(self._entries))]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self._entries), indent=1)

    def save(self, content: bytes) -> None:
        """To be called in a thread. What cannot be written is only not remembered."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # A name of its own: two servers that write at once must not write into one another's file.
            fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            fresh.write_bytes(content)
            fresh.replace(self._path)
        except OSError as error:
            log.warning("what models took of memory is not remembered: %s", error)


def _read(path: Path) -> dict[str, Measured]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Measured])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("%s cannot be read and is made anew: %s", path, error)
        return {}
