"""Loads and unloads each engine again and again: `python -m bench.cycles [--cycles 200] [--only ENGINE] [--svg FILE]`

A server with one engine loads its model, answers one request and unloads it, in every cycle. Memory, open files and
threads of the server and its children, measured after each unload, must be the same at the end as after the warm-up,
and memory must not go on growing by more than a few KiB with every cycle. The exit code is 1 otherwise.

The upstream of `openai_remote` and `litellm` is another server with the fake engine. Engines that need more than the
project installs run when they are named: `--only litellm` needs the library, `--only vllm` and `--only vllm_serve` use
the environment of `make vllm-env`, `--only exllamav3` needs a GPU and `--exl3 FOLDER`. `--at-once 8` cycles eight
models of the engine side by side.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from msgspec import Struct
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.report import console, machine, mark, show_notes
from bench.resources import Usage, draw_series, slope, usage
from bench.servers import modelyard_server
from modelyard.library import default_model
from modelyard_bench.drawing import check_file, save
from modelyard_convert import convert
from modelyard_vllm import env as vllm_env

ENGINES = ("fake", "llama_cpp", "ct2", "llama_server", "openai_remote")
EXTRA_ENGINES = ("litellm", "vllm", "vllm_serve", "exllamav3")
_UPSTREAM_MODEL = "upstream"
_WARMUP = 10  # cycles: what is allocated once is allocated there
_MAX_GROWTH_MB = 24.0  # the allocator's own; a leak would come back in every cycle
_MAX_SLOPE_KB = 8.0  # per cycle, over the second half of at least so many cycles
_MIN_SLOPE_CYCLES = 200
_HISTORY_REQUESTS = 2100  # what a server remembers of its last requests and log lines is full then
_MESSAGES = [{"role": "user", "content": "Say hello."}]


def model_configs(gguf: Path, ct2: Path, upstream: str) -> dict[str, dict[str, Any]]:
    """`upstream` is the address of an OpenAI-compatible server."""
    return {
        "fake": {"backend": "fake", "token_delay": 0},
        "llama_cpp": {"backend": "llama_cpp", "path": str(gguf), "n_threads": 1, "speculation": "off"},
        "ct2": {"backend": "ct2", "path": str(ct2), "intra_threads": 1},
        "llama_server": {"backend": "llama_server", "path": str(gguf), "llama_server_n_threads": 1},
        "openai_remote": {"backend": "openai_remote", "remote_base_url": upstream, "remote_model": _UPSTREAM_MODEL},
    }


def extra_model_config(engine: str, exl3: Path | None, upstream: str) -> dict[str, Any]:
    if engine == "litellm":
        return {
            "backend": engine,
            "litellm_model": f"openai/{_UPSTREAM_MODEL}",
            "litellm_api_base": upstream,
            "litellm_params": {"api_key": "bench"},
        }
    if engine == "exllamav3":
        if exl3 is None:
            raise SystemExit("exllamav3 needs a quantized model: name its folder with --exl3 FOLDER")
        return {"backend": engine, "path": str(exl3)}
    if not vllm_env.is_ready():
        raise SystemExit("there is no environment with vLLM for the CPU: build it with make vllm-env")
    where = {"python": str(vllm_env.python())} if engine == "vllm" else {"vllm_serve_binary": str(vllm_env.program())}
    return {
        "backend": engine,
        "vllm_model": convert("smollm2", "hf").path,
        "vllm_dtype": "float32",  # bfloat16 kills vLLM on some CPUs
        "vllm_enforce_eager": True,
        "vllm_kv_cache_memory_bytes": 1 << 27,
        "vllm_engine_args": {"block_size": 32},  # the CPU build takes multiples of 32 only
        **where,
    }


class CycleRun(Struct, frozen=True):
    """The usage after each cycle of one engine; the first `warmup` do not count."""

    engine: str
    samples: tuple[Usage, ...]
    seconds: float
    warmup: int
    at_once: int = 1  # cycles per sample

    @property
    def first(self) -> Usage:
        return self.samples[self.warmup]

    @property
    def last(self) -> Usage:
        return self.samples[-1]

    @property
    def cycles(self) -> int:
        return (len(self.samples) - self.warmup) * self.at_once

    @property
    def slope_kb(self) -> float:
        """Of the resident memory, per cycle, over the second half."""
        rss = [one.rss_mb for one in self.samples[len(self.samples) // 2 :]]
        return 1024 * slope(range(len(rss)), rss) / self.at_once

    @property
    def is_flat(self) -> bool:
        """A file or thread more is the pool's, which starts its workers when they are needed; ten are a leak."""
        counts = zip(self.first[1:], self.last[1:], strict=True)
        is_growing = self.cycles >= _MIN_SLOPE_CYCLES and self.slope_kb > _MAX_SLOPE_KB
        has_grown = is_growing or self.last.rss_mb - self.first.rss_mb >= _MAX_GROWTH_MB
        return not has_grown and all(b - a < 10 for a, b in counts)


