"""The sockets: ZeroMQ's DEALER and ROUTER on an asyncio loop. Nothing else in the package imports zmq.

A `Listener` (ROUTER) hears many peers, each under the identity that its `Dialer` (DEALER) has drawn: one that dials
again is another peer, so that nothing meant for the first ever reaches the second. Whatever is not exactly one frame
from a peer is counted and dropped. tcp off loopback wants CURVE keys: all members of a cluster hold the same pair, and
a listener lets in those who prove that they have it.

The trap of every ZeroMQ loop: the socket's file descriptor tells of changes, not of states. After each send, and after
a turn that did not read everything, somebody has to look again, or messages lie there unseen.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import zmq
from msgspec import Struct
from zmq.backend import Socket as Bare
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from modelyard.core.errors import InvalidRequest, Unavailable

HIGH_WATER = 1000  # messages that may wait for a peer, on either side
MAX_MESSAGE = 256 << 20  # bytes; a peer that sends more is cut off by ZeroMQ itself
_A_TURN = 256  # messages read before others get the loop
_LAST_WORDS_MS = 200  # what is still unsent when a socket closes gets so long
_FIRST_RETRY_MS, _LAST_RETRY_MS = 50, 1000  # between two attempts to connect: doubled each time
_MAX_IPC_PATH = 100  # the kernel's limit is 108 bytes
_ZAP = "inproc://zeromq.zap.01"
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


class ClusterKeys(Struct, frozen=True):
    """A cluster's CURVE pair, as Z85 text."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"<Keys {self.public}>"


def generate_keys() -> ClusterKeys:
    public, secret = zmq.curve_keypair()
    return ClusterKeys(public.decode(), secret.decode())


class PeerDisconnected(Exception):
    """The peer of this identity is not connected any more."""


# For every message: pyzmq's own methods make enums of options and flags each time, which costs as much as the rest.
_EVENTS, _RCVMORE, _POLLIN = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN)
_get: Callable[[Any, int], Any] = Bare.get
_recv: Callable[[Any, int], bytes] = Bare.recv
_send: Callable[[Any, bytes, int], Any] = Bare.send


def _message(wire: zmq.Socket[bytes]) -> list[bytes]:
    """All frames of one that has come; raises zmq.Again where none has."""
    frames = [_recv(wire, _LAST)]
    while _get(wire, _RCVMORE):
        frames.append(_recv(wire, _LAST))
    return frames


# --- addresses ------------------------------------------------------------------------------------------------------


