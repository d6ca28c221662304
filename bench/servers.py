"""Servers under test, each on a free port of 127.0.0.1: ours, llama-server, LiteLLM, smg and a minimal baseline.

Each is a child process, measured by its CPU time and memory, and stopped by its process id.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil

from modelyard.library.cache_dir import cache_dir
from setup.llama_server import fetch_binary

ROOT = Path(__file__).resolve().parent.parent
OURS, LLAMA_SERVER, LITELLM, SMG = "Modelyard", "llama-server", "LiteLLM", "smg"


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


class Server:
    def __init__(self, process: psutil.Process, port: int) -> None:
        self.process, self.port = process, port
        self.url = f"http://127.0.0.1:{port}"

    def cpu_s(self) -> float:
        """User and system time of the process and its children, to the nanosecond (/proc has hundredths)."""
        # The kernel's clock id of another process's CPU time.
        return sum(time.clock_gettime((~process.pid << 3) | 2) for process in self._tree())

    def rss_mb(self) -> float:
        return sum(process.memory_info().rss for process in self._tree()) / 2**20

    def peak_mb(self) -> float:
        """The sum of the peak resident memory of each process."""
        status = [Path(f"/proc/{process.pid}/status").read_text() for process in self._tree()]
        peaks = [line for text in status for line in text.splitlines() if line.startswith("VmHWM:")]
        return sum(int(line.split()[1]) for line in peaks) / 1024

    def _tree(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


@contextmanager
def running(
    command: Sequence[str], port: int, ready: str = "", env: Mapping[str, str] | None = None, within_s: float = 120.0
) -> Iterator[Server]:
    """The server until the block ends. It is ready when the port accepts, or the path `ready` responds with 200. It has
    none of the user's keys, its usage is not counted as the user's, and it knows no KV of an earlier run."""
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory(prefix="modelyard-data-") as data:
        environment = {**os.environ, "XDG_DATA_HOME": data, "MODELYARD_KV_STORE": "off", **(env or {})}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            until = time.monotonic() + within_s
            while not _is_ready(port, ready):
                if time.monotonic() > until or process.poll() is not None:
                    log.seek(0)
                    output = log.read()[-3000:].decode(errors="replace")
                    raise SystemExit(f"{' '.join(command)} did not start within {within_s:.0f} s:\n{output}")
                time.sleep(0.05)
            yield Server(psutil.Process(process.pid), port)
        finally:
            stop(process)


def _is_ready(port: int, path: str) -> bool:
    try:
        if not path:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return True
        with closing(HTTPConnection("127.0.0.1", port, timeout=2)) as connection:
            connection.request("GET", path)
            return connection.getresponse().status == 200
    except OSError:
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
    for child in psutil.wait_procs(children, timeout=2)[1]:
        child.kill()


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core but one busy at the lowest priority.

    Where two cores share one execution unit, CPU time is worth less while the other core works. A fast server keeps its
    load generator busy and a slow one does not: without this, their CPU times would not be comparable.
    """
    count = max(1, (os.cpu_count() or 2) - 1)
    command = [sys.executable, "-c", "import os; os.nice(19)\nwhile True: pass"]
    spinning = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


# --- ours -------------------------------------------------------------------------------------------------------------


