"""Measures the gateway's own cost, with the fake engine behind it, beside a LiteLLM proxy: `make bench`.

    python bench/gateway.py [--quick] [--skip-litellm] [--json FILE]

(a) requests per CPU-second of the server · (b) SSE events · (c) 1,000 concurrent streams · (d) added time to the first
token · (e) a 20,000-token conversation that grows. `bench/phases.py` shows how each is run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from bench.phases import Plan, Results


def main() -> None:
    options, console = _options(), Console()
    if not console.is_terminal:
        console.width = 120
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # a script finds what stands beside it; we need the root
    from bench import litellm_proxy, report, smollm
    from bench.phases import QUICK, Plan

    beside = not (options.quick or options.skip_litellm)
    smollm.tokenizer_folder()
    if beside:
        litellm_proxy.install()
    results = _with_progress(QUICK if options.quick else Plan(), beside, console)
    report.show(results, console)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the gateway beside a LiteLLM proxy.")
    parser.add_argument("--quick", action="store_true", help="half a minute, once each, without LiteLLM")
    parser.add_argument("--skip-litellm", action="store_true", help="the whole run, without LiteLLM")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every measurement in this file")
    return parser.parse_args()


def _with_progress(plan: Plan, beside: bool, console: Console) -> Results:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    from bench.phases import run

    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=plan.steps + (plan.steps_beside if beside else 0))

        def tick(what: str) -> None:
            progress.update(task, description=what, advance=1)

        return run(plan, beside, tick)


if __name__ == "__main__":
    main()
