"""The sockets: who may connect, who is heard, what is counted, and what happens when the other side is gone."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.workers import transport
from modelyard.workers.transport import (
    HIGH_WATER_MARK,
    ClusterKeys,
    DealerSocket,
    HeartbeatConfig,
    HeartbeatMonitor,
    PeerDisconnected,
    RouterSocket,
    check_endpoint,
    generate_keys,
    read_keys,
    write_keys,
)
from tests.workers.conftest import Closing
from tests.workers.harness import address, until

LOCAL = "tcp://127.0.0.1:*"


@asynccontextmanager
async def listening(
    endpoint: str, heard: Callable[[bytes, bytes], None], keys: ClusterKeys | None = None
) -> AsyncIterator[RouterSocket]:
    listener = RouterSocket(endpoint, heard, keys)
    try:
        yield listener
    finally:
        await listener.close()


@asynccontextmanager
async def dialing(
    endpoint: str, keys: ClusterKeys | None = None
) -> AsyncIterator[tuple[DealerSocket, list[bytes], list[str]]]:
    heard: list[bytes] = []
    drops: list[str] = []
    dialer = DealerSocket(endpoint, heard.append, drops.append, keys)
    try:
        yield dialer, heard, drops
    finally:
        await dialer.close()


def echo() -> tuple[list[RouterSocket], Callable[[bytes, bytes], None]]:
    made: list[RouterSocket] = []

    def answer(peer: bytes, data: bytes) -> None:
        with suppress(PeerDisconnected):
            made[0].send(peer, data)

    return made, answer


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("locked", [False, True])
async def test_messages_go_both_ways_in_order(tcp: bool, locked: bool) -> None:
    keys = generate_keys() if locked else None
    made, answer = echo()
    async with listening(LOCAL if tcp else address(), answer, keys) as listener:
        made.append(listener)
        async with dialing(listener.endpoint, keys) as (dialer, heard, _):
            sent = [bytes([i % 256]) * i for i in range(500)]
            assert all(dialer.send(data) for data in sent)
            await until(lambda: len(heard) == len(sent))
            assert heard == sent


async def test_messages_go_out_where_zeromqs_own_send_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert transport._send_with_gil is not None
    monkeypatch.setattr(transport, "_send_with_gil", None)
    made, answer = echo()
    async with listening(address(), answer) as listener:
        made.append(listener)
        async with dialing(listener.endpoint) as (dialer, heard, _):
            dialer.send(b"a\0b")
            await until(lambda: heard == [b"a\0b"])


async def test_every_peer_gets_its_own_answers() -> None:
    made, answer = echo()
    async with listening(address(), answer) as listener:
        made.append(listener)
        async with dialing(listener.endpoint) as (one, of_one, _), dialing(listener.endpoint) as (two, of_two, _):
            for i in range(200):
                one.send(b"1:%d" % i)
                two.send(b"2:%d" % i)
            await until(lambda: len(of_one) == len(of_two) == 200)
            assert {data[:1] for data in of_one} == {b"1"}
            assert {data[:1] for data in of_two} == {b"2"}


async def test_a_dialer_may_come_before_the_listener() -> None:
    endpoint, heard = address(), []
    async with dialing(endpoint) as (dialer, _, _):
        dialer.send(b"early")
        async with listening(endpoint, lambda _, data: heard.append(data)):
            await until(lambda: heard == [b"early"])


@pytest.mark.parametrize("theirs", ["none", "others"])
async def test_who_has_not_the_clusters_keys_is_not_heard(theirs: str) -> None:
    heard: list[bytes] = []
    async with listening(LOCAL, lambda _, data: heard.append(data), generate_keys()) as listener:
        keys = None if theirs == "none" else generate_keys()
        async with dialing(listener.endpoint, keys) as (dialer, _, drops):
            dialer.send(b"let me in")
            await until(lambda: bool(drops))
            assert heard == []


async def test_who_knows_the_public_key_alone_is_not_heard() -> None:
    """A client that was told the cluster's public key, and comes with a good pair of its own."""
    keys, own, heard = generate_keys(), generate_keys(), []
    async with listening(LOCAL, lambda _, data: heard.append(data), keys) as listener:
        with bare(keys, own) as wire:
            refusals = wire.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            wire.connect(listener.endpoint)
            wire.send(b"let me in")
            await until(lambda: bool(refusals.poll(0)))
            wire.disable_monitor()
            refusals.close()
        assert heard == []


