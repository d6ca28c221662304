"""`modelyard optimize` from its options to the written file: plan, run, save, print, apply."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape

from modelyard.benchmark import drawing
from modelyard.benchmark.results import parse_duration
from modelyard.config.settings import LoadedConfig
from modelyard.core.engine import AvailableMemory
from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.library.cache_dir import cache_dir
from modelyard.server.memory_estimate import available_memory
from modelyard.tune import config_writer, goals, report
from modelyard.tune.optimizer import Optimizer, OptimizerPlan, QualityBounds, TrialHistory, fingerprint
from modelyard.tune.report import Report, TerminalReport, plot
from modelyard.tune.search import SearchResult
from modelyard.tune.tuned_model import TunedModel

_MIB = 2**20
_INTERRUPTED = 130
_BUSY = 0.5  # programs per processor in the last minute
_MEMORY_SHARE = 0.9  # of the free memory that one trial may use


class OptimizeOptions(Struct, frozen=True, kw_only=True):
    """The command's options as typed."""

    config: Path | None = None
    model: str | None = None
    goal: str = "chat"
    budget: str = "10m"
    apply: bool = False
    streams: int | None = None
    slack: str = "5%"
    loss: str = "1%"
    memory: int | None = None
    fresh: bool = False
    seed: int = 0
    json: bool = False
    plot: Path | None = None


def optimize(
    loaded: LoadedConfig, options: OptimizeOptions, out: Console, err: Console, folder: Path | None = None
) -> int:
    """The exit code."""
    folder = folder or cache_dir() / "tune"
    plan = make_plan(options)
    if options.apply:  # fail now, not after the run
        config_writer.writable_files(loaded)
    if options.plot is not None:
        drawing.check_file(options.plot)
    available = available_memory()
    model = TunedModel(loaded.config, _model_name(loaded, options.model), plan.goal, available)
    if plan.memory is None:
        plan = replace(plan, memory=int(_MEMORY_SHARE * available.ram_free))
    history = _history(model, plan, available, folder, fresh=options.fresh)
    if len(history):
        err.print(f"resuming an interrupted run: {len(history)} trials are known (--fresh starts over)", soft_wrap=True)
    if (load := psutil.getloadavg()[0] / (psutil.cpu_count() or 1)) > _BUSY:
        busy = f"the machine is busy: {load:.1f} programs want each of its processors"
        err.print(f"[yellow]warning[/yellow] {busy}, so that more rounds are needed", soft_wrap=True)
    terminal = TerminalReport(plan.goal, model.current, plan.budget_s, out, err)
    run = Optimizer(model, plan, history, terminal)
    try:
        with terminal.progress:
            result, finished = asyncio.run(run.run()), True
    except KeyboardInterrupt:  # the running trial has ended with all its processes
        result, finished = run.interim_result(), False
    found = report.make_report(run, result, finished=finished)
    file = report.save(found, folder)
    _show(found, file, options, terminal, err)
    try:
        if options.apply and finished:
            report.write(replace(found, applied=_apply(loaded, options, model, result, found, err)), file)
    finally:
        if options.json:  # last, because it also contains what was written
            out.print(file.read_text("utf-8"), markup=False, highlight=False, soft_wrap=True, end="")
    if not finished:
        err.print("run the same command again to resume; --fresh starts over", soft_wrap=True)
    return 0 if finished else _INTERRUPTED


def make_plan(options: OptimizeOptions) -> OptimizerPlan:
    rise = parse_share(options.loss)
    return OptimizerPlan(
        goal=goals.parse_goal(options.goal),
        budget_s=parse_duration(options.budget),
        slack=parse_share(options.slack),
        streams=options.streams,
        seed=options.seed,
        memory=None if options.memory is None else options.memory * _MIB,
        bounds=QualityBounds(rise, 2 * rise),
    )


def parse_share(text: str) -> float:
    """`5%` and `0.05` are the same."""
    stripped = text.strip()
    try:
        value = float(stripped.removesuffix("%")) / (100 if stripped.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise InvalidRequest(f"{text!r} is not a share such as 5% or 0.05")
    return value


def _model_name(loaded: LoadedConfig, name: str | None) -> str:
    models = loaded.config.models
    if (name := name or loaded.first_model) is None:
        raise NotFound("the configuration has no models")
    found = loaded.config.router().catalog.find(name)
    if found is None:
        raise NotFound(f"there is no model {name!r}; there are {', '.join(models)}")
    return found.model


def _history(
    model: TunedModel, plan: OptimizerPlan, available: AvailableMemory, folder: Path, *, fresh: bool
) -> TrialHistory:
    """One file for everything that outcomes depend on; another budget or quality bound continues the same file."""
    key = fingerprint(
        model.trial_config(model.current),
        msgspec.to_builtins(goals.trial_load(plan.goal, plan.streams)),
        [plan.goal, plan.seed, psutil.cpu_count(), sorted(available.gpus)],
    )
    history = TrialHistory(folder / f"{key}.jsonl")
    if fresh:
        history.clear()
    return history


def _apply(
    loaded: LoadedConfig, options: OptimizeOptions, model: TunedModel, result: SearchResult, found: Report, err: Console
) -> tuple[str, ...]:
    """The files that were written."""
    if not result.better:
        err.print(f"[yellow]nothing is written:[/yellow] {escape(found.verdict)}", soft_wrap=True)
        return ()
    changes = model.changes(result.best)
    backends = {name: settings.backend for name, settings in loaded.config.models.items()}
    backups = config_writer.apply(loaded, changes, backends)
    for file, backup in backups.items():
        err.print(f"written to {escape(str(file))}; backup: {escape(str(backup))}", soft_wrap=True)
    for path in config_writer.overridden(options.config, changes, backends):
        err.print(f"[yellow]warning[/yellow] {escape(path)} is also set in the environment, which wins", soft_wrap=True)
    return tuple(map(str, backups))


def _show(found: Report, file: Path, options: OptimizeOptions, terminal: TerminalReport, err: Console) -> None:
    chart = plot(found)
    drawing.save(chart, file.with_suffix(".svg"))
    if not options.json:
        terminal.show(found)
    if options.plot is not None:
        drawing.save(chart, options.plot)
    err.print(f"[dim]saved in {escape(str(file))}[/dim]", soft_wrap=True)
