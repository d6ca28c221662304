"""Where a server of ours listens: a unix socket in a private folder, or an address behind a key."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path

from msgspec import Struct

from modelyard.engines.upstream.client import Place
from modelyard.processes.ports import reserve_port

Folder = tempfile.TemporaryDirectory[str]


class Listening(Struct, frozen=True):
    """A unix socket (`host` is its path, `port` None) or an address."""

    host: str
    port: int | None = None
    key: str = ""

    @property
    def base_url(self) -> str:
        return "http://localhost" if self.port is None else f"http://{self._named}:{self.port}"

    @property
    def _named(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    def place(self, name: str, timeout: float | None) -> Place:
        """`timeout` is the longest silence during an answer, in seconds."""
        return Place(
            name=name,
            base_url=self.base_url,
            headers={"authorization": f"Bearer {self.key}"} if self.key else {},
            socket=self.host if self.port is None else None,
            timeout=timeout,
            loopback=True,
        )


def private(prefix: str) -> Folder:
    """Nobody else may look into it; the server's socket lies there."""
    return tempfile.TemporaryDirectory(prefix=prefix)


def listening(folder: Folder | None, host: str | None, port: int | None, key: str | None = None) -> Listening:
    """In the folder, where there is one; else on the port, or a free one, behind a key that is made now."""
    if folder is not None:
        return Listening(str(Path(folder.name) / "server.sock"), key=key or "")
    address = host or "127.0.0.1"
    return Listening(address, port or _free_port(address), key or secrets.token_urlsafe(24))


def _free_port(host: str) -> int:
    with reserve_port(host, 0) as held:
        port: int = held.getsockname()[1]
        return port
