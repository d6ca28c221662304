"""The messages between gateway processes and their hub, grouped by who receives them, and how they are framed."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

T = TypeVar("T")

_MAX_FRAME = 64 * 1024**2

# --- for the hub ----------------------------------------------------------------------------------------------------


class Push(Struct, frozen=True, tag=True):
    """A child's snapshot: now and then on its own, or as the answer to `Want`."""

    snapshot: bytes
    answers: int = 0


class Ask(Struct, frozen=True, tag=True):
    """A child is being scraped and wants everybody's snapshots."""

    id: int


# --- for a child ----------------------------------------------------------------------------------------------------


class Want(Struct, frozen=True, tag=True):
    id: int


class Everything(Struct, frozen=True, tag=True):
    """The answer to `Ask`."""

    id: int
    snapshots: list[bytes]


class Frames(Generic[T]):
    """A stream of messages: four bytes of length, then MessagePack. `T` is what comes in."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[T]
    ) -> None:
        self._reader, self._writer, self._decoder = reader, writer, decoder

    async def receive(self) -> T | None:
        """The next message, or None when the other side is gone, in whatever way."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            if size > _MAX_FRAME:
                return None
            return self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
            return None

    def send(self, message: Struct) -> None:
        data = _encoder.encode(message)
        if not self._writer.is_closing():
            self._writer.write(len(data).to_bytes(4, "big") + data)

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return  # the other side was faster


_encoder = msgspec.msgpack.Encoder()
for_hub = msgspec.msgpack.Decoder(Push | Ask)
for_child = msgspec.msgpack.Decoder(Want | Everything)
