"""Which weights a file holds, by a hash that is cheap and honest: its size, its head, and a sample from all over it.

Two models of one shape differ nearly everywhere, so a sample every few tensors tells them apart; reading every byte of
a large model would take longer than what is saved by knowing it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from modelyard.core.request import Priority
from modelyard.engines.llama_cpp.kv_memory import KvBytes, KvLayout
from modelyard.engines.llama_cpp.sequences import AdapterSet, Checkpoint, Checkpoints, Ids

_HEAD = 8 << 20  # names, shapes and most of the vocabulary
_SAMPLES, _SAMPLE = 1024, 4096


def file_identity(files: Iterable[Path]) -> str:
    """Of all files of one model, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as data:
            digest.update(data.read(_HEAD))
            for place in sample_offsets(size):
                data.seek(place)
                digest.update(data.read(_SAMPLE))
    return digest.hexdigest()


def sample_offsets(size: int) -> list[int]:
    """Where samples begin behind the head; the last one ends the file."""
    rest = size - _HEAD
    if rest <= 0:
        return []
    apart = max(_SAMPLE, rest // _SAMPLES)
    return [*range(_HEAD, size - _SAMPLE, apart), max(_HEAD, size - _SAMPLE)]


# A sequence's KV as the bytes of a file: a head that says what it was computed from, and a checksum over all of it.
#
#     magic · version · length of the head · head (JSON) · token ids · state · checkpoints · checksum
#
# Nothing of a file reaches llama.cpp before every field of its head was found to agree with what runs here and the
# checksum was found to be right.

_MAGIC, _VERSION = b"MYARD-KV", 1
_FRONT = struct.Struct("<8sII")
_LONGEST_HEAD = 1 << 20
_CHECKSUM = 32
_PIECE = 64 << 20

Bytes = bytes | memoryview
AdapterVersions = tuple[tuple[str, float, str], ...]  # name, strength in effect, identity of the adapter's file


class KvOrigin(Struct, frozen=True):
    """What the KV of a cache is computed from, but for tokens and adapters: all of it must agree."""

    release: str
    model: str  # the identity of its files
    cache: str
    window: int
    layout: KvLayout
    positions: dict[str, Any]  # as far as settings change them


class KvSnapshot(Struct, frozen=True):
    """One sequence. `session` is a hash: the name may hold what is nobody's to read."""

    tokens: Ids
    state: KvBytes
    checkpoints: Checkpoints = ()
    session: str | None = None
    adapters: AdapterSet = ()
    priority: Priority = "main"
    worn: AdapterVersions = ()

    @property
    def size(self) -> int:
        return int(self.tokens.nbytes + self.state.nbytes) + sum(one.size for one in self.checkpoints)


class SnapshotHeader(Struct, frozen=True):
    origin: KvOrigin
    adapters: AdapterSet
    worn: AdapterVersions
    session: str | None
    priority: Priority
    tokens: int
    state: int  # bytes, as the second number of each checkpoint
    checkpoints: tuple[tuple[int, int], ...]

    @property
    def payload(self) -> int:
        return 4 * self.tokens + self.state + sum(size for _, size in self.checkpoints)


class SnapshotMismatch(Exception):
    """Why a file cannot be used."""


def hash_session(session: str | None) -> str | None:
    if session is None:
        return None
    return hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=16, person=b"modelyard-kv").hexdigest()


def origin_differences(there: KvOrigin, here: KvOrigin) -> list[str]:
    """What does not agree, in words."""
    old, new = _flat(there), _flat(here)
    return [
        f"{name} was {old.get(name)} and is {new.get(name)}" for name in new | old if old.get(name) != new.get(name)
    ]


def _flat(origin: KvOrigin) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(origin)
    layout, positions = facts.pop("layout"), facts.pop("positions")
    return {**facts, **layout, **positions}


# --- the bytes of a file ----------------------------------------------------------------------------------------------


def encode_snapshot(origin: KvOrigin, image: KvSnapshot) -> Iterator[Bytes]:
    """A file's bytes, in pieces."""
    sizes = tuple((one.tokens, one.size) for one in image.checkpoints)
    tokens = np.ascontiguousarray(image.tokens, np.int32)
    head = msgspec.json.encode(
        SnapshotHeader(
            origin,
            image.adapters,
            image.worn,
            image.session,
            image.priority,
            len(tokens),
            image.state.nbytes,
            sizes,
        )
    )
    digest = hashlib.blake2b(digest_size=_CHECKSUM)
    whole = (tokens.view(np.uint8), image.state, *(one.data for one in image.checkpoints))
    front: list[Bytes] = [_FRONT.pack(_MAGIC, _VERSION, len(head)), head]
    for piece in chain(front, *map(_pieces, whole)):
        digest.update(piece)
        yield piece
    yield digest.digest()


def _pieces(data: KvBytes) -> Iterator[memoryview]:
    view = data.data
    yield from (view[at : at + _PIECE] for at in range(0, data.nbytes, _PIECE))


def decode_snapshot(file: BufferedReader, size: int, check: Callable[[SnapshotHeader], None]) -> KvSnapshot:
    """`check` raises where the head does not fit: then the rest is not even read."""
    front = file.read(_FRONT.size)
    if len(front) < _FRONT.size or not front.startswith(_MAGIC):
        raise SnapshotMismatch("it is no file of saved KV")
    _, version, length = _FRONT.unpack(front)
    if version != _VERSION:
        raise SnapshotMismatch(f"it is of version {version} and this program writes {_VERSION}")
    if length > _LONGEST_HEAD:
        raise SnapshotMismatch("it is damaged: its head is too long")
    raw = file.read(length)
    head = _head(raw)
    if size != _FRONT.size + length + head.payload + _CHECKSUM:
        raise SnapshotMismatch("it is damaged: it has another size than its head says")
    check(head)
    return _image(head, _verified(file, front + raw, head.payload))


def _head(raw: bytes) -> SnapshotHeader:
    try:
        head = msgspec.json.decode(raw, type=SnapshotHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SnapshotMismatch(f"it is damaged: its head cannot be read ({error})") from error
    if min(head.tokens - 1, head.state - 1, *(min(pair) for pair in head.checkpoints), 0) < 0:
        raise SnapshotMismatch("it is damaged: its head tells of nothing")
    return head


def _verified(file: BufferedReader, before: bytes, size: int) -> KvBytes:
    data = np.empty(size, np.uint8)
    digest = hashlib.blake2b(before, digest_size=_CHECKSUM)
    for piece in _pieces(data):
        if file.readinto(piece) != len(piece):
            raise SnapshotMismatch("it is damaged: it ends too early")
        digest.update(piece)
    if file.read(_CHECKSUM + 1) != digest.digest():
        raise SnapshotMismatch("it is damaged: its checksum is wrong")
    return data


def _image(head: SnapshotHeader, data: KvBytes) -> KvSnapshot:
    sizes = [4 * head.tokens, head.state, *(size for _, size in head.checkpoints)]
    tokens, state, *states = np.split(data, np.cumsum(sizes)[:-1])
    places = (place for place, _ in head.checkpoints)
    held = tuple(Checkpoint(place, state_) for place, state_ in zip(places, states, strict=True))
    return KvSnapshot(tokens.view(np.int32), state, held, head.session, head.adapters, head.priority, head.worn)
