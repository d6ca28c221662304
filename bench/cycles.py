"""Loads and unloads each engine again and again: `python -m bench.cycles [--cycles 200] [--only ENGINE] [--svg FILE]`

A server with one engine loads its model, answers one request and unloads it, in every cycle. Memory, open files and
threads of the server and its children, measured after each unload, must be the same at the end as after the warm-up.
The exit code is 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
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
from modelyard.benchmark.drawing import check_file, save
from modelyard.library import default_model
from modelyard.library.convert import convert

ENGINES = ("fake", "llama_cpp", "ct2", "llama_server")
_WARMUP = 10  # cycles: what is allocated once is allocated there
_MAX_GROWTH_MB = 24.0  # the allocator's own; a leak would come back in every cycle
_MESSAGES = [{"role": "user", "content": "Say hello."}]


def model_configs(gguf: Path, ct2: Path) -> dict[str, dict[str, Any]]:
    return {
        "fake": {"backend": "fake", "token_delay": 0},
        "llama_cpp": {"backend": "llama_cpp", "path": str(gguf), "n_threads": 1, "speculation": "off"},
        "ct2": {"backend": "ct2", "path": str(ct2), "intra_threads": 1},
        "llama_server": {"backend": "llama_server", "path": str(gguf), "llama_server_n_threads": 1},
    }


class CycleRun(Struct, frozen=True):
    """The usage after each cycle of one engine; the first `warmup` do not count."""

    engine: str
    samples: tuple[Usage, ...]
    seconds: float
    warmup: int

    @property
    def first(self) -> Usage:
        return self.samples[self.warmup]

    @property
    def last(self) -> Usage:
        return self.samples[-1]

    @property
    def slope_kb(self) -> float:
        """Of the resident memory, per cycle, over the second half."""
        rss = [one.rss_mb for one in self.samples[len(self.samples) // 2 :]]
        return 1024 * slope(range(len(rss)), rss)

    @property
    def is_flat(self) -> bool:
        """A file or thread more is the pool's, which starts its workers when they are needed; ten are a leak."""
        counts = zip(self.first[1:], self.last[1:], strict=True)
        return self.last.rss_mb - self.first.rss_mb < _MAX_GROWTH_MB and all(b - a < 10 for a, b in counts)


def run_cycles(engine: str, model: Mapping[str, Any], cycles: int, warmup: int = _WARMUP) -> CycleRun:
    config = {"models": {"cycled": {**model, "enabled": False, "n_ctx": 512}, "always": {"backend": "fake"}}}
    samples: list[Usage] = []
    with modelyard_server(config) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        began = time.perf_counter()
        for _ in track(range(warmup + cycles), engine, disable=not sys.stdout.isatty()):
            _cycle(client)
            samples.append(usage(server.process))
        seconds = time.perf_counter() - began
    return CycleRun(engine, tuple(samples), seconds, warmup)


def _cycle(client: httpx.Client) -> None:
    body = {"model": "cycled", "messages": _MESSAGES, "max_tokens": 4, "temperature": 0}
    client.post("/v1/admin/models/cycled/load").raise_for_status()
    client.post("/v1/chat/completions", json=body).raise_for_status()
    client.post("/v1/admin/models/cycled/unload").raise_for_status()


def show(runs: Sequence[CycleRun], out: Console) -> None:
    table = Table(title="Load and unload cycles", title_justify="left", expand=False)
    for name in ("engine", "cycles", "RSS", "slope", "files", "threads", "processes", "a cycle", "flat"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    for run in runs:
        first, last = run.first, run.last
        table.add_row(
            run.engine,
            str(len(run.samples) - run.warmup),
            f"{first.rss_mb:.0f} → {last.rss_mb:.0f} MiB",
            f"{run.slope_kb:+.0f} KiB/cycle",
            *(f"{a} → {b}" for a, b in zip(first[1:], last[1:], strict=True)),
            f"{run.seconds / len(run.samples):.2f} s",
            mark(run.is_flat),
        )
    out.print(table)
    show_notes((machine(), f"after each unload, from the end of {_WARMUP} warm-up cycles to the last cycle"), out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--only", choices=ENGINES, help="this engine alone")
    parser.add_argument("--svg", type=Path, help="also draw the memory of each engine over its cycles")
    options = parser.parse_args()
    if options.svg:
        check_file(options.svg)
    models = model_configs(default_model.fetch(), Path(convert("smollm2", "ct2").path))
    chosen = (options.only,) if options.only else ENGINES
    runs = [run_cycles(engine, models[engine], options.cycles) for engine in chosen]
    show(runs, console())
    if options.svg:
        rss = {run.engine: [one.rss_mb for one in run.samples] for run in runs}
        save(draw_series("RSS after each unload (MiB)", "cycles", range(options.cycles + _WARMUP), rss), options.svg)
    return 0 if all(run.is_flat for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
