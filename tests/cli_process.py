"""The `modelyard` command in a separate process, for tests of signals, exit codes and ports."""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modelyard.accounts.owner import OWNER_HEADER
from modelyard.server.running_servers import find_server

ROOT = Path(__file__).parent.parent
DEMO = ("--config", str(ROOT / "configs" / "demo.toml"))  # scripted replies: needs no engine build and no model file
MODELYARD = [sys.executable, "-m", "modelyard"]
DEADLINE = 180.0  # generous, for a busy machine


def environment(**more: str) -> dict[str, str]:
    """The test run's environment without settings of Modelyard, and without the models that its user has pulled."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MODELYARD_", "LLM_POOL_"))}
    return {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "160", "MODELYARD_LIBRARY": "false", **more}


def run(*arguments: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself."""
    return subprocess.run(
        [*MODELYARD, *arguments],
        cwd=cwd,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


class ServerProcess:
    """A running `modelyard serve`. `lines` are the decoded lines of its log so far, `raw` the lines as text."""

    def __init__(self, process: subprocess.Popen[str], env: dict[str, str]) -> None:
        self.process, self._env = process, env
        self.lines: list[dict[str, Any]] = []
        self.raw: list[str] = []
        self.url = ""
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def listen(self) -> None:
        found = re.search(r"http://\S+", self.until("listening on")["message"])
        assert found is not None
        self.url = found.group().replace("localhost", "127.0.0.1")

    @property
    def owner(self) -> dict[str, str]:
        """Headers that prove to be the user who runs the server: from its file, as the commands have them."""
        found = find_server(self.url, self._env)
        assert found is not None
        return {OWNER_HEADER: found.token}

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:  # closed here, because only the reader knows when it is done
            for line in lines:
                self._queue.put(line)
        self._queue.put(None)

    def until(self, text: str) -> dict[str, Any]:
        """Wait for the next log line whose message contains `text`."""
        while (line := self._queue.get(timeout=DEADLINE)) is not None:
            self.raw.append(line)
            self.lines.append(_decoded(line))
            if text in self.lines[-1]["message"]:
                return self.lines[-1]
        raise AssertionError(f"the server ended without the log line {text!r}: {''.join(self.raw)}")

    def until_count(self, text: str, times: int) -> None:
        """Wait until `times` lines since the start contain `text`."""
        while sum(text in line["message"] for line in self.lines) < times:
            self.until(text)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait for the end of the process and return its exit code; `raw` is complete then."""
        code = self.process.wait(DEADLINE)
        while (line := self._queue.get(timeout=DEADLINE)) is not None:
            self.raw.append(line)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(DEADLINE)  # until its last child has closed the log


def _decoded(line: str) -> dict[str, Any]:
    """Output before the log starts, such as errors in the configuration, is plain text."""
    decoded: dict[str, Any] = json.loads(line) if line.startswith("{") else {"message": line, "logger": ""}
    return decoded


@contextmanager
def serve(folder: Path, *arguments: str, config: str = "", **env: str) -> Iterator[ServerProcess]:
    """Serve on a free port in `folder`, with `config` (TOML) as its modelyard.toml."""
    if config:
        (folder / "modelyard.toml").write_text(config)
    variables = environment(**env)
    process = subprocess.Popen(
        [*MODELYARD, "serve", "--port", "0", *arguments],
        cwd=folder,
        env=variables,
        stderr=subprocess.PIPE,
        text=True,
    )
    server = ServerProcess(process, variables)
    try:
        server.listen()
        yield server
    finally:
        server.close()
