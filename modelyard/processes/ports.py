"""One port for several processes: the parent reserves it, and every child listens on it (SO_REUSEPORT)."""

from __future__ import annotations

import errno
import socket

from modelyard.core.errors import InvalidRequest

_BACKLOG = 2048


class PortUnusable(InvalidRequest):
    default_code = "port_unusable"


def reserve_port(host: str, port: int) -> socket.socket:
    """Bind the port without listening, so that a port in use is reported before any child starts.

    Port 0 picks a free one: `getsockname()[1]` of the result. Keep the socket open as long as the children run.
    """
    if port:
        # SO_REUSEPORT would share the port with another server of the same user: check for one first.
        _bind(host, port, shared=False).close()
    return _bind(host, port, shared=True)


def listen(host: str, port: int, *, shared: bool = True) -> socket.socket:
    """A listening socket. On a shared port the kernel distributes connections among all listeners."""
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
        raise PortUnusable(_bind_error(host, port, error)) from error
    return bound


def _bind_error(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another program: stop it, or choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} needs root: choose one above 1023 with --port"
    return f"cannot listen on {host} port {port}: {error.strerror}"
