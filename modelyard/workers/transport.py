"""ZeroMQ sockets on an asyncio loop, cluster keys, and heartbeat counting. No other module imports zmq.

A `RouterSocket` serves many peers, each under the identity that its `DealerSocket` has drawn. A peer that reconnects
has a new identity, so nothing meant for the old connection reaches the new one. A message that is not exactly one frame
from a peer is counted and dropped.

Who may connect: an ipc socket is in a folder that only its user can enter. tcp requires CURVE keys, also on loopback,
which every user of the machine can reach: all members of a cluster share one key pair, and a router accepts only peers
that prove they have it. Loopback addresses without configured keys use those that each user gets in the private folder.

The trap of every ZeroMQ loop: the socket's file descriptor is edge-triggered. After each send, and after a turn that
did not read everything, check the socket again, or messages stay unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import zmq
from msgspec import Struct
from zmq.backend import Socket as BackendSocket
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from modelyard.core.errors import InvalidRequest, Unavailable
from modelyard.library.cache_dir import check_private, run_dir

HIGH_WATER_MARK = 1000  # messages that may wait for a peer, on either side
MAX_MESSAGE = 256 << 20  # bytes; ZeroMQ disconnects a peer that sends more
_READS_PER_TURN = 256  # messages read before other callbacks get the loop
_LINGER_MS = 200  # for unsent messages when a socket closes
_FIRST_RETRY_MS, _MAX_RETRY_MS = 50, 1000  # between two attempts to connect, doubled each time
_MAX_IPC_PATH = 100  # the kernel's limit is 108 bytes
_ZAP = "inproc://zeromq.zap.01"
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

# Used for every message: pyzmq's own methods convert options and flags to enums, which costs as much as the rest.
_EVENTS, _RCVMORE, _POLLIN = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN)
_MORE, _LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)
_get: Callable[[Any, int], Any] = BackendSocket.get
_recv: Callable[[Any, int], bytes] = BackendSocket.recv
_send: Callable[[Any, bytes, int], Any] = BackendSocket.send

_Context = zmq.Context[zmq.Socket[bytes]]


# --- keys -----------------------------------------------------------------------------------------------------------


class ClusterKeys(Struct, frozen=True):
    """A cluster's CURVE key pair, as Z85 text."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"<ClusterKeys {self.public}>"


def generate_keys() -> ClusterKeys:
    public, secret = zmq.curve_keypair()
    return ClusterKeys(public.decode(), secret.decode())


def write_keys(path: Path, keys: ClusterKeys) -> None:
    """Readable by the owner only. An existing file is never overwritten: other members may still use those keys."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InvalidRequest(f"{path} exists already; remove it first, or choose another file") from None
    except OSError as error:
        raise InvalidRequest(f"cannot write {path}: {error.strerror}") from None
    with os.fdopen(file, "w") as out:
        comment = "# Modelyard cluster keys: copy this file to every member and keep it secret."
        out.write(f"{comment}\n{keys.public}\n{keys.secret}\n")


def read_keys(path: Path) -> ClusterKeys:
    try:
        mode, text = path.stat().st_mode, path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read the key file {path}: {error}", code="bad_keys") from None
    if mode & 0o077:
        raise InvalidRequest(f"the key file {path} is readable by others: chmod 600 {path}", code="bad_keys")
    lines = [line for line in text.split("\n") if line and not line.startswith("#")]
    if len(lines) != 2 or any(len(line) != 40 for line in lines) or not _is_key_pair(*lines):
        raise InvalidRequest(f"{path} is not a key file: make one with modelyard keys {path}", code="bad_keys")
    return ClusterKeys(*lines)


def own_keys() -> ClusterKeys:
    """The keys of this user on this machine, created when they are needed first."""
    path = run_dir() / "keys"
    if not path.exists():
        complete = path.with_name(f"keys-{uuid4().hex}")
        write_keys(complete, generate_keys())
        with contextlib.suppress(FileExistsError):  # another process was faster: use its keys
            os.link(complete, path)
        complete.unlink()
    return read_keys(path)


def _is_key_pair(public: str, secret: str) -> bool:
    try:
        return bool(zmq.curve_public(secret.encode()).decode() == public)
    except (ValueError, zmq.ZMQError):
        return False


# --- addresses ------------------------------------------------------------------------------------------------------


def check_endpoint(endpoint: str) -> None:
    """Raise if this is not an address."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest and rest[0] not in "@*":  # abstract sockets and random paths are open to everyone
        if len(rest.encode()) > _MAX_IPC_PATH:
            raise InvalidRequest(f"{endpoint}: the path is longer than {_MAX_IPC_PATH} bytes", code="bad_endpoint")
    elif scheme != "tcp" or _tcp_host(endpoint) is None:
        forms = "use ipc:///PATH on one machine, or tcp://HOST:PORT"
        raise InvalidRequest(f"{endpoint!r} is not an address: {forms}", code="bad_endpoint")


