"""Which addresses the gateway may connect to on behalf of a client: a request must not make it read its owner's network
(SSRF).

A host is checked by name, then by every address that it resolves to. Connect to the address that was checked: a second
lookup could answer differently. Check each redirect the same way.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

_NAT64 = ip_network("64:ff9b::/96")


class PrivateAddress(Exception):
    """The host has an address that is not public."""


class AddressGuard:
    """`hosts` are globs of allowed names, in lower case. `allow_private`: they may have private addresses."""

    def __init__(self, hosts: Iterable[str], *, allow_private: bool = False) -> None:
        self._hosts = tuple(host.lower() for host in hosts)
        self._allow_private = allow_private

    def allows(self, host: str) -> bool:
        return any(fnmatchcase(host, allowed) for allowed in self._hosts)

    async def resolve(self, host: str) -> list[str]:
        """The addresses of the host. Raises OSError or UnicodeError if it has none, and PrivateAddress."""
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(info[4][0]).partition("%")[0] for info in found))
        if not self._allow_private and not all(is_public(ip_address(address)) for address in addresses):
            raise PrivateAddress(host)
        return addresses


def host_name(raw_host: bytes) -> str:
    """The host of a URL as globs are compared with it."""
    return raw_host.decode("ascii").lower().rstrip(".")


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Also check the IPv4 address that some IPv6 addresses embed."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast
