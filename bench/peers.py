"""Two servers on one model file: ours with the llama.cpp engine in process, and a native llama-server."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.servers import Server, free_port, running
from modelyard.library.llama_server import fetch_binary

OURS, THEIRS = "Modelyard", "llama-server"
NOISE = "noise"  # the fake model that keeps the gateway busy
_NOISE_TOKENS, _NOISE_DELAY_S = 100, 0.02


@contextmanager
def modelyard(config: dict[str, Any]) -> Iterator[Server]:
    """One process as `modelyard serve` runs it."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="modelyard-bench-") as folder:
        file = Path(folder) / "modelyard.json"
        file.write_text(json.dumps(config))
        command = [sys.executable, "-m", "modelyard", "serve", "--config", str(file), "--port", str(port)]
        with running(command, port, "/health/ready") as server:
            yield server


def configuration(
    model: Path, threads: int, caches: Mapping[str, tuple[int, int]], speculation: str = "off"
) -> dict[str, Any]:
    """`caches` by name: a conversation's window, and how many of them. Names with `haiku` go to `fast` if it is there,
    `noise` to the fake model, all else to `main`."""
    real = {"backend": "llama_cpp", "path": str(model), "n_threads": threads, "speculation": speculation}
    fake = {"backend": "fake", "token_delay": _NOISE_DELAY_S, "script": [{"steps": [{"tokens": _NOISE_TOKENS}]}]}
    made: dict[str, dict[str, Any]] = {
        name: {"model": "real", "n_ctx": window, "parallel": parallel} for name, (window, parallel) in caches.items()
    }
    made[NOISE] = {"model": NOISE, "n_ctx": 2048, "parallel": 64}
    background = [{"match": "*haiku*", "cache": "fast"}] if "fast" in caches else []
    routes = [{"match": NOISE, "cache": NOISE}, *background, {"match": "*", "cache": "main"}]
    return {"models": {"real": real, NOISE: fake}, "caches": made, "routes": routes}


@contextmanager
def llama_server(model: Path, threads: int, window: int, slots: int, *more: str) -> Iterator[Server]:
    """Each slot has the whole window, as with us."""
    port = free_port()
    command = [str(fetch_binary()), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads", str(threads), "--threads-batch", str(threads), "--no-webui"]
    command += ["--ctx-size", str(window * slots), "--parallel", str(slots), *more]
    with running(command, port, "/health") as server:
        yield server