@contextmanager
def bare(server: ClusterKeys | None = None, own: ClusterKeys | None = None) -> Iterator[zmq.Socket[bytes]]:
    """A socket without any of our manners, not yet connected."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    wire = context.socket(zmq.DEALER)
    wire.setsockopt(zmq.RCVHWM, 1)
    if server is not None and own is not None:
        wire.setsockopt_string(zmq.CURVE_SERVERKEY, server.public)
        wire.setsockopt_string(zmq.CURVE_PUBLICKEY, own.public)
        wire.setsockopt_string(zmq.CURVE_SECRETKEY, own.secret)
    try:
        yield wire
    finally:
        wire.close(0)
        context.term()


async def test_a_listener_that_goes_is_told_of_after_its_last_words(closing: Closing) -> None:
    peers: list[bytes] = []
    listener = closing(RouterSocket(address(), lambda peer, _: peers.append(peer)))
    async with dialing(listener.endpoint) as (dialer, heard, drops):
        dialer.send(b"hello")
        await until(lambda: bool(peers))
        listener.send(peers[0], b"last words")
        await listener.close()
        await until(lambda: bool(drops))
        assert heard == [b"last words"]
        assert "broke" in drops[0]


async def test_a_dialer_comes_back_by_itself_as_another_peer(closing: Closing) -> None:
    endpoint, peers = address(), []
    first = closing(RouterSocket(endpoint, lambda peer, _: peers.append(peer)))
    async with dialing(endpoint) as (dialer, _, drops):
        dialer.send(b"one")
        await until(lambda: len(peers) == 1)
        await first.close()
        await until(lambda: bool(drops))
        async with listening(endpoint, lambda peer, _: peers.append(peer)):
            dialer.send(b"two")
            await until(lambda: len(peers) == 2)


async def test_sending_to_a_peer_that_has_gone_says_so() -> None:
    peers: list[bytes] = []
    async with listening(address(), lambda peer, _: peers.append(peer)) as listener:
        async with dialing(listener.endpoint) as (dialer, _, _):
            dialer.send(b"hello")
            await until(lambda: bool(peers))

        def gone() -> bool:
            try:
                listener.send(peers[0], b"anybody there?")
            except PeerDisconnected:
                return True
            return False

        await until(gone)


async def test_a_listener_that_has_gone_itself_takes_no_peer_for_gone() -> None:
    heard: list[bytes] = []
    async with listening(address(), lambda peer, _: heard.append(peer)) as listener:
        dialer = DealerSocket(listener.endpoint, lambda _: None, lambda _: None)
        try:
            dialer.send(b"hello")
            await until(lambda: bool(heard))
            await listener.close()
            assert listener.send(heard[0], b"too late")
        finally:
            await dialer.close()


async def test_a_peer_that_does_not_read_fills_up_and_others_do_not_notice() -> None:
    peers: dict[bytes, bytes] = {}
    async with listening(address(), lambda peer, data: peers.__setitem__(data, peer)) as listener:
        with bare() as deaf:
            deaf.connect(listener.endpoint)
            deaf.send(b"deaf")
            async with dialing(listener.endpoint) as (other, heard, _):
                other.send(b"other")
                await until(lambda: len(peers) == 2)
                block = bytes(1 << 14)
                async with asyncio.timeout(60):
                    sent = 0
                    while listener.send(peers[b"deaf"], block):
                        sent += 1
                        await asyncio.sleep(0)
                assert sent >= HIGH_WATER_MARK
                assert listener.send(peers[b"other"], b"for you")
                await until(lambda: heard == [b"for you"])


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
async def test_bytes_that_are_no_zeromq_harm_nobody(data: bytes) -> None:
    made, answer = echo()
    async with listening(LOCAL, answer) as listener:
        made.append(listener)
        port = int(listener.endpoint.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as wire:
            wire.sendall(data)
        async with dialing(listener.endpoint) as (dialer, heard, _):
            dialer.send(b"still here?")
            await until(lambda: heard == [b"still here?"])


async def test_messages_behind_one_that_failed_are_still_read() -> None:
    heard: list[bytes] = []

    def hear(_: bytes, data: bytes) -> None:
        if data == b"bad":
            raise ValueError("for the loop to report")
        heard.append(data)

    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    async with listening(address(), hear) as listener, dialing(listener.endpoint) as (dialer, _, _):
        for data in (b"bad", b"good", b"bad", b"bad", b"last"):
            dialer.send(data)
        await until(lambda: heard == [b"good", b"last"])
        assert len(reported) == 3


async def test_messages_of_several_frames_are_counted_and_dropped() -> None:
    heard: list[bytes] = []
    async with listening(address(), lambda _, data: heard.append(data)) as listener:
        with bare() as wire:
            wire.connect(listener.endpoint)
            for frames in ([b"a", b"b", b"c"], [b"", b"payload"], [b"ok"]):
                wire.send_multipart(frames)
            await until(lambda: heard == [b"ok"])
        assert listener.strays == 2


# --- addresses and keys -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://192.0.2.1:5555", "tcp://[::]:5555"])
def test_tcp_that_others_can_reach_needs_keys(endpoint: str) -> None:
    with pytest.raises(InvalidRequest, match="modelyard keys") as caught:
        check_endpoint(endpoint, None)
    assert caught.value.code == "keys_needed"
    check_endpoint(endpoint, generate_keys())


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5555", "tcp://localhost:*", "tcp://[::1]:5555", "ipc:///tmp/x"])
def test_one_machine_needs_none(endpoint: str) -> None:
    check_endpoint(endpoint, None)


@pytest.mark.parametrize(
    "endpoint",
    ["", "5555", "udp://127.0.0.1:1", "tcp://127.0.0.1", "tcp://:x", "tcp://h:99999", "ipc://", "ipc:///" + "x" * 120],
)
def test_what_is_no_address_is_told(endpoint: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_endpoint(endpoint, generate_keys())
    assert caught.value.code == "bad_endpoint"


async def test_an_address_that_is_taken_is_told() -> None:
    async with listening(LOCAL, lambda *_: None) as listener:
        with pytest.raises(Unavailable, match="cannot listen on"):
            RouterSocket(listener.endpoint, lambda *_: None, generate_keys())


def test_keys_come_back_from_their_file_which_nobody_else_may_read(tmp_path: Path) -> None:
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


def test_what_is_no_key_file_is_told(tmp_path: Path) -> None:
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
        write_keys(tmp_path / "no" / "folder", one)


# Silence is counted in whole ticks of our own.


def test_silence_is_noticed_after_the_allowed_ticks() -> None:
    pulse = HeartbeatMonitor(3)
    assert [pulse.tick() for _ in range(5)] == [False, False, False, True, True]


def test_a_word_begins_the_count_anew() -> None:
    pulse = HeartbeatMonitor(2)
    for _ in range(10):
        assert not pulse.tick()
        assert not pulse.tick()
        pulse.reset()


def test_by_default_a_worker_that_is_stopped_is_noticed_within_two_seconds() -> None:
    pace = HeartbeatConfig()
    pulse = HeartbeatMonitor(pace.worker_misses)
    ticks = next(number for number in range(1, 100) if pulse.tick())
    assert ticks * pace.interval_s == pace.detection_s <= 2.0
    assert pace.worker_misses >= 3