def run_cycles(engine: str, model: Mapping[str, Any], cycles: int, warmup: int = _WARMUP, at_once: int = 1) -> CycleRun:
    """A sample is taken when all models are unloaded, so there is one for every `at_once` cycles."""
    names = [f"cycled-{number}" for number in range(at_once)]
    models: dict[str, Any] = {name: {**model, "enabled": False, "n_ctx": 512} for name in names}
    caches = {name: {"model": name, "n_ctx": 512} for name in names}
    routes = [{"match": name, "cache": name, "allow_remote": True} for name in names]
    config = {"models": {**models, "always": {"backend": "fake", "token_delay": 0}}, "caches": caches, "routes": routes}
    samples: list[Usage] = []
    with (
        modelyard_server(config) as server,
        httpx.Client(base_url=server.url, timeout=300) as client,
        ThreadPoolExecutor(at_once) as pool,
    ):
        if cycles >= _MIN_SLOPE_CYCLES:
            for _ in range(_HISTORY_REQUESTS):
                _ask(client, "always")
        began = time.perf_counter()
        for _ in track(range(-(-(warmup + cycles) // at_once)), engine, disable=not sys.stdout.isatty()):
            list(pool.map(lambda name: _cycle(client, name), names))
            samples.append(usage(server.process))
        seconds = time.perf_counter() - began
    return CycleRun(engine, tuple(samples), seconds, -(-warmup // at_once), at_once)


def _cycle(client: httpx.Client, model: str) -> None:
    client.post(f"/v1/admin/models/{model}/load").raise_for_status()
    _ask(client, model)
    client.post(f"/v1/admin/models/{model}/unload").raise_for_status()


def _ask(client: httpx.Client, model: str) -> None:
    body = {"model": model, "messages": _MESSAGES, "max_tokens": 4, "temperature": 0}
    client.post("/v1/chat/completions", json=body).raise_for_status()


def show(runs: Sequence[CycleRun], out: Console) -> None:
    table = Table(title="Load and unload cycles", title_justify="left", expand=False)
    for name in ("engine", "cycles", "RSS", "slope", "files", "threads", "processes", "a cycle", "flat"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for run in runs:
        first, last = run.first, run.last
        table.add_row(
            run.engine,
            str(run.cycles),
            f"{first.rss_mb:.0f} → {last.rss_mb:.0f} MiB",
            f"{run.slope_kb:+.0f} KiB/cycle",
            *(f"{a} → {b}" for a, b in zip(first[1:], last[1:], strict=True)),
            f"{run.seconds / len(run.samples) / run.at_once:.2f} s",
            mark(run.is_flat),
        )
    out.print(table)
    show_notes((machine(), f"after each unload, from the end of {_WARMUP} warm-up cycles to the last cycle"), out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--only", choices=ENGINES + EXTRA_ENGINES, help="this engine alone")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="cycle N models of the engine side by side")
    parser.add_argument("--exl3", type=Path, metavar="FOLDER", help="the quantized model for --only exllamav3")
    parser.add_argument("--svg", type=Path, help="also draw the memory of each engine over its cycles")
    options = parser.parse_args()
    if options.svg:
        check_file(options.svg)
    with modelyard_server({"models": {_UPSTREAM_MODEL: {"backend": "fake", "token_delay": 0}}}) as server:
        upstream = f"{server.url}/v1"
        if options.only in EXTRA_ENGINES:
            models = {options.only: extra_model_config(options.only, options.exl3, upstream)}
        else:
            models = model_configs(default_model.fetch(), Path(convert("smollm2", "ct2").path), upstream)
        chosen = (options.only,) if options.only else ENGINES
        runs = [run_cycles(engine, models[engine], options.cycles, at_once=options.at_once) for engine in chosen]
    show(runs, console())
    if options.svg:
        rss = {run.engine: [one.rss_mb for one in run.samples] for run in runs}
        at = range(0, len(runs[0].samples) * options.at_once, options.at_once)
        save(draw_series("RSS after each unload (MiB)", "cycles", at, rss), options.svg)
    return 0 if all(run.is_flat for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
