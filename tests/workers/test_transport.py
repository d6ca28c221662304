"""Sockets, keys, addresses and heartbeats."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.workers.transport import (
    HIGH_WATER_MARK,
    ClusterKeys,
    DealerSocket,
    HeartbeatConfig,
    HeartbeatMonitor,
    PeerDisconnected,
    RouterSocket,
    generate_keys,
    link_keys,
    own_keys,
    read_keys,
    scheduler_address,
    write_keys,
)
from tests.workers.conftest import Closing
from tests.workers.harness import ipc_endpoint, until

LOCAL = "tcp://127.0.0.1:*"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of this user are created there."""
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "own"))


@asynccontextmanager
async def router(
    endpoint: str, received: Callable[[bytes, bytes], None], keys: ClusterKeys | None = None
) -> AsyncIterator[RouterSocket]:
    router_socket = RouterSocket(endpoint, received, keys)
    try:
        yield router_socket
    finally:
        await router_socket.close()


@asynccontextmanager
async def dealer(
    endpoint: str, keys: ClusterKeys | None = None
) -> AsyncIterator[tuple[DealerSocket, list[bytes], list[str]]]:
    received: list[bytes] = []
    disconnects: list[str] = []
    dealer_socket = DealerSocket(endpoint, received.append, disconnects.append, keys)
    try:
        yield dealer_socket, received, disconnects
    finally:
        await dealer_socket.close()


def echo() -> tuple[list[RouterSocket], Callable[[bytes, bytes], None]]:
    routers: list[RouterSocket] = []

    def answer(peer: bytes, data: bytes) -> None:
        with suppress(PeerDisconnected):
            routers[0].send(peer, data)

    return routers, answer


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("with_keys", [False, True])
async def test_messages_arrive_in_order_in_both_directions(tcp: bool, with_keys: bool) -> None:
    keys = generate_keys() if with_keys else None
    routers, answer = echo()
    async with router(LOCAL if tcp else ipc_endpoint(), answer, keys) as router_socket:
        routers.append(router_socket)
        async with dealer(router_socket.endpoint, keys) as (dealer_socket, received, _):
            sent = [bytes([i % 256]) * i for i in range(500)]
            assert all(dealer_socket.send(data) for data in sent)
            await until(lambda: len(received) == len(sent))
            assert received == sent


async def test_every_peer_gets_its_own_replies() -> None:
    routers, answer = echo()
    async with router(ipc_endpoint(), answer) as router_socket:
        routers.append(router_socket)
        async with (
            dealer(router_socket.endpoint) as (one, of_one, _),
            dealer(router_socket.endpoint) as (two, of_two, _),
        ):
            for i in range(200):
                one.send(b"1:%d" % i)
                two.send(b"2:%d" % i)
            await until(lambda: len(of_one) == len(of_two) == 200)
            assert {data[:1] for data in of_one} == {b"1"}
            assert {data[:1] for data in of_two} == {b"2"}


async def test_a_dealer_may_connect_before_the_router_listens() -> None:
    endpoint, received = ipc_endpoint(), []
    async with dealer(endpoint) as (dealer_socket, _, _):
        dealer_socket.send(b"early")
        async with router(endpoint, lambda _, data: received.append(data)):
            await until(lambda: received == [b"early"])


@pytest.mark.parametrize("theirs", ["none", "others"])
async def test_a_peer_without_the_cluster_keys_is_refused(theirs: str) -> None:
    received: list[bytes] = []
    async with router(LOCAL, lambda _, data: received.append(data), generate_keys()) as router_socket:
        keys = None if theirs == "none" else generate_keys()
        async with dealer(router_socket.endpoint, keys) as (dealer_socket, _, disconnects):
            dealer_socket.send(b"let me in")
            await until(lambda: bool(disconnects))
            assert received == []


async def test_a_peer_with_only_the_public_key_is_refused() -> None:
    """A client that knows the cluster's public key and has a valid key pair of its own."""
    keys, own, received = generate_keys(), generate_keys(), []
    async with router(LOCAL, lambda _, data: received.append(data), keys) as router_socket:
        with raw_dealer(keys, own) as raw:
            refusals = raw.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            raw.connect(router_socket.endpoint)
            raw.send(b"let me in")
            await until(lambda: bool(refusals.poll(0)))
            raw.disable_monitor()
            refusals.close()
        assert received == []


