"""A `modelyard serve` that runs as long as a command needs it: an agent, or `modelyard run`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from modelyard.core.errors import Unavailable
from modelyard.library.cache_dir import cache_dir
from modelyard.processes.parent_death import die_with_parent
from modelyard.server.client import is_local
from modelyard.server.running_servers import TEMPORARY_VARIABLE

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
