"""Which weights a file holds, by a hash that is cheap and honest: its size, its head, and a sample from all over it.

Two models of one shape differ nearly everywhere, so a sample every few tensors tells them apart; reading every byte of
a large model would take longer than what is saved by knowing it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

_HEAD = 8 << 20  # names, shapes and most of the vocabulary
_SAMPLES, _SAMPLE = 1024, 4096


def identity(files: Iterable[Path]) -> str:
    """Of all files of one model, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as data:
            digest.update(data.read(_HEAD))
            for place in samples(size):
                data.seek(place)
                digest.update(data.read(_SAMPLE))
    return digest.hexdigest()


def samples(size: int) -> list[int]:
    """Where samples begin behind the head; the last one ends the file."""
    rest = size - _HEAD
    if rest <= 0:
        return []
    apart = max(_SAMPLE, rest // _SAMPLES)
    return [*range(_HEAD, size - _SAMPLE, apart), max(_HEAD, size - _SAMPLE)]
