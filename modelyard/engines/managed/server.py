"""A server that runs as a child process: where it listens, when it is ready, and why it ended."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from modelyard.core.errors import Timeout, Unavailable
from modelyard.engines.upstream.client import UpstreamAddress
from modelyard.engines.upstream.forwarding import Upstream
from modelyard.processes.child_process import ChildProcess, describe_exit
from modelyard.processes.ports import reserve_port

_POLL_S = 0.1

PrivateFolder = tempfile.TemporaryDirectory[str]  # only this user may read it; it holds the socket of the server


class ListenAddress(Struct, frozen=True):
    """A unix socket (`host` is its path, `port` is None) or a TCP address."""

    host: str
    port: int | None = None
    key: str = ""

    @classmethod
    def choose(
        cls, folder: PrivateFolder | None, host: str | None, port: int | None, key: str | None = None
    ) -> ListenAddress:
        """A socket in the folder if there is one; else the port, or a free one, behind a new key."""
        if folder is not None:
            return cls(str(Path(folder.name) / "server.sock"), key=key or "")
        host = host or "127.0.0.1"
        if not port:
            with reserve_port(host, 0) as reserved:
                port = reserved.getsockname()[1]
        return cls(host, port, key or secrets.token_urlsafe(24))

    def upstream(self, name: str, timeout: float | None) -> UpstreamAddress:
        """`timeout`: seconds without data during an answer."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return UpstreamAddress(
            name=name,
            base_url="http://localhost" if self.port is None else f"http://{host}:{self.port}",
            headers={"authorization": f"Bearer {self.key}"} if self.key else {},
            socket=self.host if self.port is None else None,
            timeout=timeout,
            is_child=True,
        )


def child_environment(
    inherited: Mapping[str, str], own: Mapping[str, str], library_path: Sequence[str], key: tuple[str, str]
) -> dict[str, str]:
    """`key` is (variable, value). The key is not on the command line, where every user could read it."""
    env = {**inherited, **own}
    name, value = key
    if value:
        env[name] = value
    else:
        env.pop(name, None)
    if library_path:
        folders = [str(Path(folder).expanduser()) for folder in library_path]
        env["LD_LIBRARY_PATH"] = ":".join([*folders, *filter(None, [env.get("LD_LIBRARY_PATH")])])
    return env


class ServerCommand(Struct, frozen=True, kw_only=True):
    """How to start and reach a server. `failure_reason` finds the reason of its end in its log. `folder` is removed
    with the server."""

    name: str
    model: str
    argv: Sequence[str]
    env: Mapping[str, str]
    address: UpstreamAddress
    failure_reason: Callable[[Sequence[str]], str]
    folder: PrivateFolder | None = None


class ManagedServer:
    """A started server."""

    def __init__(self, command: ServerCommand, child: ChildProcess, upstream: Upstream) -> None:
        self.command, self.child, self.upstream = command, child, upstream

    @classmethod
    async def start(cls, command: ServerCommand) -> ManagedServer:
        try:
            child = await ChildProcess.start(command.argv, command.env)
        except BaseException:
            if command.folder is not None:
                command.folder.cleanup()
            raise
        return cls(command, child, Upstream(command.address))

    @property
    def has_exited(self) -> bool:
        return self.child.ended.done()

    async def wait_exited(self, seconds: float | None = None) -> bool:
        await asyncio.wait({self.child.ended}, timeout=seconds)
        return self.has_exited

    async def wait_ready(self, is_ready: Callable[[], Awaitable[bool]], seconds: float) -> None:
        """Polls `is_ready`; raises if the server exits or is not ready after `seconds`."""
        name = self.command.name
        try:
            async with asyncio.timeout(seconds):
                while not await is_ready():
                    if await self.wait_exited(_POLL_S):
                        message = f"{name} {self._describe_exit()} (while loading {self.command.model})"
                        raise Unavailable(message, code="load_failed")
        except TimeoutError:
            last = self.child.log.tail(1) or "it wrote nothing"
            raise Timeout(f"{name} was not ready after {seconds:g} s: {last}", code="load_timeout") from None

    def exit_error(self) -> Unavailable:
        return Unavailable(f"{self.command.address.name} {self._describe_exit()}")

    def _describe_exit(self) -> str:
        exit_, reason = describe_exit(self.child.ended.result()), self.command.failure_reason(self.child.log.lines())
        return f"{exit_}: {reason}" if reason else exit_

    async def stop(self) -> None:
        """Idempotent."""
        await self.upstream.close()
        await self.child.stop()
        if self.command.folder is not None:
            self.command.folder.cleanup()
