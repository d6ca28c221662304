"""The servers that this user runs on this machine, and those that commands start in the background.

Each leaves a note in a private folder, so that the command line can find and stop it. `modelyard start`, `run` and
`launch` start one where none runs (`BackgroundServer`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import msgspec
import psutil
from msgspec import Struct

from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.core.units import format_duration
from modelyard.library.cache_dir import cache_dir, run_dir
from modelyard.processes.parent_death import die_with_parent
from modelyard.server.client import is_local

if TYPE_CHECKING:
    from modelyard.http.settings import HttpSettings

log = logging.getLogger(__name__)

NOTE_VARIABLE = "MODELYARD_WORKER_NOTE"  # the file of a server, for its gateway processes
TEMPORARY_VARIABLE = "MODELYARD_TEMPORARY_SERVER"
_PATTERN = "server-*.json"
_WILDCARD = ("0.0.0.0", "::", "")
_POLL_S = 0.1


class RunningServer(Struct, frozen=True, kw_only=True):
    """`created` is the start time of the process: with it, a process that reuses the id is not mistaken for it. A
    server with `keep_alive_s` was started by a command and ends after that time without a request. `drain_s` is how
    long it lets its requests finish."""

    pid: int
    created: float
    host: str
    port: int
    tls: bool = False
    keep_alive_s: float | None = None
    drain_s: float = 0.0
    token: str = ""  # proves to the server that a request comes from its user

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
def announced(
    http: HttpSettings, port: int, token: str = "", *, env: Mapping[str, str] = os.environ
) -> Iterator[Path | None]:
    """This process is a server until the block ends; gives the file that says so. A folder that cannot be written to is
    no reason not to serve."""
    server = RunningServer(
        pid=os.getpid(),
        created=psutil.Process().create_time(),
        host=http.host,
        port=port,
        tls=http.ssl_certfile is not None,
        keep_alive_s=keep_alive_s(env),
        drain_s=http.drain_s,
        token=token,
    )
    file: Path | None = None
    try:
        file = run_dir(env) / f"server-{server.pid}.json"
        file.unlink(missing_ok=True)  # of a process that was killed
        file.touch(mode=0o600)
        file.write_bytes(msgspec.json.encode(server))
    except (OSError, ModelyardError) as error:
        log.warning("commands of this machine cannot prove that they come from this server's user: %s", error)
    try:
        yield file
    finally:
        if file is not None:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)


def running_servers(env: Mapping[str, str] = os.environ) -> list[RunningServer]:
    """The notes of processes that run; those of dead ones are deleted. None if the folder cannot be used."""
    found = []
    try:
        files = sorted(run_dir(env).glob(_PATTERN)) if (cache_dir(env) / "run").is_dir() else []
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


def announced_token(env: Mapping[str, str] = os.environ) -> str:
    """The token of the server of which this is a gateway process; "" if this is the server."""
    try:
        return msgspec.json.decode(Path(env[NOTE_VARIABLE]).read_bytes(), type=RunningServer).token
    except (KeyError, OSError, msgspec.MsgspecError):
        return ""


def find_server(url: str, env: Mapping[str, str] = os.environ) -> RunningServer | None:
    """The server of this user at exactly this address: another one may be another user's."""
    try:
        parts = urlsplit(url)
        wanted = server_url(parts.hostname or "", parts.port or 0, parts.scheme == "https")
    except ValueError:
        return None
    return next((server for server in running_servers(env) if server.url == wanted), None)


def stays_notice(keep_alive_s: float | None) -> str:
    """About a server that a command has started."""
    how_long = (
        "until you stop it" if keep_alive_s is None else f"{format_duration(keep_alive_s)} after its last request"
    )
    return f"the server stays {how_long}, so that the next command is quick; modelyard stop --server ends it"


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


# --- servers that commands start --------------------------------------------------------------------------------------

_STOP_TIMEOUT_S = 30.0
KEEP_ALIVE_S = 600.0  # how long a server that a command has started waits for the next one
_TOUCHES = 3  # in the time of `keep_alive_s`, by a command that still runs


def log_path(env: Mapping[str, str]) -> Path:
    return cache_dir(env) / "launch" / "server.log"


def keep_alive_s(env: Mapping[str, str] = os.environ) -> float | None:
    """How long this server waits without a request before it ends. None: it was not started by a command for itself."""
    return float(env[TEMPORARY_VARIABLE]) if env.get(TEMPORARY_VARIABLE) else None


class BackgroundServer:
    """A context manager that runs `modelyard serve` at `url` in the background. Once it was `ready`, it goes on after
    the block: until `keep_alive_s` have passed without a request, or for good (None). With 0 it ends with the block, or
    when this process dies."""

    def __init__(
        self, url: str, config: Path | None, env: Mapping[str, str], keep_alive_s: float | None = KEEP_ALIVE_S
    ) -> None:
        if not is_local(url):
            raise Unavailable(f"no server answers at {url}, and a server can be started only on this machine")
        address = urlsplit(url)
        self._host, self._port = address.hostname or "127.0.0.1", address.port or 8000
        self._config, self._env, self._keep_alive_s = config, env, keep_alive_s
        self.log, self.ready = log_path(env), False
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        config = ("--config", str(self._config)) if self._config else ()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        address = ("--host", self._host, "--port", str(self._port))  # of this machine, whatever the file says
        argv = [sys.executable, "-m", "modelyard", "serve", *address, *config]
        limit = {} if self._keep_alive_s is None else {TEMPORARY_VARIABLE: str(self._keep_alive_s)}
        with self.log.open("w") as log:
            # In its own session, so that neither Ctrl-C in the terminal nor its end reaches it.
            self._process = subprocess.Popen(  # noqa: S603  our own program
                argv if self._keep_alive_s != 0 else die_with_parent(argv, group=True),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self._env, **limit},
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self.ready and self._keep_alive_s != 0:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait_until(self, is_running: Callable[[], bool]) -> None:
        """Until it answers. Raises with the last line of the log if the process has exited."""
        while not is_running():
            self.check_alive()
            time.sleep(_POLL_S)
        self.ready = True

    def check_alive(self) -> None:
        if self._process.poll() is not None:
            last = "".join(self.log.read_text(errors="replace").strip().splitlines()[-1:])
            raise Unavailable(f"the server exited before it was ready ({self.log}): {last or 'its log is empty'}")


@contextmanager
def kept_alive(server: RunningServer | None, touch: Callable[[], object]) -> Iterator[None]:
    """A server that ends when nobody asks it for long is asked now and then, for as long as the block runs."""
    if server is None or not server.keep_alive_s:
        yield
        return
    ended, pause_s = threading.Event(), server.keep_alive_s / _TOUCHES

    def keep() -> None:
        while not ended.wait(pause_s):
            with contextlib.suppress(ModelyardError):  # it was stopped by hand: the command's next request says so
                touch()

    threading.Thread(target=keep, daemon=True, name="keep-server-alive").start()
    try:
        yield
    finally:
        ended.set()