def check_endpoint(endpoint: str, keys: ClusterKeys | None) -> None:
    """Raises where this address cannot be used, or must not be without keys."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest:
        if len(rest.encode()) > _MAX_IPC_PATH:
            raise InvalidRequest(f"{endpoint}: the path is longer than {_MAX_IPC_PATH} bytes", code="bad_endpoint")
        return
    host = _host(endpoint) if scheme == "tcp" else None
    if host is None:
        told = "an address is tcp://HOST:PORT, or ipc:///PATH on one machine"
        raise InvalidRequest(f"{endpoint!r} is no address: {told}", code="bad_endpoint")
    if keys is None and not is_loopback(host):
        raise InvalidRequest(
            f"{endpoint} can be reached from other machines, and nothing on it would be encrypted or checked: make "
            "keys with modelyard keys and give them to every member with --keys, or use 127.0.0.1",
            code="keys_needed",
        )


def endpoint_error(endpoint: str) -> str | None:
    """What is wrong with how this address is written, or None; whether it needs keys is another question."""
    try:
        check_endpoint(endpoint, ClusterKeys("", ""))
    except InvalidRequest as error:
        return error.message
    return None


def _host(endpoint: str) -> str | None:
    parts = urlsplit(endpoint)
    port = endpoint.rpartition(":")[2]
    if not parts.hostname or not (port == "*" or (port.isascii() and port.isdigit() and int(port) < 65536)):
        return None
    return parts.hostname


def is_loopback(host: str) -> bool:
    """By what the name means here: a listener on it is heard by this machine alone."""
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


# --- one socket on the loop -----------------------------------------------------------------------------------------


class _Watched:
    """Calls `read` with the frames of every message that comes, on the loop."""

    def __init__(self, wire: zmq.Socket[bytes], read: Callable[[list[bytes]], None]) -> None:
        self.wire, self._read = wire, read
        self._loop = asyncio.get_running_loop()
        self._fd = int(wire.getsockopt(zmq.FD))
        self._looking = False
        self._loop.add_reader(self._fd, self._look)
        self.look_soon()

    def look_soon(self) -> None:
        if not self._looking and not self.wire.closed and _get(self.wire, _EVENTS) & _POLLIN:
            self._looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        for _ in range(_A_TURN):
            if self.wire.closed:
                return
            try:
                frames = _message(self.wire)
            except zmq.Again:
                return
            except zmq.ZMQError:  # the context is on its way out
                return
            try:
                self._read(frames)
            except BaseException:  # for the loop to report; the messages behind it are not its victims
                self.look_soon()
                raise
        self.look_soon()

    def drain(self) -> None:
        """All that has come, however much."""
        while not self.wire.closed and _get(self.wire, _EVENTS) & _POLLIN:
            self._look()

    def close(self, linger: int) -> None:
        if not self.wire.closed:
            self._loop.remove_reader(self._fd)
            self.wire.close(linger)


def _made(context: zmq.Context[zmq.Socket[bytes]], kind: int, endpoint: str) -> zmq.Socket[bytes]:
    wire = context.socket(kind)
    wire.setsockopt(zmq.SNDHWM, HIGH_WATER)
    wire.setsockopt(zmq.RCVHWM, HIGH_WATER)
    wire.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
    wire.setsockopt(zmq.IPV6, int("[" in endpoint))
    return wire


def _held_send() -> Callable[[int, bytes, int, int], int] | None:
    """ZeroMQ's own send, called without letting go of the GIL; None where it is not found.

    pyzmq lets go of it at every frame. A send that never blocks takes microseconds, but an engine's thread that comes
    back in them keeps the GIL for a while, and the frame's second half waits for it: then both wait for each other.
    """
    try:
        from zmq.backend.cython import _zmq

        send = ctypes.PyDLL(_zmq.__file__).zmq_send
    except (ImportError, OSError, AttributeError):
        return None
    send.argtypes, send.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return cast("Callable[[int, bytes, int, int], int]", send)


_send_held = _held_send()
_MORE, _LAST = int(zmq.NOBLOCK | zmq.SNDMORE), int(zmq.NOBLOCK)


async def _end(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    await asyncio.to_thread(context.term)  # it waits for last words


# --- the side that listens ------------------------------------------------------------------------------------------


class RouterSocket:
    """`heard` gets (peer, data). `strays` counts messages that were none."""

    def __init__(self, endpoint: str, heard: Callable[[bytes, bytes], None], keys: ClusterKeys | None = None) -> None:
        check_endpoint(endpoint, keys)
        self._heard, self.strays = heard, 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._guard = None if keys is None else _Guard(self._context, keys)
        wire = _made(self._context, zmq.ROUTER, endpoint)
        wire.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message for nobody is an error, not a silence
        if keys is not None:
            wire.setsockopt(zmq.CURVE_SERVER, 1)
            wire.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
            wire.setsockopt_string(zmq.ZAP_DOMAIN, "modelyard")
        try:
            wire.bind(endpoint)
        except zmq.ZMQError as error:
            if self._guard is not None:
                self._guard.close()
            self._context.destroy(0)
            raise Unavailable(f"cannot listen on {endpoint}: {error.strerror}", code="endpoint_unusable") from error
        self.endpoint = str(wire.getsockopt_string(zmq.LAST_ENDPOINT))
        self._wire, self._handle = wire, wire.underlying
        self._watched = _Watched(wire, self._read)

    def _read(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            self.strays += 1
            return
        self._heard(frames[0], frames[1])

    def send(self, peer: bytes, data: bytes) -> bool:
        """False: it has to wait, so much waits for this peer already. Raises PeerGone."""
        if self._wire.closed:
            return True  # that we have gone says nothing of the peer
        try:
            self._send(peer, data)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            raise PeerDisconnected(str(error)) from None
        finally:  # one that fails may have met what has come, too
            self._watched.look_soon()
        return True

    def _send(self, peer: bytes, data: bytes) -> None:
        """What the short way does not take at once goes the long way, which knows why."""
        if _send_held is None or _send_held(self._handle, peer, len(peer), _MORE) < 0:
            _send(self._wire, peer, _MORE)
            _send(self._wire, data, _LAST)
        elif _send_held(self._handle, data, len(data), _LAST) < 0:
            _send(self._wire, data, _LAST)

    async def close(self) -> None:
        if self._wire.closed:
            return
        self._watched.close(_LAST_WORDS_MS)
        if self._guard is not None:
            self._guard.close()
        await _end(self._context)
        scheme, _, path = self.endpoint.partition("://")
        if scheme == "ipc":
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


class _Guard:
    """Asked by ZeroMQ for each peer that wants in (its ZAP protocol): lets in those with the cluster's own key."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ClusterKeys) -> None:
        self._expected = z85.decode(keys.public.encode())
        wire = context.socket(zmq.ROUTER)
        wire.bind(_ZAP)
        self._watched = _Watched(wire, self._judge)

    def _judge(self, frames: list[bytes]) -> None:
        """Two frames of envelope, version, request, domain, address, identity, mechanism, then the key."""
        good = frames[7:] == [b"CURVE", self._expected]
        verdict = [b"200", b"OK"] if good else [b"400", b"this key is not the cluster's"]
        self._watched.wire.send_multipart([*frames[:4], *verdict, b"", b""])
        self._watched.look_soon()

    def close(self) -> None:
        self._watched.close(0)


# --- the side that dials --------------------------------------------------------------------------------------------


