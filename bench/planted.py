"""Planted bad settings that `modelyard optimize --apply` has to mend, on llama.cpp, while other programs compute.

    python -m bench.planted [--load N] [--budget TIME] [--rounds N] [--only NAME …] [--record FILE]

For each of the twenty cases a file with the bad setting is optimized by the command, as a user would run it. Then both
files, the one before and the one that was written, are measured again with another load, in interleaved rounds, each
in a new process. A case holds if the command wrote the file, left everything else in it as it was, kept the file before
as a backup, and if the gain measured again is beyond the noise. `--record` appends one line of JSON per case.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from msgspec import Struct
from rich.table import Table

from bench.report import console, machine, mark, show_notes
from bench.servers import ROOT
from modelyard.config.load import load_config
from modelyard.core.knobs import Goal
from modelyard.library import default_model
from modelyard.library.cache_dir import cache_dir
from modelyard_bench.statistics import Interval, ratio_interval
from modelyard_optimize import goals
from modelyard_optimize.trial import Measurement, TrialJob, TrialLimits, run_trial
from modelyard_optimize.tuned_model import single_model_config
from setup.llama_server import fetch_binary

_MODEL = "planted"
_WINDOW = 8192
_TRIAL_S = 300.0
_SEED = 40  # of the load that measures again: other prompts than the optimizer's
_COMMENT = "# the reason for this line is kept"


class Case(Struct, frozen=True):
    """Settings of the model, and of its cache if there is a section for it."""

    name: str
    goal: Goal
    model: Mapping[str, Any]
    cache: Mapping[str, Any] = {}
    backend: str = "llama_cpp"


_COARSE, _EXACT = {"type_k": "q4_0", "type_v": "q4_0"}, {"type_k": "f32", "type_v": "f32"}
CASES = (
    Case("one thread", "chat", {"n_threads": 1}),
    Case("one thread, agent", "agent", {"n_threads": 1}),
    Case("one thread for prompts", "agent", {"n_threads_batch": 1}),
    Case("one thread, several answers", "batch", {"n_threads": 1}),
    Case("one thread in the cache's section", "agent", {}, {"n_threads": 1}),
    Case("ubatch 1", "agent", {"n_ubatch": 1}),
    Case("ubatch 2, chat", "chat", {"n_ubatch": 2}),
    Case("ubatch 4", "agent", {"n_ubatch": 4}),
    Case("ubatch 8", "agent", {"n_ubatch": 8}),
    Case("ubatch 8 in the cache's section", "agent", {}, {"n_ubatch": 8}),
    Case("flash attention off, ubatch 2048", "memory", {"flash_attn": "off", "n_ubatch": 2048}),
    Case("flash attention off in the cache's section", "memory", {"n_ubatch": 1024}, {"flash_attn": False}),
    Case("KV f32", "memory", _EXACT),
    Case("KV f32 in the cache's section", "memory", {}, _EXACT),
    Case("keys f32", "memory", {"type_k": "f32"}),
    Case("one thread, ubatch 8", "agent", {"n_threads": 1, "n_ubatch": 8}),
    Case("one thread, KV f32", "chat", {"n_threads": 1, **_EXACT}),
    Case("llama-server, batch 8", "agent", {}, {"n_batch": 8, "n_ubatch": 8}, backend="llama_server"),
    Case("llama-server, ubatch 4", "agent", {}, {"n_ubatch": 4}, backend="llama_server"),
    Case("llama-server, one thread", "chat", {"llama_server_n_threads": 1}, backend="llama_server"),
)


class Result(Struct, frozen=True, kw_only=True):
    """`gain` is of the goal's figure, measured again: above 1 is better."""

    case: str
    goal: Goal
    exit_code: int
    seconds: float  # of the command
    load: float  # programs that wanted a core meanwhile, in the last minute
    written: dict[str, Any] = {}
    verdict: str = ""
    promised: Interval | None = None
    gain: Interval | None = None
    faults: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return not self.faults and self.gain is not None and self.gain.low > 1


def file_text(case: Case, path: Path) -> str:
    """A file with comments, a model's section, and one for its cache if the case has one."""
    model = {"backend": case.backend, "path": str(path), **case.model}
    if not case.cache:
        model["n_ctx"] = _WINDOW
    if case.backend == "llama_server":
        model["llama_server_binary"] = str(fetch_binary())
    lines = [_COMMENT, f"[models.{_MODEL}]", *(f"{key} = {json.dumps(value)}" for key, value in model.items())]
    if case.cache:
        lines += ["", f"[caches.main]  {_COMMENT}", f'model = "{_MODEL}"', f"n_ctx = {_WINDOW}"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in case.cache.items()]
    return "\n".join([*lines, "", "[http]", f"port = 8123  {_COMMENT}", ""])


