"""The servers that this user runs on this machine: each leaves a note in a private folder, so that the command line can
find and stop it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.library.cache_dir import run_dir

TEMPORARY_VARIABLE = "MODELYARD_TEMPORARY_SERVER"
_PATTERN = "server-*.json"
_WILDCARD = ("0.0.0.0", "::", "")


class RunningServer(Struct, frozen=True, kw_only=True):
    """`created` is the start time of the process: with it, a process that reuses the id is not mistaken for it. A
    `temporary` server ends with the command that started it."""

    pid: int
    created: float
    host: str
    port: int
    tls: bool = False
    temporary: bool = False

    @property
    def url(self) -> str:
        return server_url(self.host, self.port, self.tls)

    @property
    def process(self) -> psutil.Process | None:
        try:
            found = psutil.Process(self.pid)
            return found if abs(found.create_time() - self.created) < 1 and found.is_running() else None
        except psutil.Error:
            return None


def server_url(host: str, port: int, tls: bool = False) -> str:
    """The URL under which a client on this machine reaches a server."""
    name = "127.0.0.1" if host in (*_WILDCARD, "localhost") else f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{name}:{port}"


@contextmanager
def announced(host: str, port: int, *, tls: bool = False, env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """This process is a server until the block ends. A folder that cannot be written to is no reason not to serve."""
    created = psutil.Process().create_time()
    temporary = bool(env.get(TEMPORARY_VARIABLE))
    server = RunningServer(pid=os.getpid(), created=created, host=host, port=port, tls=tls, temporary=temporary)
    file: Path | None = None
    with contextlib.suppress(OSError, ModelyardError):
        file = run_dir(env) / f"server-{server.pid}.json"
        file.write_bytes(msgspec.json.encode(server))
    try:
        yield
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)


def running_servers(env: Mapping[str, str] = os.environ) -> list[RunningServer]:
    """The notes of processes that run; those of dead ones are deleted. None if the folder cannot be used."""
    found = []
    try:
        files = sorted(run_dir(env).glob(_PATTERN))
    except (OSError, ModelyardError):
        return []
    for file in files:
        try:
            server = msgspec.json.decode(file.read_bytes(), type=RunningServer)
        except (OSError, msgspec.MsgspecError):
            continue  # being written, or gone
        if server.process is not None:
            found.append(server)
        else:
            file.unlink(missing_ok=True)
    return found


def stop_server(server: RunningServer, timeout_s: float) -> None:
    """Ask the process to end and wait. It finishes its requests first, so that this may take a while."""
    process = server.process
    if process is None:
        return
    try:
        process.terminate()
        process.wait(timeout_s)
    except psutil.NoSuchProcess:
        return
    except psutil.TimeoutExpired:
        raise Unavailable(f"the server (process {server.pid}) has not ended after {timeout_s:.0f} s") from None
    except psutil.AccessDenied:
        raise Unavailable(f"process {server.pid} belongs to another user") from None