class DealerSocket:
    """`dropped` is called with a sentence whenever the connection breaks or is refused. It is made again by itself,
    with growing pauses, until `close`; what was on its way when it broke is lost: a conversation cannot go on."""

    def __init__(
        self,
        endpoint: str,
        heard: Callable[[bytes], None],
        dropped: Callable[[str], None],
        keys: ClusterKeys | None = None,
    ) -> None:
        check_endpoint(endpoint, keys)
        self.endpoint, self._heard, self._dropped = endpoint, heard, dropped
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        wire = _made(self._context, zmq.DEALER, endpoint)
        wire.setsockopt(zmq.IDENTITY, b"\x01" + os.urandom(15))  # a leading zero is ZeroMQ's own
        wire.setsockopt(zmq.RECONNECT_IVL, _FIRST_RETRY_MS)
        wire.setsockopt(zmq.RECONNECT_IVL_MAX, _LAST_RETRY_MS)
        if keys is not None:
            wire.setsockopt_string(zmq.CURVE_SERVERKEY, keys.public)
            wire.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.public)
            wire.setsockopt_string(zmq.CURVE_SECRETKEY, keys.secret)
        self._wire = wire
        try:
            monitor = wire.get_monitor_socket(zmq.EVENT_DISCONNECTED | _REFUSALS)
            wire.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise Unavailable(f"cannot connect to {endpoint}: {error.strerror}", code="endpoint_unusable") from error
        self._monitored = _Watched(monitor, self._event)
        self._watched = _Watched(wire, self._read)

    def _read(self, frames: list[bytes]) -> None:
        if len(frames) == 1:
            self._heard(frames[0])

    def _event(self, frames: list[bytes]) -> None:
        event: Any = parse_monitor_message(frames)
        if event["event"] == zmq.EVENT_MONITOR_STOPPED:
            return
        self._watched.drain()  # what came before the end comes before the end
        if event["event"] & _REFUSALS:
            self._dropped(f"{self.endpoint} refused the connection: are both sides given the same keys?")
        else:
            self._dropped(f"the connection to {self.endpoint} broke")

    def send(self, data: bytes) -> bool:
        """False: the other side does not take anything, and much waits already."""
        if self._wire.closed:
            return False
        try:
            _send(self._wire, data, _LAST)
        except zmq.Again:
            return False
        finally:
            self._watched.look_soon()
        return True

    async def close(self) -> None:
        if self._wire.closed:
            return
        self._wire.disable_monitor()
        self._monitored.close(0)
        self._watched.close(_LAST_WORDS_MS)
        await _end(self._context)


# --- keys in a file -------------------------------------------------------------------------------------------------


def write_keys(path: Path, keys: ClusterKeys) -> None:
    """Readable by its owner alone; an existing file is never overwritten: others may still use those keys."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InvalidRequest(f"{path} exists already; remove it first, or choose another file") from None
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}") from None
    with os.fdopen(file, "w") as out:
        told = "# Modelyard cluster keys: give this file to every member, and to nobody else."
        out.write(f"{told}\n{keys.public}\n{keys.secret}\n")


def read_keys(path: Path) -> ClusterKeys:
    try:
        mode, text = path.stat().st_mode, path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the key file {path} cannot be read: {error}", code="bad_keys") from None
    if mode & 0o077:
        raise InvalidRequest(f"others may read the key file {path}: chmod 600 {path}", code="bad_keys")
    words = [line for line in text.split("\n") if line and not line.startswith("#")]
    if len(words) != 2 or any(len(word) != 40 for word in words) or not _is_pair(*words):
        raise InvalidRequest(f"{path} is no key file: make one with modelyard keys {path}", code="bad_keys")
    return ClusterKeys(*words)


def _is_pair(public: str, secret: str) -> bool:
    try:
        return bool(zmq.curve_public(secret.encode()).decode() == public)
    except (ValueError, zmq.ZMQError):
        return False


# Whether the other side still lives, counted in our own ticks: a pause of ours never looks like its death. Pure.


class HeartbeatConfig(Struct, frozen=True):
    """A beat every `beat_s`; a worker that is silent for `patience` of them is lost, a client for `indulgence` of them.

    The defaults notice a worker that is stopped within two seconds.
    """

    beat_s: float = 0.4
    patience: int = 4
    indulgence: int = 25

    @property
    def notice_s(self) -> float:
        """So long after its last sign of life, at most, a worker counts as lost: the ticks it may miss, and one more.
        All other waits for a worker are measured by it, so that they add up to something that can be promised."""
        return self.beat_s * (self.patience + 1)


class HeartbeatMonitor:
    """Whoever blocks our loop for five seconds makes us miss one tick, not twelve: only whole ticks in which the other
    side had its chance count against it."""

    __slots__ = ("_allowed", "_silent", "number")

    def __init__(self, allowed: int) -> None:
        self._allowed, self._silent, self.number = allowed, 0, 0

    def heard(self) -> None:
        self._silent = 0

    def tick(self) -> bool:
        """True: it has been silent for too long."""
        self.number += 1
        self._silent += 1
        return self._silent > self._allowed
