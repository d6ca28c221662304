"""Which user of this machine a client of a loopback server is.

A TCP connection has no credentials, but the system knows who owns the other end of one within the machine. Linux tells
it for one connection through `sock_diag`, in 12 µs; where containers forbid that, through `/proc/net/tcp`, in some
milliseconds. Other systems do not tell it: there a server without keys has one user.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from functools import cache

from modelyard.core.errors import Unavailable
from modelyard.core.request import LOCAL_USER

Address = tuple[str, int]

_UNKNOWN = f"{LOCAL_USER}unknown"  # the client has closed its end, or a proxy's header has named it
_SOCK_DIAG, _NLM_REQUEST, _NO_COOKIE = 20, 1, 0xFFFF_FFFF  # of linux/sock_diag.h, linux/netlink.h and inet_diag.h
_MESSAGE, _REQUEST, _ADDRESSES = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct(">HH16s16s")
_INTERFACE = struct.pack("=III", 0, _NO_COOKIE, _NO_COOKIE)
_OWNER = struct.Struct("=II")  # the user's id, and the inode
_OWNER_AT = _MESSAGE.size + 4 + _ADDRESSES.size + len(_INTERFACE) + 12


def local_user(client: Address | None, server: Address | None) -> str:
    """A name that scopes what the user sends and stores: `uid:1000`; "" for the user of the server itself.

    Raises Unavailable if the system cannot tell it now. Whoever takes the last file descriptors must not become the
    server's own user.
    """
    if sys.platform != "linux" or client is None or server is None or (here := _packed(server[0])) is None:
        return ""  # a unix socket, or a test
    if (there := _packed(client[0])) is None:
        return _UNKNOWN
    try:
        owner = _owner(socket.AF_INET6 if ":" in client[0] else socket.AF_INET, there, client[1], here, server[1])
    except (FileNotFoundError, PermissionError):  # this system never tells it
        return ""
    except OSError as error:
        raise Unavailable(f"the system does not tell whose connection this is: {error.strerror}") from error
    if owner is None:
        return _UNKNOWN
    return "" if owner == os.geteuid() else f"{LOCAL_USER}{owner}"


def _packed(host: str) -> bytes | None:
    """None: it is no address."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).packed
    except ValueError:
        return None


def _owner(family: socket.AddressFamily, client: bytes, port: int, server: bytes, server_port: int) -> int | None:
    """The user who owns the client's end. None: nobody does any more."""
    with contextlib.suppress(OSError):
        owner = _ask(family, _ADDRESSES.pack(port, server_port, client.ljust(16, b"\0"), server.ljust(16, b"\0")))
        if owner is not None or _has_tcp_diag():
            return owner
    wanted = f"{_shown(client)}:{port:04X}", f"{_shown(server)}:{server_port:04X}"
    return next(
        (uid for local, remote, uid, inode in _connections(family) if (local, remote) == wanted and inode), None
    )


@cache
def _has_tcp_diag() -> bool:
    """Without that module of the kernel no connection is found, and the error is the same as for one that is gone."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        (host, port), (_, server_port) = client.getsockname(), server.getsockname()
        address = socket.inet_aton(host).ljust(16, b"\0")
        return _ask(socket.AF_INET, _ADDRESSES.pack(port, server_port, address, address)) is not None


def _netlink() -> socket.socket:
    return socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 4)  # NETLINK_SOCK_DIAG


def _ask(family: socket.AddressFamily, addresses: bytes) -> int | None:
    request = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, _NO_COOKIE) + addresses + _INTERFACE
    with _netlink() as kernel:
        kernel.send(_MESSAGE.pack(_MESSAGE.size + len(request), _SOCK_DIAG, _NLM_REQUEST, 1, 0) + request)
        reply = kernel.recv(4096, socket.MSG_DONTWAIT)  # the kernel has answered when a question is sent
    if _MESSAGE.unpack_from(reply)[1] != _SOCK_DIAG:  # an error: there is no such connection
        return None
    uid, inode = _OWNER.unpack_from(reply, _OWNER_AT)
    return uid if inode else None


def _connections(family: socket.AddressFamily) -> Iterator[tuple[str, str, int, int]]:
    with open("/proc/net/tcp6" if family == socket.AF_INET6 else "/proc/net/tcp") as file:
        next(file)
        for line in file:
            fields = line.split()
            yield fields[1], fields[2], int(fields[7]), int(fields[9])


def _shown(address: bytes) -> str:
    """As /proc/net/tcp writes it: words of four bytes in the machine's order."""
    words = struct.unpack(f"={len(address) // 4}I", address)
    return "".join(f"{word:08X}" for word in words)
