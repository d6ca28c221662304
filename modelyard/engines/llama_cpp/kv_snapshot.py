"""A sequence's KV as the bytes of a file: a header that says what it was computed from, and a checksum over all of it.

    magic · version · length of the header · header (JSON) · token ids · state · checkpoints · checksum

Nothing of a file reaches llama.cpp before every field of its header agrees with the running engine and the checksum is
right.
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
from modelyard.engines.llama_cpp.sequences import ALL, AdapterSet, Checkpoint, Checkpoints, TokenIds

_MAGIC, _VERSION = b"MYARD-KV", 2
_PREFIX = struct.Struct("<8sII")
_MAX_HEADER = 1 << 20
_CHECKSUM = 32
_PIECE = 64 << 20

Buffer = bytes | memoryview
AdapterVersions = tuple[tuple[str, float, str], ...]  # name, effective scale, identity of the adapter's file


class KvOrigin(Struct, frozen=True):
    """What the KV of a cache is computed from, besides tokens and adapters. All of it must agree."""

    release: str
    model: str  # identity of its files
    cache: str
    window: int
    layout: KvLayout
    positions: dict[str, Any]  # RoPE options that are set


class KvSnapshot(Struct, frozen=True):
    """One sequence. `session` is a hash, because session names may be private. `scope` is as in `Prompt`."""

    tokens: TokenIds
    state: KvBytes
    checkpoints: Checkpoints = ()
    session: str | None = None
    adapters: AdapterSet = ()
    priority: Priority = "main"
    adapter_versions: AdapterVersions = ()
    scope: str = ""
    exact: int = ALL  # as in `SequenceSlot`, like the next two, which are not in its file
    file: str | None = None
    saved: int = 0

    @property
    def size(self) -> int:
        return int(self.tokens.nbytes + self.state.nbytes) + sum(each.size for each in self.checkpoints)


class SnapshotHeader(Struct, frozen=True):
    origin: KvOrigin
    adapters: AdapterSet
    adapter_versions: AdapterVersions
    session: str | None
    priority: Priority
    tokens: int
    state: int  # bytes
    checkpoints: tuple[tuple[int, int], ...]  # tokens and bytes of each
    scope: str = ""
    exact: int = ALL

    @property
    def payload(self) -> int:
        return 4 * self.tokens + self.state + sum(size for _, size in self.checkpoints)


class StoredKv(Struct, frozen=True):
    """A snapshot that is in a file only: what it holds, without its KV."""

    file: str
    tokens: TokenIds
    size: int  # bytes
    checkpoints: Checkpoints
    session: str | None
    adapters: AdapterSet
    scope: str
    exact: int


class SnapshotMismatch(Exception):
    """Why a file cannot be used."""


def hash_session(session: str | None) -> str | None:
    if session is None:
        return None
    return hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=16, person=b"modelyard-kv").hexdigest()


def origin_differences(stored: KvOrigin, current: KvOrigin) -> list[str]:
    old, new = _flatten(stored), _flatten(current)
    return [
        f"{name} was {old.get(name)} and is {new.get(name)}" for name in new | old if old.get(name) != new.get(name)
    ]


def _flatten(origin: KvOrigin) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(origin)
    layout, positions = fields.pop("layout"), fields.pop("positions")
    return {**fields, **layout, **positions}


# --- bytes ------------------------------------------------------------------------------------------------------------


def encode_snapshot(origin: KvOrigin, snapshot: KvSnapshot) -> Iterator[Buffer]:
    """The bytes of a file, in pieces."""
    tokens = np.ascontiguousarray(snapshot.tokens, np.int32)
    header = SnapshotHeader(
        origin,
        snapshot.adapters,
        snapshot.adapter_versions,
        snapshot.session,
        snapshot.priority,
        len(tokens),
        snapshot.state.nbytes,
        tuple((each.tokens, each.size) for each in snapshot.checkpoints),
        snapshot.scope,
        snapshot.exact,
    )
    encoded = msgspec.json.encode(header)
    arrays = (tokens.view(np.uint8), snapshot.state, *(each.data for each in snapshot.checkpoints))
    head: list[Buffer] = [_PREFIX.pack(_MAGIC, _VERSION, len(encoded)), encoded]
    digest = hashlib.blake2b(digest_size=_CHECKSUM)
    for piece in chain(head, *map(_pieces, arrays)):
        digest.update(piece)
        yield piece
    yield digest.digest()


def _pieces(data: KvBytes) -> Iterator[memoryview]:
    view = data.data
    yield from (view[at : at + _PIECE] for at in range(0, data.nbytes, _PIECE))


def _read_header(
    file: BufferedReader, size: int, check: Callable[[SnapshotHeader], None]
) -> tuple[SnapshotHeader, bytes]:
    """The header and all bytes up to its end. `check` raises if the header does not fit."""
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
        raise SnapshotMismatch("it is not a file of saved KV")
    _, version, length = _PREFIX.unpack(prefix)
    if version != _VERSION:
        raise SnapshotMismatch(f"it has version {version}, and this program writes version {_VERSION}")
    if length > _MAX_HEADER:
        raise SnapshotMismatch("it is damaged: its header is too long")
    encoded = file.read(length)
    header = _decode_header(encoded)
    if size != _PREFIX.size + length + header.payload + _CHECKSUM:
        raise SnapshotMismatch("it is damaged: its size differs from its header")
    check(header)
    return header, prefix + encoded


def decode_stored(file: BufferedReader, size: int, check: Callable[[SnapshotHeader], None]) -> StoredKv:
    """Reads no KV. Its checksum is compared when that is read."""
    header, _ = _read_header(file, size, check)
    tokens = np.frombuffer(file.read(4 * header.tokens), np.int32)
    if len(tokens) != header.tokens:
        raise SnapshotMismatch("it is damaged: it ends too early")
    at = tuple(Checkpoint(count, np.zeros(0, np.uint8)) for count, _ in header.checkpoints)
    rest = (at, header.session, header.adapters, header.scope, header.exact)
    return StoredKv(file.name, tokens, header.payload, *rest)


def decode_snapshot(file: BufferedReader, size: int, check: Callable[[SnapshotHeader], None]) -> KvSnapshot:
    """If the header does not fit the rest is not read."""
    header, head = _read_header(file, size, check)
    payload = _read_payload(file, head, header.payload)
    sizes = [4 * header.tokens, header.state, *(size for _, size in header.checkpoints)]
    tokens, state, *states = np.split(payload, np.cumsum(sizes)[:-1])
    return KvSnapshot(
        tokens.view(np.int32),
        state,
        tuple(Checkpoint(at, data) for (at, _), data in zip(header.checkpoints, states, strict=True)),
        header.session,
        header.adapters,
        header.priority,
        header.adapter_versions,
        header.scope,
        header.exact,
    )


def _decode_header(encoded: bytes) -> SnapshotHeader:
    try:
        header = msgspec.json.decode(encoded, type=SnapshotHeader)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise SnapshotMismatch(f"it is damaged: its header cannot be read ({error})") from error
    if min(header.tokens - 1, header.state - 1, *(min(pair) for pair in header.checkpoints), 0) < 0:
        raise SnapshotMismatch("it is damaged: its header has no tokens or no state")
    return header


def _read_payload(file: BufferedReader, head: bytes, size: int) -> KvBytes:
    data = np.empty(size, np.uint8)
    digest = hashlib.blake2b(head, digest_size=_CHECKSUM)
    for piece in _pieces(data):
        if file.readinto(piece) != len(piece):
            raise SnapshotMismatch("it is damaged: it ends too early")
        digest.update(piece)
    if file.read(_CHECKSUM + 1) != digest.digest():
        raise SnapshotMismatch("it is damaged: its checksum is wrong")
    return data


# --- identity of weights ----------------------------------------------------------------------------------------------
#
# A hash of each file's size, its head, and a sample from all over it. Two models of one shape differ nearly everywhere,
# so samples tell them apart; reading every byte of a large model would take longer than the KV saves.

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
            for offset in sample_offsets(size):
                data.seek(offset)
                digest.update(data.read(_SAMPLE))
    return digest.hexdigest()


def sample_offsets(size: int) -> list[int]:
    """Of the samples after the head; the last one ends the file."""
    rest = size - _HEAD
    if rest <= 0:
        return []
    step = max(_SAMPLE, rest // _SAMPLES)
    return [*range(_HEAD, size - _SAMPLE, step), max(_HEAD, size - _SAMPLE)]
