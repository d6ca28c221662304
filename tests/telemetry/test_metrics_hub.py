from __future__ import annotations

import asyncio
import socket
import stat
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from modelyard.telemetry.metrics import Metrics, MetricsSnapshot, encode_snapshot, render_snapshots
from modelyard.telemetry.metrics_hub import (
    CollectReply,
    CollectRequest,
    MessageStream,
    MetricsHub,
    MetricsPeer,
    SnapshotPush,
    SnapshotRequest,
    hub_decoder,
    peer_decoder,
)
from tests.telemetry.prometheus_text import sample_values
from tests.telemetry.test_metrics import FixedMonitor


@asynccontextmanager
async def _ends() -> AsyncIterator[
    tuple[MessageStream[SnapshotPush | CollectRequest], MessageStream[SnapshotRequest | CollectReply], socket.socket]
]:
    """The hub's end, a child's end, and the child's socket for bytes that are not a frame."""
    ours, theirs = socket.socketpair()
    hub = MessageStream(*await asyncio.open_unix_connection(sock=ours), hub_decoder)
    child = MessageStream(*await asyncio.open_unix_connection(sock=theirs), peer_decoder)
    try:
        yield hub, child, theirs
    finally:
        await hub.close()
        await child.close()


async def test_messages_to_the_hub_arrive_unchanged() -> None:
    sent = [SnapshotPush(b"\x00\xff", 3), CollectRequest(7), SnapshotPush(b"")]
    async with _ends() as (hub, child, _):
        for message in sent:
            child.send(message)
        assert [await hub.receive() for _ in sent] == sent


async def test_messages_to_a_child_arrive_unchanged() -> None:
    async with _ends() as (hub, child, _):
        hub.send(SnapshotRequest(1))
        hub.send(CollectReply(2, [b"a", b"b"]))
        assert [await child.receive(), await child.receive()] == [SnapshotRequest(1), CollectReply(2, [b"a", b"b"])]


async def test_sending_to_a_closed_connection_is_ignored() -> None:
    async with _ends() as (hub, child, _):
        await child.close()
        child.send(CollectRequest(1))
        assert await hub.receive() is None


async def test_a_broken_or_closed_connection_ends_the_stream() -> None:
    for data in (b"", b"\x00\x00", b"\x00\x00\x00\x05ab", b"\xff\xff\xff\xffabc", b"\x00\x00\x00\x02ab"):
        async with _ends() as (hub, _, bare):
            bare.send(data)
            bare.shutdown(socket.SHUT_WR)
            assert await hub.receive() is None, data


_ChildStream = MessageStream[SnapshotRequest | CollectReply]


@asynccontextmanager
async def _hub(deadline_s: float = 60.0) -> AsyncIterator[MetricsHub]:
    hub = MetricsHub(deadline_s)
    await hub.open()
    try:
        yield hub
    finally:
        await hub.close()


async def _connect(hub: MetricsHub) -> _ChildStream:
    return MessageStream(*await asyncio.open_unix_connection(hub.path), peer_decoder)


def _errors(count: float, waiting: float = 0) -> bytes:
    return encode_snapshot(MetricsSnapshot({"errors_total": {("x",): count}}, {"queue_waiting": {("m",): waiting}}))


async def _answer(child: _ChildStream, snapshot: bytes) -> None:
    message = await child.receive()
    assert isinstance(message, SnapshotRequest)
    child.send(SnapshotPush(snapshot, message.id))


async def _connected_child(hub: MetricsHub, snapshot: bytes) -> _ChildStream:
    """A child that the hub knows: without the round trip a gather could run before the connection."""
    child = await _connect(hub)
    child.send(SnapshotPush(snapshot))
    child.send(CollectRequest(1))
    await _answer(child, snapshot)
    assert isinstance(await child.receive(), CollectReply)
    return child


def _mode(path: Path) -> int | None:
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else None


async def test_the_socket_is_private_and_removed_on_close() -> None:
    async with _hub() as hub:
        folder = Path(hub.path).parent
        assert _mode(folder) == 0o700
    assert _mode(folder) is None


async def test_gather_requests_a_new_snapshot_from_every_child() -> None:
    async with _hub() as hub:
        child = await _connected_child(hub, _errors(1))
        gathering = asyncio.create_task(hub.gather())
        await _answer(child, _errors(5, waiting=2))
        text = render_snapshots(await gathering)
        assert sample_values(text, "errors_total") == {("x",): 5}
        assert sample_values(text, "queue_waiting") == {("m",): 2}
        await child.close()


