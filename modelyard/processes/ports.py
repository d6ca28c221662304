"""One port for several processes: reserved by the parent, listened on by every child (SO_REUSEPORT)."""

from __future__ import annotations

import errno
import socket

from modelyard.core.errors import InvalidRequest

_BACKLOG = 2048


class PortUnusable(InvalidRequest):
    default_code = "port_unusable"


def reserve_port(host: str, port: int) -> socket.socket:
    """Hold the port without listening, so that a taken one is reported before any child starts.

    Port 0 picks a free one: `getsockname()[1]` of the result. Keep the socket open as long as the fleet lives.
    """
    if port:
        # SO_REUSEPORT would happily share the port with another fleet of the same user: look for one first.
        _bind(host, port, shared=False).close()
    return _bind(host, port, shared=True)


def listen(host: str, port: int, *, shared: bool = True) -> socket.socket:
    """A listening socket of this process; on a shared port the kernel deals connections out among all that listen."""
    bound = _bind(host, port, shared=shared)
    bound.listen(_BACKLOG)
    bound.setblocking(False)
    return bound


def _bind(host: str, port: int, *, shared: bool) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise PortUnusable(f"the host {host!r} is not an address of this machine: {error.strerror}") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise PortUnusable(_reason(host, port, error)) from error
    return bound


def _reason(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program: stop it, or choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} needs root: choose one above 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror}"