def link_keys(endpoint: str, configured: ClusterKeys | None) -> ClusterKeys | None:
    """The keys for a link to this address. Raise if others could use the link."""
    check_endpoint(endpoint)
    if endpoint.startswith("ipc://"):
        check_private(Path(endpoint.removeprefix("ipc://")).parent)
        return configured
    if configured is not None:
        return configured
    if not is_loopback(_tcp_host(endpoint) or ""):
        raise InvalidRequest(
            f"{endpoint} can be reached from other machines and would be neither encrypted nor authenticated: make a "
            "key file with modelyard keys cluster FILE, copy it to every member, and set workers.keys to its path",
            code="keys_needed",
        )
    return own_keys()


def scheduler_address(given: str) -> str:
    """The address of a scheduler; "auto" or nothing means the default one, a socket that only this user can reach."""
    return f"ipc://{run_dir() / 'scheduler'}" if given in ("", "auto") else given


def endpoint_error(endpoint: str) -> str | None:
    """What is wrong with the syntax of this address, or None. It does not check whether keys are needed."""
    try:
        check_endpoint(endpoint)
    except InvalidRequest as error:
        return error.message
    return None


def _tcp_host(endpoint: str) -> str | None:
    parts = urlsplit(endpoint)
    port = endpoint.rpartition(":")[2]
    if not parts.hostname or not (port == "*" or (port.isascii() and port.isdigit() and int(port) < 65536)):
        return None
    return parts.hostname


def is_loopback(host: str) -> bool:
    """Whether every address of the name is a loopback address, so that only this machine reaches a listener on it."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def is_listening(endpoint: str) -> bool:
    """Whether a process listens on this ipc address. ZeroMQ would take its place without asking."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(endpoint.removeprefix("ipc://"))
        except BlockingIOError:  # its backlog is full
            return True
        except OSError:
            return False
        return True


# --- reading and sending --------------------------------------------------------------------------------------------