@contextmanager
def raw_dealer(server: ClusterKeys | None = None, own: ClusterKeys | None = None) -> Iterator[zmq.Socket[bytes]]:
    """A plain ZeroMQ socket, not yet connected."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.setsockopt(zmq.RCVHWM, 1)
    if server is not None and own is not None:
        raw.setsockopt_string(zmq.CURVE_SERVERKEY, server.public)
        raw.setsockopt_string(zmq.CURVE_PUBLICKEY, own.public)
        raw.setsockopt_string(zmq.CURVE_SECRETKEY, own.secret)
    try:
        yield raw
    finally:
        raw.close(0)
        context.term()


async def test_a_disconnect_is_reported_after_the_last_message(closing: Closing) -> None:
    peers: list[bytes] = []
    router_socket = closing(RouterSocket(ipc_endpoint(), lambda peer, _: peers.append(peer)))
    async with dealer(router_socket.endpoint) as (dealer_socket, received, disconnects):
        dealer_socket.send(b"hello")
        await until(lambda: bool(peers))
        router_socket.send(peers[0], b"last words")
        await router_socket.close()
        await until(lambda: bool(disconnects))
        assert received == [b"last words"]
        assert "broke" in disconnects[0]


async def test_a_dealer_reconnects_by_itself(closing: Closing) -> None:
    endpoint, peers = ipc_endpoint(), []
    first = closing(RouterSocket(endpoint, lambda peer, _: peers.append(peer)))
    async with dealer(endpoint) as (dealer_socket, _, disconnects):
        dealer_socket.send(b"one")
        await until(lambda: len(peers) == 1)
        await first.close()
        await until(lambda: bool(disconnects))
        async with router(endpoint, lambda peer, _: peers.append(peer)):
            dealer_socket.send(b"two")
            await until(lambda: len(peers) == 2)


async def test_sending_to_a_disconnected_peer_raises() -> None:
    peers: list[bytes] = []
    async with router(ipc_endpoint(), lambda peer, _: peers.append(peer)) as router_socket:
        async with dealer(router_socket.endpoint) as (dealer_socket, _, _):
            dealer_socket.send(b"hello")
            await until(lambda: bool(peers))

        def gone() -> bool:
            try:
                router_socket.send(peers[0], b"anybody there?")
            except PeerDisconnected:
                return True
            return False

        await until(gone)


async def test_sending_on_a_closed_router_does_not_report_the_peer_as_disconnected() -> None:
    received: list[bytes] = []
    async with router(ipc_endpoint(), lambda peer, _: received.append(peer)) as router_socket:
        dealer_socket = DealerSocket(router_socket.endpoint, lambda _: None, lambda _: None)
        try:
            dealer_socket.send(b"hello")
            await until(lambda: bool(received))
            await router_socket.close()
            assert router_socket.send(received[0], b"too late")
        finally:
            await dealer_socket.close()


async def test_a_peer_that_does_not_read_does_not_affect_others() -> None:
    peers: dict[bytes, bytes] = {}
    async with router(ipc_endpoint(), lambda peer, data: peers.__setitem__(data, peer)) as router_socket:
        with raw_dealer() as unread:
            unread.connect(router_socket.endpoint)
            unread.send(b"unread")
            async with dealer(router_socket.endpoint) as (other, received, _):
                other.send(b"other")
                await until(lambda: len(peers) == 2)
                block = bytes(1 << 14)
                async with asyncio.timeout(60):
                    sent = 0
                    while router_socket.send(peers[b"unread"], block):
                        sent += 1
                        await asyncio.sleep(0)
                assert sent >= HIGH_WATER_MARK
                assert router_socket.send(peers[b"other"], b"for you")
                await until(lambda: received == [b"for you"])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 200,
        b"\xff" + bytes(8) + b"\x7f\x03\x00NULL",
        bytes(range(256)) * 16,
        b"\x01\x00" * 500,
    ],
)
async def test_bytes_that_are_not_zeromq_are_harmless(data: bytes) -> None:
    routers, answer = echo()
    async with router(LOCAL, answer) as router_socket:
        routers.append(router_socket)
        port = int(router_socket.endpoint.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(data)
        async with dealer(router_socket.endpoint) as (dealer_socket, received, _):
            dealer_socket.send(b"still here?")
            await until(lambda: received == [b"still here?"])


async def test_messages_after_a_failing_handler_are_still_read() -> None:
    received: list[bytes] = []

    def hear(_: bytes, data: bytes) -> None:
        if data == b"bad":
            raise ValueError("for the loop to report")
        received.append(data)

    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    async with router(ipc_endpoint(), hear) as router_socket, dealer(router_socket.endpoint) as (dealer_socket, _, _):
        for data in (b"bad", b"good", b"bad", b"bad", b"last"):
            dealer_socket.send(data)
        await until(lambda: received == [b"good", b"last"])
        assert len(reported) == 3


async def test_messages_of_several_frames_are_counted_and_dropped() -> None:
    received: list[bytes] = []
    async with router(ipc_endpoint(), lambda _, data: received.append(data)) as router_socket:
        with raw_dealer() as raw:
            raw.connect(router_socket.endpoint)
            for frames in ([b"a", b"b", b"c"], [b"", b"payload"], [b"ok"]):
                raw.send_multipart(frames)
            await until(lambda: received == [b"ok"])
        assert router_socket.malformed == 2


# --- addresses and keys -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://192.0.2.1:5555", "tcp://[::]:5555"])
def test_tcp_beyond_loopback_needs_keys(endpoint: str) -> None:
    with pytest.raises(InvalidRequest, match=r"set workers\.keys") as caught:
        link_keys(endpoint, None)
    assert caught.value.code == "keys_needed"
    assert "modelyard keys cluster FILE" in caught.value.message
    keys = generate_keys()
    assert link_keys(endpoint, keys) is keys


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "tcp://localhost:*", "tcp://[::1]:5555"])
def test_loopback_addresses_get_the_keys_of_this_user(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    first = link_keys(endpoint, None)
    assert first is not None
    assert link_keys(endpoint, None) == first == own_keys()
    assert stat.S_IMODE((tmp_path / "cache/run").stat().st_mode) == 0o700
    assert [each.name for each in (tmp_path / "cache/run").iterdir()] == ["keys"]
    keys = generate_keys()
    assert link_keys(endpoint, keys) is keys


def test_processes_that_start_together_agree_on_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path))
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: own_keys(), range(32)))
    assert len({keys.secret for keys in found}) == 1


async def test_a_loopback_listener_ignores_a_peer_without_its_keys() -> None:
    received: list[bytes] = []
    async with router(LOCAL, lambda _, data: received.append(data)) as router_socket:
        with raw_dealer() as raw:
            raw.connect(router_socket.endpoint)
            raw.send(b"stranger")
            async with dealer(router_socket.endpoint) as (friend, _, _):
                friend.send(b"friend")
                await until(lambda: received == [b"friend"])


def test_a_socket_is_only_in_a_folder_that_nobody_else_can_enter(tmp_path: Path) -> None:
    private, link = tmp_path / "private", tmp_path / "link"
    private.mkdir(mode=0o700)
    link.symlink_to(private)
    assert link_keys(f"ipc://{private}/s", None) is None
    for folder, reason in ((link, "not a folder"), (Path("/"), "another user|chmod 700"), (tmp_path / "no", "No such")):
        with pytest.raises(InvalidRequest, match=reason):
            link_keys(f"ipc://{folder}/s", None)
    private.chmod(0o750)
    with pytest.raises(InvalidRequest, match="chmod 700") as caught:
        link_keys(f"ipc://{private}/s", None)
    assert caught.value.code == "folder_not_private"


def test_the_default_address_of_a_scheduler_is_a_private_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path))
    (tmp_path / "run").mkdir(mode=0o755)  # by an older version
    assert scheduler_address("auto") == scheduler_address("") == f"ipc://{tmp_path}/run/scheduler"
    assert link_keys(scheduler_address("auto"), None) is None
    assert scheduler_address("tcp://h:1") == "tcp://h:1"


@pytest.mark.parametrize(
    "endpoint",
    [
        *("", "5555", "udp://127.0.0.1:1", "tcp://127.0.0.1", "tcp://:x", "tcp://h:99999"),
        *("ipc://", "ipc://@abstract", "ipc://*", "ipc:///" + "x" * 120),
    ],
)
def test_an_invalid_address_is_reported(endpoint: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        link_keys(endpoint, generate_keys())
    assert caught.value.code == "bad_endpoint"


@pytest.mark.parametrize("tcp", [False, True])
async def test_an_address_in_use_is_reported(tcp: bool) -> None:
    async with router(LOCAL if tcp else ipc_endpoint(), lambda *_: None) as router_socket:
        with pytest.raises(Unavailable, match="cannot listen on"):
            RouterSocket(router_socket.endpoint, lambda *_: None, generate_keys())


def test_keys_are_read_from_a_private_file(tmp_path: Path) -> None:
    keys, file = generate_keys(), tmp_path / "cluster.keys"
    write_keys(file, keys)
    assert read_keys(file) == keys
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert keys.secret not in repr(keys)
    with pytest.raises(InvalidRequest, match="exists already"):
        write_keys(file, generate_keys())
    file.chmod(0o644)
    with pytest.raises(InvalidRequest, match="chmod 600"):
        read_keys(file)


def test_an_invalid_key_file_is_reported(tmp_path: Path) -> None:
    one, other, file = generate_keys(), generate_keys(), tmp_path / "keys"
    for text in ("", "short\n", f"{one.public}\n{other.secret}\n", "\xff", f"{'~' * 40}\n{'~' * 40}\n"):
        file.write_bytes(text.encode("latin-1"))
        file.chmod(0o600)
        with pytest.raises(InvalidRequest) as caught:
            read_keys(file)
        assert caught.value.code == "bad_keys"
    with pytest.raises(InvalidRequest, match="cannot read"):
        read_keys(tmp_path / "none")
    with pytest.raises(InvalidRequest, match="cannot write"):
        write_keys(tmp_path / "no" / "short_folder", one)


# --- heartbeats -------------------------------------------------------------------------------------------------------


def test_silence_is_detected_after_the_allowed_misses() -> None:
    monitor = HeartbeatMonitor(3)
    assert [monitor.tick() for _ in range(5)] == [False, False, False, True, True]


def test_a_message_resets_the_count() -> None:
    monitor = HeartbeatMonitor(2)
    for _ in range(10):
        assert not monitor.tick()
        assert not monitor.tick()
        monitor.reset()


def test_by_default_a_stopped_worker_is_detected_within_two_seconds() -> None:
    config = HeartbeatConfig()
    monitor = HeartbeatMonitor(config.worker_misses)
    ticks = next(number for number in range(1, 100) if monitor.tick())
    assert ticks * config.interval_s == config.detection_s <= 2.0
    assert config.worker_misses >= 3
