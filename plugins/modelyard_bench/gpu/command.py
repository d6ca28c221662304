"""Runs the suite and prints it: starts every server, measures them in turn, stops them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from modelyard.core.errors import InvalidRequest, ModelyardError
from modelyard.http.server import loop_factory
from modelyard_bench.gpu.servers import OURS, Server, open_servers
from modelyard_bench.gpu.suite import Case, Results, Settings, measure
from modelyard_bench.statistics import ratio_interval
from modelyard_bench.targets import BenchOptions

_WIDTHS = (1, 2, 4, 8, 16, 32, 64)


def bench_gpu(options: BenchOptions, models: Sequence[Path], *, as_json: bool, out: Console, err: Console) -> int:
    settings = read_settings(options)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        results = runner.run(_run(settings, models, err))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(values(settings, results)), indent=2).decode() + "\n")
    else:
        for server in results.peers():
            out.print(table(results, server))
        for note in results.notes():
            out.print(note, markup=False, highlight=False)
    return 0 if results.rates else 1


def read_settings(options: BenchOptions) -> Settings:
    if options.urls or options.configs or options.body is not None:
        raise InvalidRequest("--gpu starts its own servers: it takes no --url, --config and --body")
    try:
        widths = tuple(sorted({int(part) for part in options.streams.split(",")})) if options.streams else _WIDTHS
    except ValueError:
        widths = ()
    if not widths or widths[0] < 1:
        raise InvalidRequest(f"--concurrency {options.streams!r} is not a list such as 1,8,64")
    return Settings(
        widths=widths,
        rounds=options.rounds or 2,
        output_tokens=options.output_tokens or 128,
        prompt_tokens=options.prompt_tokens or 3_937,
        seed=options.seed,
    )


async def _run(settings: Settings, models: Sequence[Path], err: Console) -> Results:
    results = Results()

    began = time.monotonic()

    def say(line: str) -> None:
        err.print(f"{time.monotonic() - began:4.0f} s  {line}", markup=False, highlight=False)

    async with AsyncExitStack() as stack:
        groups = await open_servers(stack, models, settings.slots, settings.window, say)
        try:
            await measure(groups, settings, results, say)
        except asyncio.CancelledError:  # Ctrl-C: what was measured counts
            say("interrupted")
        except ModelyardError as error:
            if not results.rates:
                raise
            say(f"the run ends here: {error.message}")
    return results


# --- what is printed --------------------------------------------------------------------------------------------------


def table(results: Results, peer: Server) -> Table:
    ours = results.ours_beside(peer)
    made = Table("case", "unit", peer.name, ours.name, f"{OURS} / {peer.name}", title=f"{ours.name} beside {peer.name}")
    for case in results.cases():
        theirs, own = (results.rates.get((case, each.name), []) for each in (peer, ours))
        if not own:
            continue
        ratio = str(_ratio(case, own, theirs)).replace("[", r"\[") if theirs else "–"
        made.add_row(case.name, case.unit, _mean(theirs), _mean(own), ratio)
    return made


def _ratio(case: Case, ours: Sequence[float], theirs: Sequence[float]) -> Any:
    """Above 1 is better for us."""
    count = min(len(ours), len(theirs))
    left, right = (ours, theirs) if case.more_is_better else (theirs, ours)
    return ratio_interval(left[:count], right[:count])


def _mean(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = sum(values) / len(values)
    return f"{mean:,.0f}" if mean >= 100 else f"{mean:.3g}"


def values(settings: Settings, results: Results) -> dict[str, Any]:
    rows = [
        {"case": case.name, "unit": case.unit, "server": server, "values": found}
        for (case, server), found in results.rates.items()
    ]
    return {"settings": settings, "rows": rows, "notes": results.notes()}
