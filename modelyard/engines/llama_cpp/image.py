"""A sequence's KV as the bytes of a file: a head that says what it was computed from, and a checksum over all of it.

    magic · version · length of the head · head (JSON) · token ids · state · checkpoints · checksum

Nothing of a file reaches llama.cpp before every field of its head was found to agree with what runs here and the
checksum was found to be right.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from io import BufferedReader
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from modelyard.core.request import Priority
from modelyard.engines.llama_cpp.checkpoints import Checkpoint, Held
from modelyard.engines.llama_cpp.sequences import Adapters, Ids
from modelyard.engines.llama_cpp.state import Data, Layout

_MAGIC, _VERSION = b"MYARD-KV", 1
_FRONT = struct.Struct("<8sII")
_LONGEST_HEAD = 1 << 20
_CHECKSUM = 32
_PIECE = 64 << 20

Bytes = bytes | memoryview
Worn = tuple[tuple[str, float, str], ...]  # name, strength in effect, identity of the adapter's file


class Origin(Struct, frozen=True):
    """What the KV of a cache is computed from, but for tokens and adapters: all of it must agree."""

    release: str
    model: str  # the identity of its files
    cache: str
    window: int
    layout: Layout
    positions: dict[str, Any]  # as far as settings change them


class Image(Struct, frozen=True):
    """One sequence. `session` is a hash: the name may hold what is nobody's to read."""

    tokens: Ids
    state: Data
    checkpoints: Held = ()
    session: str | None = None
    adapters: Adapters = ()
    priority: Priority = "main"
    worn: Worn = ()

    @property
    def size(self) -> int:
        return int(self.tokens.nbytes + self.state.nbytes) + sum(one.size for one in self.checkpoints)


class Head(Struct, frozen=True):
    origin: Origin
    adapters: Adapters
    worn: Worn
    session: str | None
    priority: Priority
    tokens: int
    state: int  # bytes, as the second number of each checkpoint
    checkpoints: tuple[tuple[int, int], ...]

    @property
    def payload(self) -> int:
        return 4 * self.tokens + self.state + sum(size for _, size in self.checkpoints)


class Unfit(Exception):
    """Why a file cannot be used."""


def hashed(session: str | None) -> str | None:
    if session is None:
        return None
    return hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=16, person=b"modelyard-kv").hexdigest()


def differences(there: Origin, here: Origin) -> list[str]:
    """What does not agree, in words."""
    old, new = _flat(there), _flat(here)
    return [
        f"{name} was {old.get(name)} and is {new.get(name)}" for name in new | old if old.get(name) != new.get(name)
    ]


def _flat(origin: Origin) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(origin)
    layout, positions = facts.pop("layout"), facts.pop("positions")
    return {**facts, **layout, **positions}


# --- the bytes of a file ----------------------------------------------------------------------------------------------


def pack(origin: Origin, image: Image) -> Iterator[Bytes]:
    """A file's bytes, in pieces."""
    sizes = tuple((one.tokens, one.size) for one in image.checkpoints)
    tokens = np.ascontiguousarray(image.tokens, np.int32)
    head = msgspec.json.encode(
        Head(
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


def _pieces(data: Data) -> Iterator[memoryview]:
    view = data.data
    yield from (view[at : at + _PIECE] for at in range(0, data.nbytes, _PIECE))


def unpack(file: BufferedReader, size: int, check: Callable[[Head], None]) -> Image:
    """`check` raises where the head does not fit: then the rest is not even read."""
    front = file.read(_FRONT.size)
    if len(front) < _FRONT.size or not front.startswith(_MAGIC):
        raise Unfit("it is no file of saved KV")
    _, version, length = _FRONT.unpack(front)
    if version != _VERSION:
        raise Unfit(f"it is of version {version} and this program writes {_VERSION}")
    if length > _LONGEST_HEAD:
        raise Unfit("it is damaged: its head is too long")
    raw = file.read(length)
    head = _head(raw)
    if size != _FRONT.size + length + head.payload + _CHECKSUM:
        raise Unfit("it is damaged: it has another size than its head says")
    check(head)
    return _image(head, _verified(file, front + raw, head.payload))


def _head(raw: bytes) -> Head:
    try:
        head = msgspec.json.decode(raw, type=Head)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unfit(f"it is damaged: its head cannot be read ({error})") from error
    if min(head.tokens - 1, head.state - 1, *(min(pair) for pair in head.checkpoints), 0) < 0:
        raise Unfit("it is damaged: its head tells of nothing")
    return head


def _verified(file: BufferedReader, before: bytes, size: int) -> Data:
    data = np.empty(size, np.uint8)
    digest = hashlib.blake2b(before, digest_size=_CHECKSUM)
    for piece in _pieces(data):
        if file.readinto(piece) != len(piece):
            raise Unfit("it is damaged: it ends too early")
        digest.update(piece)
    if file.read(_CHECKSUM + 1) != digest.digest():
        raise Unfit("it is damaged: its checksum is wrong")
    return data


def _image(head: Head, data: Data) -> Image:
    sizes = [4 * head.tokens, head.state, *(size for _, size in head.checkpoints)]
    tokens, state, *states = np.split(data, np.cumsum(sizes)[:-1])
    places = (place for place, _ in head.checkpoints)
    held = tuple(Checkpoint(place, state_) for place, state_ in zip(places, states, strict=True))
    return Image(tokens.view(np.int32), state, held, head.session, head.adapters, head.priority, head.worn)