@contextmanager
def modelyard_server(
    config: Mapping[str, Any], *options: str, env: Mapping[str, str] | None = None, within_s: float = 120.0
) -> Iterator[Server]:
    """`modelyard serve` with this configuration."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="modelyard-bench-") as folder:
        file = Path(folder) / "modelyard.json"
        file.write_text(json.dumps(config))
        command = [sys.executable, "-m", "modelyard", "serve", "--config", str(file), "--port", str(port), *options]
        with running(command, port, "/health/ready", env, within_s) as server:
            yield server


BACKGROUND = "background"  # a model of the fake engine that keeps the gateway busy: 50 tokens per second per stream


def llama_cpp_config(model: Path, threads: int, caches: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """The model `real` with these caches (window and number of conversations by name), without speculation.

    Model names with `haiku` are routed to the cache `fast` if there is one, all others to `main`.
    """
    real = {"backend": "llama_cpp", "path": str(model), "n_threads": threads, "speculation": "off"}
    fake = {"backend": "fake", "token_delay": 0.02, "script": [{"steps": [{"tokens": 100}]}]}
    tables: dict[str, dict[str, Any]] = {
        name: {"model": "real", "n_ctx": window, "parallel": parallel} for name, (window, parallel) in caches.items()
    }
    tables[BACKGROUND] = {"model": BACKGROUND, "n_ctx": 2048, "parallel": 64}
    fast = [{"match": "*haiku*", "cache": "fast"}] if "fast" in caches else []
    routes = [{"match": BACKGROUND, "cache": BACKGROUND}, *fast, {"match": "*", "cache": "main"}]
    return {"models": {"real": real, BACKGROUND: fake}, "caches": tables, "routes": routes}


# --- others -----------------------------------------------------------------------------------------------------------


@contextmanager
def llama_server(
    model: Path, threads: int, window: int, slots: int, *options: str, binary: Path | None = None
) -> Iterator[Server]:
    """Every slot has the whole window."""
    port = free_port()
    command = [str(binary or fetch_binary()), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads", str(threads), "--threads-batch", str(threads), "--no-webui"]
    command += ["--ctx-size", str(window * slots), "--parallel", str(slots), *options]
    with running(command, port, "/health") as server:
        yield server


LITELLM_VERSION, SMG_VERSION = "1.102.4", "1.13.0"
_LITELLM_ENV = {
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOG": "ERROR",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # the bundled table, not one from the network
    "NO_DOCS": "True",
}


def install_litellm() -> Path:
    return _installed("litellm[proxy]", LITELLM_VERSION)


def install_smg() -> Path:
    return _installed("smg", SMG_VERSION)


def _installed(package: str, version: str) -> Path:
    """Its virtual environment, created once per version."""
    name = package.partition("[")[0]
    folder = cache_dir() / f"bench-{name}"
    stamp, python = folder / f"{name}-{version}", folder / "bin" / "python"
    if not stamp.exists():
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
        command = [str(python), "-m", "pip", "--disable-pip-version-check", "install"]
        if subprocess.run([*command, f"{package}=={version}"], check=False, timeout=1800).returncode:
            raise SystemExit(f"{name} {version} could not be installed: see pip's output above")
        stamp.touch()
    return folder


def litellm_config(**params: str) -> dict[str, Any]:
    """`params` say where the responses come from: `mock_response`, or `api_base` of an upstream."""
    model = {"model": "openai/bench", "api_key": "bench", **params}
    return {
        "model_list": [{"model_name": "bench", "litellm_params": model}],
        "litellm_settings": {"set_verbose": False, "num_retries": 0, "request_timeout": 120},
        "general_settings": {"disable_spend_logs": True},
    }


@contextmanager
def litellm_server(**params: str) -> Iterator[Server]:
    """One worker without a database, as its documentation advises for production. From its own mock, a stream has
    three characters per event."""
    port, folder = free_port(), install_litellm()
    with tempfile.TemporaryDirectory(prefix="modelyard-bench-") as folder_name:
        config = Path(folder_name) / "litellm.yaml"
        config.write_text(json.dumps(litellm_config(**params)))  # JSON is YAML
        command = [str(folder / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--num_workers", "1", "--telemetry", "False"]
        with running(command, port, "/health/liveliness", _LITELLM_ENV, within_s=180) as server:
            yield server


@contextmanager
def smg_server(upstream: str) -> Iterator[Server]:
    """A gateway in Rust, in front of one upstream. It is ready when it has asked the upstream for its models."""
    port, metrics = free_port(), free_port()
    command = [str(install_smg() / "bin" / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker-urls", upstream, "--policy", "round_robin", "--log-level", "warn"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    with running(command, port, "/readiness") as server:
        yield server


@contextmanager
def baseline_server(delay: float = 0.0) -> Iterator[Server]:
    """`bench/baseline_server.py`: the smallest latency that a server can have."""
    port = free_port()
    with running([sys.executable, "-m", "bench.baseline_server", str(port), str(delay)], port) as server:
        yield server
