"""Threads that follow the machine beside fixed numbers of them, on a quiet and on a busy machine.

    python -m bench.threads [--loads 0 4 12] [--rounds N] [--tokens N] [--model FILE]

One server for each setting; in every round each of them generates the same text, while `load` other processes compute.
The load is added to what runs on the machine anyway: the first line says how busy it was.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean

import httpx

from bench.servers import Server, llama_cpp_config, modelyard_server
from modelyard.library import cores, default_model
from modelyard_bench.statistics import ratio_interval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, nargs="+", default=[0, 4, 12])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    model = arguments.model or default_model.fetch()
    print(f"load before: {os.getloadavg()[0]:.1f} on {cores.logical()} cores")
    with ExitStack() as stack:
        servers = {"adaptive": stack.enter_context(_server(model, None))}
        servers |= {str(count): stack.enter_context(_server(model, count)) for count in cores.thread_counts()}
        for load in arguments.loads:
            with _busy(load):
                _compare(servers, load, arguments.rounds, arguments.tokens)


def _compare(servers: dict[str, Server], load: int, rounds: int, tokens: int) -> None:
    for server in servers.values():  # the adaptive one finds its number
        _generate(server, tokens)
    rates: dict[str, list[float]] = {name: [] for name in servers}
    for _ in range(rounds):
        for name, server in servers.items():
            rates[name].append(_generate(server, tokens))
    best = max((name for name in rates if name != "adaptive"), key=lambda name: fmean(rates[name]))
    shown = ", ".join(f"{name} {fmean(each):.1f}" for name, each in rates.items())
    ratio = ratio_interval(rates["adaptive"], rates[best])
    print(f"load {load}: tok/s by threads: {shown}; adaptive / best fixed ({best}): {ratio}", flush=True)


def _generate(server: Server, tokens: int) -> float:
    """Tokens per second of one stream."""
    body = {
        "model": "real",
        "prompt": f"{time.time()} Once",
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    started = time.perf_counter()
    httpx.post(server.url + "/v1/completions", json=body, timeout=600).raise_for_status()
    return tokens / (time.perf_counter() - started)


@contextmanager
def _server(model: Path, threads: int | None) -> Iterator[Server]:
    config = llama_cpp_config(model, threads or 1, {"main": (2048, 1)})
    if threads is None:
        del config["models"]["real"]["n_threads"]
    with modelyard_server(config) as server:
        yield server


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Other programs, with the same priority."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
