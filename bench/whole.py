"""A whole server in one process and in several, with the fake engine: requests a second of CPU time of all of it."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from bench.load import NUMBER, Job
from bench.measure import Sample, sample
from bench.servers import free_port, running

# A key with limits, so that the gateways must share a scheduler; the load generator shows this key.
CONFIG = """
[models.demo]
backend = "fake"
token_delay = 0
script = [{ steps = [{ text = "Hello there, this is a short answer." }] }]
[caches.main]
model = "demo"
n_ctx = 4096
parallel = 64
[[routes]]
match = "*"
cache = "main"
[[keys]]
name = "bench"
key = "bench"
max_concurrent = 100000
"""
KINDS = {"one process (a)": 1, "2 gateways, scheduler, worker (c)": 2}


def measure(rounds: int, seconds: float) -> dict[str, float]:
    """The middle of several rounds in which they take turns."""
    found: dict[str, list[Sample]] = {title: [] for title in KINDS}
    with tempfile.TemporaryDirectory(prefix="my-bench-") as folder:
        file = Path(folder) / "bench.toml"
        file.write_text(CONFIG)
        for _ in range(rounds):
            for title, workers in KINDS.items():
                found[title].append(_served(file, workers, seconds))
    return {title: statistics.median(one.answers_per_cpu_s for one in each) for title, each in found.items()}


def _served(file: Path, workers: int, seconds: float) -> Sample:
    port = free_port()
    argv = [sys.executable, "-m", "modelyard", "serve", "--config", str(file), "--port", str(port)]
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": f"Hello {NUMBER}."}]})
    job = Job(kind="requests", port=port, body=body, connections=32, seconds=seconds)
    with running([*argv, "--workers", str(workers)], port, "/health/ready") as server:
        sample(server, Job(kind="requests", port=port, body=body, connections=32, seconds=1.0))
        made = sample(server, job)
    if made.outcome.errors:
        raise SystemExit(f"{made.outcome.errors} requests failed: {made.outcome.first_error}")
    return made
