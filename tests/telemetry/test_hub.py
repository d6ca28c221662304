from __future__ import annotations

import asyncio
import stat
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from modelyard.telemetry.metrics import MetricsSnapshot, encode_snapshot, render_snapshots
from modelyard.telemetry.metrics_hub import (
    CollectReply,
    CollectRequest,
    MessageStream,
    MetricsHub,
    SnapshotPush,
    SnapshotRequest,
    for_child,
)
from tests.telemetry.reading import values

_ForChild = MessageStream[SnapshotRequest | CollectReply]


@asynccontextmanager
async def _hub(deadline_s: float = 60.0) -> AsyncIterator[MetricsHub]:
    hub = MetricsHub(deadline_s)
    await hub.open()
    try:
        yield hub
    finally:
        await hub.close()


async def _child(hub: MetricsHub) -> _ForChild:
    return MessageStream(*await asyncio.open_unix_connection(hub.path), for_child)


def _errors(count: float, waiting: float = 0) -> bytes:
    return encode_snapshot(MetricsSnapshot({"errors_total": {("x",): count}}, {"queue_waiting": {("m",): waiting}}))


async def _answer(child: _ForChild, snapshot: bytes) -> None:
    message = await child.receive()
    assert isinstance(message, SnapshotRequest)
    child.send(SnapshotPush(snapshot, message.id))


async def _introduce(hub: MetricsHub, snapshot: bytes) -> _ForChild:
    """A child that the hub has heard of: without the round trip a gather could come before the connection."""
    child = await _child(hub)
    child.send(SnapshotPush(snapshot))
    child.send(CollectRequest(1))
    await _answer(child, snapshot)
    assert isinstance(await child.receive(), CollectReply)
    return child


def _mode(path: Path) -> int | None:
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else None


async def test_the_socket_is_private_and_gone_afterwards() -> None:
    async with _hub() as hub:
        folder = Path(hub.path).parent
        assert _mode(folder) == 0o700
    assert _mode(folder) is None


async def test_a_gather_asks_every_child_afresh() -> None:
    async with _hub() as hub:
        children = [await _introduce(hub, _errors(1))]
        gathering = asyncio.create_task(hub.gather())
        await _answer(children[0], _errors(5, waiting=2))
        text = render_snapshots(await gathering)
        assert values(text, "errors_total") == {("x",): 5}
        assert values(text, "queue_waiting") == {("m",): 2}
        await children[0].close()


async def test_a_late_child_counts_with_the_last_that_was_heard() -> None:
    async with _hub(deadline_s=0.01) as hub:
        late = await _introduce(hub, _errors(3))
        assert values(render_snapshots(await hub.gather()), "errors_total") == {("x",): 3}
        await late.close()


async def test_the_dead_leave_their_counters_once_and_none_of_their_gauges() -> None:
    async with _hub() as hub:
        dead = await _introduce(hub, _errors(3, waiting=4))
        await dead.close()
        for _ in range(2):
            text = render_snapshots(await hub.gather())
            assert values(text, "errors_total") == {("x",): 3}
        assert values(text, "queue_waiting") == {}


async def test_a_child_that_dies_while_asked_holds_nobody_up() -> None:
    async with _hub(deadline_s=3600) as hub:
        child = await _introduce(hub, _errors(3))
        gathering = asyncio.create_task(hub.gather())
        assert isinstance(await child.receive(), SnapshotRequest)
        await child.close()
        async with asyncio.timeout(60):
            assert values(render_snapshots(await gathering), "errors_total") == {("x",): 3}


async def test_a_temporary_folder_too_long_for_a_socket_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    async with _hub() as hub:
        assert len(hub.path) < 100
    assert list(long.iterdir()) == []