async def test_a_late_child_counts_with_its_last_snapshot() -> None:
    async with _hub(deadline_s=0.01) as hub:
        late = await _connected_child(hub, _errors(3))
        assert sample_values(render_snapshots(await hub.gather()), "errors_total") == {("x",): 3}
        await late.close()


async def test_an_exited_child_leaves_its_counters_once_and_no_gauges() -> None:
    async with _hub() as hub:
        exited = await _connected_child(hub, _errors(3, waiting=4))
        await exited.close()
        for _ in range(2):
            text = render_snapshots(await hub.gather())
            assert sample_values(text, "errors_total") == {("x",): 3}
        assert sample_values(text, "queue_waiting") == {}


async def test_a_child_that_dies_during_a_gather_does_not_delay_it() -> None:
    async with _hub(deadline_s=3600) as hub:
        child = await _connected_child(hub, _errors(3))
        gathering = asyncio.create_task(hub.gather())
        assert isinstance(await child.receive(), SnapshotRequest)
        await child.close()
        async with asyncio.timeout(60):
            assert sample_values(render_snapshots(await gathering), "errors_total") == {("x",): 3}


async def test_a_temporary_folder_too_long_for_a_socket_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    async with _hub() as hub:
        assert len(hub.path) < 100
    assert list(long.iterdir()) == []


@asynccontextmanager
async def _peer(path: str, requests: int) -> AsyncIterator[MetricsPeer]:
    metrics = Metrics(FixedMonitor())
    for _ in range(requests):
        metrics.http_request("/v1/messages", "POST", 200, 0.1)
    peer = MetricsPeer(path, metrics, push_every_s=3600, deadline_s=60)
    await peer.open()
    try:
        yield peer
    finally:
        await peer.close()


async def _requests(peer: MetricsPeer) -> float:
    return sum(sample_values(await peer.scrape(), "http_requests_total").values())


async def test_any_scraped_child_answers_for_all() -> None:
    async with _hub() as hub, _peer(hub.path, 3) as a, _peer(hub.path, 4) as b:
        assert await _requests(b) >= 4  # the hub knows b from here on
        assert await _requests(a) == 7
        assert await _requests(b) == 7


async def test_concurrent_scrapes_all_get_the_totals() -> None:
    async with _hub() as hub, _peer(hub.path, 3) as a, _peer(hub.path, 4) as b:
        await _requests(b)
        await _requests(a)
        assert await asyncio.gather(*(_requests(peer) for peer in (a, b, a, b))) == [7] * 4


async def test_a_child_that_exits_orderly_loses_no_count() -> None:
    async with _hub() as hub, _peer(hub.path, 3) as a:
        async with _peer(hub.path, 4) as b:
            await _requests(b)
            b._metrics.http_request("/v1/messages", "POST", 200, 0.1)
        assert await _requests(a) == 8


async def test_without_a_hub_a_child_answers_for_itself_and_sets_lost() -> None:
    async with _peer("/no/such/socket", 3) as peer:
        assert peer.lost.is_set()
        assert await _requests(peer) == 3


async def test_after_the_hub_closes_a_child_sets_lost_and_answers_for_itself() -> None:
    hub = MetricsHub(60.0)
    await hub.open()
    async with _peer(hub.path, 3) as peer:
        assert await _requests(peer) == 3
        await hub.close()
        async with asyncio.timeout(60):
            await peer.lost.wait()
        assert await _requests(peer) == 3


_CHILD = """
import asyncio, sys
from modelyard.telemetry.metrics import Metrics
from modelyard.telemetry.metrics_hub import MetricsPeer
async def main():
    metrics = Metrics()
    peer = MetricsPeer(sys.argv[1], metrics)
    await peer.open()
    for _ in range(5):
        metrics.http_request("/v1/messages", "POST", 200, 0.1)
    metrics.active += 1
    await peer.collect()
    print("ready", flush=True)
    await peer.lost.wait()
asyncio.run(main())
"""


async def test_totals_never_decrease_when_a_child_is_killed() -> None:
    async with _hub() as hub, _peer(hub.path, 3) as peer:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CHILD, hub.path, stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        async with asyncio.timeout(60):
            assert await child.stdout.readline() == b"ready\n"
        assert await _requests(peer) == 8
        child.kill()
        await child.wait()
        text = await peer.scrape()
        assert sum(sample_values(text, "http_requests_total").values()) == 8
        assert sum(sample_values(text, "http_request_duration_seconds_count").values()) == 8
        assert sample_values(text, "active_requests_current") == {(): 0}


async def test_a_child_process_notices_that_its_parent_is_gone() -> None:
    async with _hub() as hub:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CHILD, hub.path, stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        assert await child.stdout.readline() == b"ready\n"
    async with asyncio.timeout(60):
        assert await child.wait() == 0
