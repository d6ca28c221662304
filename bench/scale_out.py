"""What more gateway processes bring: requests per second of `serve --workers N`, and thousands of streams at once.

    python -m bench.scale_out [--workers 1 2 4 8 12] [--seconds 4] [--rounds 2] [--streams 5000] [--json FILE]

The fake engine answers at once, so that only the gateways work; it has no weights, so every gateway has its own. The
load comes from half as many processes as there are gateways, and at least one: the figures need a machine with more
cores than `--workers`. The streams get ten tokens a second each and run on the largest number of gateways but one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.gateway import request_body
from bench.prepared_load import LoadJob
from bench.servers import Server, modelyard_server
from modelyard_bench.load import Round
from modelyard_bench.statistics import Distribution, mean_interval, ratio_interval

_CONNECTIONS = 64  # of a gateway
_TOKENS, _RATE = 16, 10.0  # of a stream, and its tokens per second


def config(token_delay: float) -> dict[str, Any]:
    script = [{"steps": [{"tokens": _TOKENS}]}]
    return {
        "models": {"bench": {"backend": "fake", "token_delay": token_delay, "script": script}},
        "caches": {"main": {"model": "bench", "n_ctx": 4096, "parallel": 10_000}},
        "routes": [{"match": "*", "cache": "main"}],
    }


def load(server: Server, processes: int, streams: int, seconds: float, *, stream: bool, ramp_s: float) -> list[Round]:
    """From several processes, which begin together."""
    start_at = time.time() + 1.5 + 0.1 * processes
    jobs = [
        LoadJob(
            url=server.url,
            body=request_body(stream=stream),
            key="bench",
            streams=streams // processes,
            seconds=seconds,
            ramp_s=ramp_s,
            start_at=start_at,
        )
        for _ in range(processes)
    ]
    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(LoadJob.run_in_process, jobs))


def require_success(rounds: Sequence[Round]) -> None:
    if errors := [sample.error for each in rounds for sample in each.samples if sample.error is not None]:
        raise SystemExit(f"{len(errors)} requests failed: {errors[0]}")


def throughput(workers: int, seconds: float) -> dict[str, float]:
    with modelyard_server(config(0.0), "--workers", str(workers)) as server:
        processes = max(1, workers // 2)
        load(server, processes, _CONNECTIONS * workers, 1.0, stream=False, ramp_s=0.0)
        before = server.cpu_s()
        rounds = load(server, processes, _CONNECTIONS * workers, seconds, stream=False, ramp_s=0.0)
        cpu_s, memory = server.cpu_s() - before, server.rss_mb()
    require_success(rounds)
    responses, wall_s = sum(len(each.samples) for each in rounds), max(each.wall_s for each in rounds)
    latency = Distribution.of([sample.total_s for each in rounds for sample in each.samples])
    return {
        "requests_per_s": responses / wall_s,
        "requests_per_cpu_s": responses / cpu_s,
        "cores": cpu_s / wall_s,
        "p50_ms": latency.p50 * 1e3,
        "p99_ms": latency.p99 * 1e3,
        "memory_mb": memory,
    }


def many_streams(workers: int, streams: int, seconds: float) -> dict[str, float]:
    with modelyard_server(config(1 / _RATE), "--workers", str(workers)) as server:
        before, ramp_s = server.cpu_s(), _TOKENS / _RATE
        rounds = load(server, 4, streams, seconds, stream=True, ramp_s=ramp_s)
        cpu_s, memory = server.cpu_s() - before, server.rss_mb()
    samples = [sample for each in rounds for sample in each.samples]
    ttft = Distribution.of([sample.ttft_s for sample in samples if sample.ttft_s is not None])
    gaps = Distribution.of([gap for sample in samples for gap in sample.gaps_s])
    wall_s = max(each.wall_s for each in rounds)
    return {
        "streams": streams,
        "responses": len(samples),
        "errors": sum(sample.error is not None for sample in samples),
        "tokens_per_s": sum(sample.events for sample in samples) / wall_s,
        "ttft_p50_ms": ttft.p50 * 1e3,
        "ttft_p99_ms": ttft.p99 * 1e3,
        "gap_p99_ms": gaps.p99 * 1e3,
        "cores": cpu_s / wall_s,
        "memory_mb": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 12])
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--streams", type=int, default=5000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {soft} open files allowed, {hard} at most", flush=True
    )
    found: dict[int, list[dict[str, float]]] = {workers: [] for workers in given.workers}
    for _ in range(given.rounds):
        for workers in given.workers:
            found[workers].append(throughput(workers, given.seconds))
            print(f"{workers:3} workers: {_shown(found[workers][-1])}", flush=True)
    rates = {workers: [each["requests_per_s"] for each in values] for workers, values in found.items()}
    first = given.workers[0]
    for workers, values in rates.items():
        print(
            f"{workers:3} workers: {mean_interval(values)} requests/s, {ratio_interval(values, rates[first])} × {first}"
        )
    streams = {}
    if given.streams:
        streams = many_streams(sorted(given.workers)[-2:][0], given.streams, 10.0)
        print(_shown(streams), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"throughput": found, "streams": streams}))
    print(f"most: {max(map(fmean, rates.values())):,.0f} requests/s")


def _shown(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,.1f}" for name, value in values.items())


if __name__ == "__main__":
    main()
