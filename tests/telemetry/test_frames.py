from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from modelyard.telemetry.metrics_hub import (
    CollectReply,
    CollectRequest,
    MessageStream,
    SnapshotPush,
    SnapshotRequest,
    for_child,
    for_hub,
)


@asynccontextmanager
async def _ends() -> AsyncIterator[
    tuple[MessageStream[SnapshotPush | CollectRequest], MessageStream[SnapshotRequest | CollectReply], socket.socket]
]:
    """The hub's end, a child's end, and the child's bare socket for bytes that are no frame."""
    ours, theirs = socket.socketpair()
    hub = MessageStream(*await asyncio.open_unix_connection(sock=ours), for_hub)
    child = MessageStream(*await asyncio.open_unix_connection(sock=theirs), for_child)
    try:
        yield hub, child, theirs
    finally:
        await hub.close()
        await child.close()


async def test_messages_for_the_hub_arrive_as_they_were_sent() -> None:
    sent = [SnapshotPush(b"\x00\xff", 3), CollectRequest(7), SnapshotPush(b"")]
    async with _ends() as (hub, child, _):
        for message in sent:
            child.send(message)
        assert [await hub.receive() for _ in sent] == sent


async def test_messages_for_a_child_arrive_as_they_were_sent() -> None:
    async with _ends() as (hub, child, _):
        hub.send(SnapshotRequest(1))
        hub.send(CollectReply(2, [b"a", b"b"]))
        assert [await child.receive(), await child.receive()] == [SnapshotRequest(1), CollectReply(2, [b"a", b"b"])]


async def test_what_is_sent_to_a_closed_end_is_nobodys_business() -> None:
    async with _ends() as (hub, child, _):
        await child.close()
        child.send(CollectRequest(1))
        assert await hub.receive() is None


@pytest.mark.parametrize(
    "data", [b"", b"\x00\x00", b"\x00\x00\x00\x05ab", b"\xff\xff\xff\xffabc", b"\x00\x00\x00\x02ab"]
)
async def test_a_broken_or_ended_stream_is_the_end(data: bytes) -> None:
    async with _ends() as (hub, _, bare):
        bare.send(data)
        bare.shutdown(socket.SHUT_WR)
        assert await hub.receive() is None