def run_case(case: Case, budget: str, load: int, rounds: int) -> Result:
    with tempfile.TemporaryDirectory(prefix="modelyard-planted-") as name, busy(load):
        folder = Path(name)
        file = folder / "modelyard.toml"
        file.write_text(before := file_text(case, default_model.fetch()))
        began = time.monotonic()
        done = _optimize(file, case.goal, budget, folder)
        seconds, machine_load = time.monotonic() - began, os.getloadavg()[0]
        report = json.loads(done.stdout) if done.stdout.startswith("{") else {}
        result = Result(
            case=case.name,
            goal=case.goal,
            exit_code=done.returncode,
            seconds=round(seconds, 1),
            load=round(machine_load, 1),
            written=report.get("changes", {}) if report.get("applied") else {},
            verdict=report.get("verdict") or done.stderr[-500:],
            promised=msgspec.convert(report["ratio"], Interval) if report.get("ratio") else None,
        )
        print(done.stderr, file=sys.stderr)
        if faults := tuple(write_back_faults(before, file, done.returncode)):
            return msgspec.structs.replace(result, faults=faults)
        (folder / "before.toml").write_text(before)
        gain = asyncio.run(measured_gain(case.goal, folder / "before.toml", file, rounds))
        return msgspec.structs.replace(result, gain=gain, faults=() if gain is not None else ("not measured again",))


def _optimize(file: Path, goal: Goal, budget: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Its reports stay in a folder of this case, so that the workbench does not list them."""
    (folder / "cache").mkdir()
    for part in ("models", "llama_cpp", "llama-server", "selftest"):
        if (cache_dir() / part).exists():
            (folder / "cache" / part).symlink_to(cache_dir() / part)
    command = [sys.executable, "-m", "modelyard", "optimize", "--config", str(file), "--for", goal, "--budget", budget]
    return subprocess.run(
        [*command, "--apply", "--json"],
        cwd=ROOT,
        env=os.environ | {"MODELYARD_CACHE": str(folder / "cache"), "XDG_DATA_HOME": str(folder / "data")},
        capture_output=True,
        text=True,
        check=False,
    )


def write_back_faults(before: str, file: Path, exit_code: int) -> Iterator[str]:
    after = file.read_text()
    if exit_code != 0:
        yield f"exit code {exit_code}"
    if after == before:
        yield "nothing was written"
        return
    if after.count(_COMMENT) != before.count(_COMMENT):
        yield "a comment is lost"
    if tomllib.loads(after)["http"] != tomllib.loads(before)["http"]:
        yield "another section has changed"
    if before not in [other.read_text() for other in file.parent.glob(f"{file.stem}.bak*")]:
        yield "there is no backup of the file before"


async def measured_gain(goal: Goal, before: Path, after: Path, rounds: int) -> Interval | None:
    """Of the file after over the one before, by the goal's score; for memory, by the memory alone."""
    figures: dict[Path, list[float]] = {before: [], after: []}
    for number in range(rounds):
        for file in (before, after) if number % 2 == 0 else (after, before):
            measurement = await _trial(goal, file, number)
            if measurement is None:
                return None
            figures[file].append(1 / measurement.memory if goal == "memory" else goals.score(goal, measurement))
    return ratio_interval(figures[after], figures[before])


async def _trial(goal: Goal, file: Path, number: int) -> Measurement | None:
    load = goals.trial_load(goal)
    config = single_model_config(load_config(file, env={}).config, _MODEL)
    job = TrialJob(
        config=config,
        model=_MODEL,
        workload=load.workload,
        conversations=1,
        seed=_SEED + number,
        key=f"again {number}",
        answer_s=_TRIAL_S,
    )
    outcome = await run_trial(job, TrialLimits(_TRIAL_S))
    if isinstance(outcome, Measurement):
        return outcome
    print(f"{file.name}: {outcome}", file=sys.stderr)
    return None


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Other programs of the same priority. Each computes for a time and rests for a time, as programs do."""
    text = "import time\nwhile True:\n s = time.time() + 0.7\n while time.time() < s: pass\n time.sleep(0.3)"
    spinning = [subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.DEVNULL) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=int, default=2, help="programs of ours that compute meanwhile")
    parser.add_argument("--budget", default="3m")
    parser.add_argument("--rounds", type=int, default=4, help="in which the gain is measured again")
    parser.add_argument("--only", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    results = []
    for case in CASES:
        if arguments.only and case.name not in arguments.only:
            continue
        results.append(result := run_case(case, arguments.budget, arguments.load, arguments.rounds))
        print(json.dumps(msgspec.to_builtins(result)), flush=True, file=sys.stderr)
        if arguments.record is not None:
            with arguments.record.open("ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")
    show(results, arguments.load)
    return 0 if all(result.holds for result in results) else 1


def show(results: list[Result], load: int) -> None:
    table = Table(title="Planted settings: modelyard optimize --apply", title_justify="left", expand=False)
    for column in ("case", "goal", "written", "promised", "measured again", "seconds", "load", ""):
        table.add_column(column)
    for one in results:
        table.add_row(
            one.case,
            one.goal,
            ", ".join(f"{name} = {value}" for name, value in one.written.items()) or "; ".join(one.faults),
            *(str(ratio or "").replace("[", r"\[") for ratio in (one.promised, one.gain)),
            f"{one.seconds:.0f}",
            f"{one.load:.1f}",
            mark(one.holds),
        )
    out = console(180)
    out.print(table)
    held = sum(one.holds for one in results)
    spent = fmean(one.seconds for one in results) if results else 0.0
    show_notes(
        (machine(), f"{load} programs computed meanwhile", f"{held} of {len(results)} held", f"{spent:.0f} s each"), out
    )


if __name__ == "__main__":
    sys.exit(main())
