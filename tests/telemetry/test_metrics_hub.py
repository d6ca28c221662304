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
    for_child,
    for_hub,
)
from tests.telemetry.prometheus_text import sample_values
from tests.telemetry.test_metrics import FixedMonitor


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
        assert sample_values(text, "errors_total") == {("x",): 5}
        assert sample_values(text, "queue_waiting") == {("m",): 2}
        await children[0].close()


async def test_a_late_child_counts_with_the_last_that_was_heard() -> None:
    async with _hub(deadline_s=0.01) as hub:
        late = await _introduce(hub, _errors(3))
        assert sample_values(render_snapshots(await hub.gather()), "errors_total") == {("x",): 3}
        await late.close()


async def test_the_dead_leave_their_counters_once_and_none_of_their_gauges() -> None:
    async with _hub() as hub:
        dead = await _introduce(hub, _errors(3, waiting=4))
        await dead.close()
        for _ in range(2):
            text = render_snapshots(await hub.gather())
            assert sample_values(text, "errors_total") == {("x",): 3}
        assert sample_values(text, "queue_waiting") == {}


async def test_a_child_that_dies_while_asked_holds_nobody_up() -> None:
    async with _hub(deadline_s=3600) as hub:
        child = await _introduce(hub, _errors(3))
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
async def _hub_peers() -> AsyncIterator[MetricsHub]:
    hub = MetricsHub(60.0)
    await hub.open()
    try:
        yield hub
    finally:
        await hub.close()


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


async def test_any_child_that_is_scraped_answers_for_all() -> None:
    async with _hub_peers() as hub, _peer(hub.path, 3) as a, _peer(hub.path, 4) as b:
        assert await _requests(b) >= 4  # by now the hub has heard of b
        assert await _requests(a) == 7
        assert await _requests(b) == 7


async def test_several_scrapes_at_once_all_get_the_whole() -> None:
    async with _hub_peers() as hub, _peer(hub.path, 3) as a, _peer(hub.path, 4) as b:
        await _requests(b)
        await _requests(a)
        assert await asyncio.gather(*(_requests(peer) for peer in (a, b, a, b))) == [7] * 4


async def test_a_child_that_ends_in_peace_loses_no_count() -> None:
    async with _hub_peers() as hub, _peer(hub.path, 3) as a:
        async with _peer(hub.path, 4) as b:
            await _requests(b)
            b._metrics.http_request("/v1/messages", "POST", 200, 0.1)
        assert await _requests(a) == 8


async def test_without_a_hub_a_child_answers_for_itself_and_knows_that_it_is_alone() -> None:
    async with _peer("/no/such/socket", 3) as peer:
        assert peer.lost.is_set()
        assert await _requests(peer) == 3


async def test_a_hub_that_goes_is_noticed_and_the_child_answers_for_itself() -> None:
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
    metrics.request_started()
    await peer.collect()
    print("told", flush=True)
    await peer.lost.wait()
asyncio.run(main())
"""


async def test_totals_never_go_backwards_when_a_child_is_killed() -> None:
    async with _hub_peers() as hub, _peer(hub.path, 3) as peer:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CHILD, hub.path, stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        async with asyncio.timeout(60):
            assert await child.stdout.readline() == b"told\n"
        assert await _requests(peer) == 8
        child.kill()
        await child.wait()
        text = await peer.scrape()
        assert sum(sample_values(text, "http_requests_total").values()) == 8
        assert sum(sample_values(text, "http_request_duration_seconds_count").values()) == 8
        assert sample_values(text, "active_requests_current") == {(): 0}


async def test_a_child_whose_parent_goes_can_tell() -> None:
    async with _hub_peers() as hub:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CHILD, hub.path, stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        assert await child.stdout.readline() == b"told\n"
    async with asyncio.timeout(60):
        assert await child.wait() == 0
