"""`modelyard optimize` from the wishes to the written file: decide what to run, run it, keep it, print it, apply it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape

from modelyard.benchmark.drawing import check_file as can_draw
from modelyard.benchmark.drawing import save as draw
from modelyard.benchmark.plan import parse_duration as seconds
from modelyard.config.settings import LoadedConfig
from modelyard.core.engine import AvailableMemory
from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.library.cache_dir import cache_dir
from modelyard.server.memory_estimate import machine
from modelyard.tune import goals, report
from modelyard.tune.apply import apply, overruled, writable
from modelyard.tune.journal import Journal, fingerprint
from modelyard.tune.plot import plot
from modelyard.tune.report import Report
from modelyard.tune.run import Bounds, Plan, Run
from modelyard.tune.screen import Terminal
from modelyard.tune.search import Found
from modelyard.tune.subject import Subject

_MIB = 2**20
_INTERRUPTED = 130
_FREE = 0.9  # of the memory that is free now may be one trial's


class Wishes(Struct, frozen=True, kw_only=True):
    """The command's options as they were typed."""

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


def optimize(loaded: LoadedConfig, wishes: Wishes, out: Console, err: Console, folder: Path | None = None) -> int:
    folder = folder or cache_dir() / "tune"
    plan = planned(wishes)
    _check(loaded, wishes)
    subject = Subject(loaded.config, _model(loaded, wishes.model), plan.goal, here := machine())
    plan = plan if plan.memory is not None else replace(plan, memory=int(_FREE * here.ram_free))
    journal = _journal(subject, plan, here, folder, fresh=wishes.fresh)
    if len(journal):
        known = f"{len(journal)} trials are known (--fresh starts anew)"
        err.print(f"going on with a run that was broken off: {known}", soft_wrap=True)
    screen = Terminal(plan.goal, subject.current, plan.budget_s, out, err)
    run = Run(subject, plan, journal, screen)
    found, finished = _run(run, screen)
    told = report.report(run, found, finished=finished)
    file = report.save(told, folder)
    _show(told, file, wishes, screen, err)
    try:
        if wishes.apply and finished:
            report.write(replace(told, applied=_applied(loaded, wishes, subject, found, told, err)), file)
    finally:
        if wishes.json:  # last, since it also says what was written
            out.print(file.read_text("utf-8"), markup=False, highlight=False, soft_wrap=True, end="")
    if not finished:
        err.print("the same command goes on where this one was; --fresh starts anew", soft_wrap=True)
    return 0 if finished else _INTERRUPTED


def _check(loaded: LoadedConfig, wishes: Wishes) -> None:
    """What would go wrong at the end is said at the beginning."""
    if wishes.apply:
        writable(loaded)
    if wishes.plot is not None:
        can_draw(wishes.plot)


def planned(wishes: Wishes) -> Plan:
    rise = share(wishes.loss)
    return Plan(
        goal=goals.goal_named(wishes.goal),
        budget_s=seconds(wishes.budget),
        slack=share(wishes.slack),
        streams=wishes.streams,
        seed=wishes.seed,
        memory=None if wishes.memory is None else wishes.memory * _MIB,
        bounds=Bounds(rise, 2 * rise),
    )


def share(text: str) -> float:
    """`5%` and `0.05` are the same."""
    told = text.strip()
    try:
        value = float(told.removesuffix("%")) / (100 if told.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise InvalidRequest(f"{text!r} is no share such as 5% or 0.05")
    return value


def _model(loaded: LoadedConfig, name: str | None) -> str:
    models = loaded.config.models
    if not models:
        raise NotFound("the configuration has no models")
    if name is None:
        return next(iter(models))
    found = loaded.config.router().catalog.find(name)
    if found is None:
        raise NotFound(f"there is no model {name!r}; there are {', '.join(models)}")
    return found.model


def _journal(subject: Subject, plan: Plan, here: AvailableMemory, folder: Path, *, fresh: bool) -> Journal:
    """One for everything that an outcome depends on; another budget or bound goes on with the same trials."""
    known = fingerprint(
        subject.order(subject.current),
        msgspec.to_builtins(goals.load(plan.goal, plan.streams)),
        [plan.goal, plan.seed, psutil.cpu_count(), sorted(here.gpus)],
    )
    journal = Journal(folder / f"{known}.jsonl")
    if fresh:
        journal.forget()
    return journal


def _run(run: Run, screen: Terminal) -> tuple[Found, bool]:
    """Ctrl-C ends the trial that runs, with all its processes, and leaves the best so far."""
    try:
        with screen.shown():
            return asyncio.run(run.go()), True
    except KeyboardInterrupt:
        return run.so_far(), False


def _applied(
    loaded: LoadedConfig, wishes: Wishes, subject: Subject, found: Found, told: Report, err: Console
) -> tuple[str, ...]:
    """The files that were written."""
    if not found.better:
        err.print(f"[yellow]nothing is written:[/yellow] {escape(told.verdict)}", soft_wrap=True)
        return ()
    changes = subject.changes(found.best)
    backends = {name: model.backend for name, model in loaded.config.models.items()}
    done = apply(loaded, changes, backends)
    for file, backup in done.files.items():
        err.print(f"written to {escape(str(file))}; as it was: {escape(str(backup))}", soft_wrap=True)
    for where in overruled(wishes.config, changes, backends):
        err.print(f"[yellow]warning[/yellow] {escape(where)} is set elsewhere, too, which still wins", soft_wrap=True)
    return tuple(map(str, done.files))


def _show(told: Report, file: Path, wishes: Wishes, screen: Terminal, err: Console) -> None:
    drawing = plot(told)
    draw(drawing, file.with_suffix(".svg"))
    if not wishes.json:
        screen.report(told)
    if wishes.plot is not None:
        draw(drawing, wishes.plot)
    err.print(f"[dim]kept in {escape(str(file))}[/dim]", soft_wrap=True)
