"""The servers that are fuzzed: one in a thread for the tests, one as a process with a real model for long runs."""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from bench.servers import free_port, running
from modelyard.library import default_model
from modelyard.telemetry.log import JsonFormatter
from tests.engines.llama_cpp import architectures
from tests.fuzz.explore import DEADLINE_S
from tests.fuzz.http_targets import HttpTargets
from tests.live_server import live_server
from tests.loop_watch import ProcessWatch, watched_command, watched_loop

MODELS = ["demo", "calls"]
ARCHITECTURES = ("gpt2", "kimi-linear", "deepseek4", "bert", "dream", "gemma3")
APART, REAL = "apart", "real"
_KEY = "sk-fuzz"  # an admin key: keys that the fuzzer creates must not lock it out
_HEADERS = {"authorization": f"Bearer {_KEY}"}
_WINDOW = 128  # small: an answer of the real model must end before the deadline


_HASH = f"sha256:{hashlib.sha256(_KEY.encode()).hexdigest()}"
_SETTINGS = {"http": {"docs": True}, "keys": [{"name": "fuzz", "hash": _HASH, "role": "owner"}]}


def configuration(*, real: bool = False) -> dict[str, Any]:
    """`demo` answers by itself, `calls` thinks and calls a tool. `real` adds a llama.cpp model, and one in a process of
    its own."""
    script = [{"steps": [{"think": "hm"}, {"text": "Hello."}, {"call": {"name": "x", "arguments": {"a": 1}}}]}]
    models: dict[str, Any] = {
        "demo": {"backend": "fake", "token_delay": 0, "modalities": ["text", "image"]},
        "calls": {"backend": "fake", "token_delay": 0, "script": script},
    }
    if real:
        file = str(default_model.fetch())
        models[APART] = {"backend": "fake", "token_delay": 0, "placement": "process"}
        models[REAL] = {"backend": "llama_cpp", "path": file, "n_threads": 1, "n_ctx": _WINDOW, "speculation": "off"}
    return {"models": models, "images": {"allow": ["pictures.example"]}, **_SETTINGS}


class LogTail(logging.Handler):
    """What this process logs as errors, in the format of the server's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(JsonFormatter())
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(self.format(record))

    def read(self) -> str:
        lines, self._lines = self._lines, []
        return "\n".join(lines)


@contextmanager
def logged() -> Iterator[Callable[[], str]]:
    """Reads what this process has logged since the last call."""
    tail = LogTail()
    logging.getLogger().addHandler(tail)
    try:
        yield tail.read
    finally:
        logging.getLogger().removeHandler(tail)


@contextmanager
def server_in_thread() -> Iterator[HttpTargets]:
    with (
        logged() as read_log,
        tempfile.TemporaryDirectory(prefix="modelyard-fuzz-") as folder,
        live_server(configuration() | {"accounts": {"path": f"{folder}/accounts.sqlite"}}) as server,
        httpx.Client(base_url=server.url, headers=_HEADERS, timeout=DEADLINE_S) as client,
        watched_loop(server) as loop,
    ):
        client.get("/openapi.json")  # imports FastAPI
        loop.cpu = 0.0
        yield HttpTargets(client, read_log, MODELS, library=True, bounds=ProcessWatch(loop=loop).fault)


@contextmanager
def server_process() -> Iterator[HttpTargets]:
    with _process(configuration(real=True)) as (client, log, bounds):
        yield HttpTargets(client, log, [*MODELS, APART], REAL, bounds=bounds)


@contextmanager
def server_of_architectures() -> Iterator[HttpTargets]:
    """A server with tiny models of architectures for which llama.cpp has assertions: learned positions and a longer
    window, sequences that a recurrent model cannot divide, no vectors, an encoder, diffusion."""
    usual = {"backend": "llama_cpp", "n_threads": 1, "n_ctx": 512, "parallel": 3, "placement": "inline"}
    models = {name: usual | {"path": str(architectures.model(name)), "embeddings": True} for name in ARCHITECTURES}
    with _process({"models": models, **_SETTINGS}) as (client, log, bounds):
        yield HttpTargets(client, log, list(ARCHITECTURES), bounds=bounds)


@contextmanager
def _process(config: dict[str, Any]) -> Iterator[tuple[httpx.Client, Callable[[], str], Callable[[], str]]]:
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="modelyard-fuzz-") as folder:
        file, log, stalls = (Path(folder) / name for name in ("modelyard.json", "log", "stalls"))
        file.write_text(json.dumps(config))
        command = watched_command(stalls, "serve", "--config", str(file), "--port", str(port))
        command = ["sh", "-c", 'exec "$@" 2> "$0"', str(log), *command]
        with (
            running(command, port, "/health/ready") as server,
            httpx.Client(base_url=server.url, headers=_HEADERS, timeout=DEADLINE_S) as client,
        ):
            yield client, _file_tail(log), ProcessWatch(server.process.pid, file=stalls).fault


def _file_tail(file: Path) -> Callable[[], str]:
    at = 0

    def read() -> str:
        nonlocal at
        if file.stat().st_size == at:
            return ""
        with file.open("rb") as stream:
            stream.seek(at)
            data = stream.read()
        at += len(data)
        return data.decode("utf-8", "replace")

    return read
