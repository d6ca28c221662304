"""The servers that this user runs on this machine, and those that run as long as a command needs them.

Each leaves a note in a private folder, so that the command line can find and stop it. An agent and `modelyard run` may
start one of their own (`TemporaryServer`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import msgspec
import psutil
from msgspec import Struct

from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.library.cache_dir import cache_dir, run_dir
from modelyard.processes.parent_death import die_with_parent
from modelyard.server.client import is_local

if TYPE_CHECKING:
    from modelyard.http.settings import HttpSettings

TEMPORARY_VARIABLE = "MODELYARD_TEMPORARY_SERVER"
_PATTERN = "server-*.json"
_WILDCARD = ("0.0.0.0", "::", "")


class RunningServer(Struct, frozen=True, kw_only=True):
    """`created` is the start time of the process: with it, a process that reuses the id is not mistaken for it. A
    `temporary` server ends with the command that started it. `drain_s` is how long it lets its requests finish."""

    pid: int
    created: float
    host: str
    port: int
    tls: bool = False
    temporary: bool = False
    drain_s: float = 0.0

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
def announced(http: HttpSettings, port: int, *, env: Mapping[str, str] = os.environ) -> Iterator[None]:
    """This process is a server until the block ends. A folder that cannot be written to is no reason not to serve."""
    created = psutil.Process().create_time()
    temporary = bool(env.get(TEMPORARY_VARIABLE))
    server = RunningServer(
        pid=os.getpid(),
        created=created,
        host=http.host,
        port=port,
        tls=http.ssl_certfile is not None,
        temporary=temporary,
        drain_s=http.drain_s,
    )
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


def stop_server(server: RunningServer, timeout_s: float, *, force: bool = False) -> None:
    """Ask the process to end and wait. It finishes its requests first, unless `force`."""
    process, timeout_s = server.process, timeout_s + server.drain_s
    if process is None:
        return
    try:
        process.terminate()
        if force:  # the second signal; two SIGTERM could become one
            process.send_signal(signal.SIGINT)
        process.wait(timeout_s)
    except psutil.NoSuchProcess:
        return
    except psutil.TimeoutExpired:
        raise Unavailable(f"the server (process {server.pid}) has not ended after {timeout_s:.0f} s") from None
    except psutil.AccessDenied:
        raise Unavailable(f"process {server.pid} belongs to another user") from None


# --- a server for one command -----------------------------------------------------------------------------------------

_STOP_TIMEOUT_S = 30.0


def log_path(env: Mapping[str, str]) -> Path:
    return cache_dir(env) / "launch" / "server.log"


class TemporaryServer:
    """A context manager that runs `modelyard serve` at `url` until the block ends, or this process dies."""

    def __init__(self, url: str, config: Path | None, log: Path, env: Mapping[str, str]) -> None:
        if not is_local(url):
            raise Unavailable(f"no server answers at {url}, and a server can be started only on this machine")
        address = urlsplit(url)
        self._host, self._port = address.hostname or "127.0.0.1", address.port or 8000
        self._config, self._log, self._env = config, log, env
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        config = ("--config", str(self._config)) if self._config else ()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        address = ("--host", self._host, "--port", str(self._port))  # of this machine, whatever the file says
        argv = [sys.executable, "-m", "modelyard", "serve", *address, *config]
        with self._log.open("w") as log:
            # In its own session, so that Ctrl-C in the terminal does not reach it.
            self._process = subprocess.Popen(  # noqa: S603  our own program
                die_with_parent(argv, group=True),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self._env, TEMPORARY_VARIABLE: "1"},
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def check_alive(self) -> None:
        """Raise with the last line of the log if the process has exited."""
        if self._process.poll() is not None:
            last = "".join(self._log.read_text(errors="replace").strip().splitlines()[-1:])
            raise Unavailable(f"the server exited before it was ready ({self._log}): {last or 'its log is empty'}")