class _SocketReader:
    """Calls `on_message` on the loop with the frames of every message."""

    def __init__(self, zmq_socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self.socket, self._on_message = zmq_socket, on_message
        self._loop = asyncio.get_running_loop()
        self._fd = int(zmq_socket.getsockopt(zmq.FD))
        self._scheduled = False
        self._loop.add_reader(self._fd, self._read)
        self.check_soon()

    def check_soon(self) -> None:
        if not self._scheduled and not self.socket.closed and _get(self.socket, _EVENTS) & _POLLIN:
            self._scheduled = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._scheduled = False
        for _ in range(_READS_PER_TURN):
            if self.socket.closed:
                return
            try:
                frames = [_recv(self.socket, _LAST)]
                while _get(self.socket, _RCVMORE):
                    frames.append(_recv(self.socket, _LAST))
            except zmq.ZMQError:  # Again: nothing left; others: the context is closing
                return
            try:
                self._on_message(frames)
            except BaseException:  # the loop reports it; the messages behind it must still be read
                self.check_soon()
                raise
        self.check_soon()

    def drain(self) -> None:
        """Read everything that has arrived."""
        while not self.socket.closed and _get(self.socket, _EVENTS) & _POLLIN:
            self._read()

    def close(self, linger: int) -> None:
        if not self.socket.closed:
            self._loop.remove_reader(self._fd)
            self.socket.close(linger)


def _create_socket(context: _Context, kind: int, endpoint: str) -> zmq.Socket[bytes]:
    created = context.socket(kind)
    created.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
    created.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    created.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
    created.setsockopt(zmq.IPV6, int("[" in endpoint))
    # The kernel answers for a process that is only stopped: a machine that has vanished is noticed within a minute.
    created.setsockopt(zmq.TCP_KEEPALIVE, 1)
    created.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    created.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    created.setsockopt(zmq.TCP_KEEPALIVE_CNT, 6)
    return created


# --- the listening side ---------------------------------------------------------------------------------------------


class PeerDisconnected(Exception):
    """The peer of this identity is not connected any more."""


class RouterSocket:
    """`on_message` gets the peer's identity and the data. `malformed` counts messages with a wrong number of frames."""

    def __init__(
        self, endpoint: str, on_message: Callable[[bytes, bytes], None], keys: ClusterKeys | None = None
    ) -> None:
        keys = link_keys(endpoint, keys)
        if endpoint.startswith("ipc://") and is_listening(endpoint):
            raise Unavailable(
                f"cannot listen on {endpoint}: another process listens there; stop it, or choose another address",
                code="endpoint_unusable",
            )
        self._on_message, self.malformed = on_message, 0
        self._context: _Context = zmq.Context()
        self._authenticator = None if keys is None else _CurveAuthenticator(self._context, keys)
        router = _create_socket(self._context, zmq.ROUTER, endpoint)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to an unknown peer is an error
        if keys is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
            router.setsockopt_string(zmq.ZAP_DOMAIN, "modelyard")
        try:
            router.bind(endpoint)
        except zmq.ZMQError as error:
            if self._authenticator is not None:
                self._authenticator.close()
            self._context.destroy(0)
            raise Unavailable(f"cannot listen on {endpoint}: {error.strerror}", code="endpoint_unusable") from error
        self.endpoint = str(router.getsockopt_string(zmq.LAST_ENDPOINT))
        self._socket = router
        self._reader = _SocketReader(router, self._on_frames)

    def _on_frames(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            self.malformed += 1
            return
        self._on_message(frames[0], frames[1])

    def send(self, peer: bytes, data: bytes) -> bool:
        """False if too much waits for this peer already. Raises PeerDisconnected."""
        if self._socket.closed:
            return True  # this says nothing about the peer
        try:
            _send(self._socket, peer, _MORE)
            _send(self._socket, data, _LAST)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise PeerDisconnected(str(error)) from None
        finally:  # a failed send may have consumed the read event too
            self._reader.check_soon()
        return True

    async def close(self) -> None:
        if self._socket.closed:
            return
        self._reader.close(_LINGER_MS)
        if self._authenticator is not None:
            self._authenticator.close()
        await asyncio.to_thread(self._context.term)  # waits for the linger time
        scheme, _, path = self.endpoint.partition("://")
        if scheme == "ipc":
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


class _CurveAuthenticator:
    """ZeroMQ asks it about each new peer (the ZAP protocol). It accepts those with the cluster's key."""

    def __init__(self, context: _Context, keys: ClusterKeys) -> None:
        self._expected = z85.decode(keys.public.encode())
        zap = context.socket(zmq.ROUTER)
        zap.bind(_ZAP)
        self._reader = _SocketReader(zap, self._on_frames)

    def _on_frames(self, frames: list[bytes]) -> None:
        """Two frames of envelope, version, request, domain, address, identity, mechanism, then the key."""
        accepted = frames[7:] == [b"CURVE", self._expected]
        status = [b"200", b"OK"] if accepted else [b"400", b"this key is not the cluster's"]
        self._reader.socket.send_multipart([*frames[:4], *status, b"", b""])
        self._reader.check_soon()

    def close(self) -> None:
        self._reader.close(0)


# --- the connecting side --------------------------------------------------------------------------------------------


class DealerSocket:
    """`on_disconnect` gets a sentence whenever the connection breaks or is refused. ZeroMQ reconnects by itself, with
    growing pauses, until `close`; messages in flight are lost, so the caller must start a new conversation."""

    def __init__(
        self,
        endpoint: str,
        on_message: Callable[[bytes], None],
        on_disconnect: Callable[[str], None],
        keys: ClusterKeys | None = None,
    ) -> None:
        keys = link_keys(endpoint, keys)
        self.endpoint, self._on_message, self._on_disconnect = endpoint, on_message, on_disconnect
        self._context: _Context = zmq.Context()
        dealer = _create_socket(self._context, zmq.DEALER, endpoint)
        dealer.setsockopt(zmq.IDENTITY, b"\x01" + os.urandom(15))  # a leading zero is reserved by ZeroMQ
        dealer.setsockopt(zmq.RECONNECT_IVL, _FIRST_RETRY_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RETRY_MS)
        if keys is not None:
            dealer.setsockopt_string(zmq.CURVE_SERVERKEY, keys.public)
            dealer.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
            dealer.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        self._socket = dealer
        try:
            monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | _REFUSALS)
            dealer.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise Unavailable(f"cannot connect to {endpoint}: {error.strerror}", code="endpoint_unusable") from error
        self._monitor_reader = _SocketReader(monitor, self._on_monitor_event)
        self._reader = _SocketReader(dealer, self._on_frames)

    def _on_frames(self, frames: list[bytes]) -> None:
        if len(frames) == 1:
            self._on_message(frames[0])

    def _on_monitor_event(self, frames: list[bytes]) -> None:
        event: Any = parse_monitor_message(frames)
        if event["event"] == zmq.EVENT_MONITOR_STOPPED:
            return
        self._reader.drain()  # deliver what arrived before the disconnect first
        if event["event"] & _REFUSALS:
            self._on_disconnect(f"{self.endpoint} refused the connection: are both sides given the same keys?")
        else:
            self._on_disconnect(f"the connection to {self.endpoint} broke")

    def send(self, data: bytes) -> bool:
        """False if too much waits already."""
        if self._socket.closed:
            return False
        try:
            _send(self._socket, data, _LAST)
        except zmq.Again:
            return False
        finally:
            self._reader.check_soon()
        return True

    async def close(self) -> None:
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor_reader.close(0)
        self._reader.close(_LINGER_MS)
        await asyncio.to_thread(self._context.term)  # waits for the linger time


# --- heartbeats -----------------------------------------------------------------------------------------------------


class HeartbeatConfig(Struct, frozen=True):
    """A heartbeat every `interval_s`. A worker that is silent for more than `worker_misses` intervals is lost, a client
    for more than `client_misses`. The defaults detect a stopped worker within two seconds."""

    interval_s: float = 0.4
    worker_misses: int = 4
    client_misses: int = 25

    @property
    def detection_s(self) -> float:
        """The longest time after its last sign of life until a worker counts as lost. All other waits for a worker are
        derived from it, so that they add up to a bound."""
        return self.interval_s * (self.worker_misses + 1)


class HeartbeatMonitor:
    """Counts our own ticks without a message from the peer. If our loop blocks for five seconds we miss one tick, not
    twelve: a pause of ours never looks like the death of the peer. Pure."""

    __slots__ = ("_max_missed", "missed", "number")

    def __init__(self, max_missed: int) -> None:
        self._max_missed, self.missed, self.number = max_missed, 0, 0

    def reset(self) -> None:
        """A message has arrived."""
        self.missed = 0

    def tick(self) -> bool:
        """True if the peer has been silent for too long."""
        self.number += 1
        self.missed += 1
        return self.missed > self._max_missed
