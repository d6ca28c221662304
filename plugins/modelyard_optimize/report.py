"""The report of an optimization: values for JSON and the workbench, text for the terminal, and a drawing."""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from modelyard.config.file_editor import toml_fragment
from modelyard.core.errors import Unavailable
from modelyard.core.knobs import COUNTS, Goal, Setting, Value
from modelyard.core.units import format_size
from modelyard_bench.drawing import Circle, Drawing, DrawingShape, Label, Point, Polyline
from modelyard_bench.statistics import Interval, ratio_interval
from modelyard_optimize import goals
from modelyard_optimize.goals import RankedSetting
from modelyard_optimize.optimizer import Optimizer
from modelyard_optimize.search import ScoreRequest, SearchResult
from modelyard_optimize.trial import EngineBenchResult, Measurement, Outcome, QualityResult


class ReportRow(Struct, frozen=True, kw_only=True):
    """One setting: its name if it is the best or a baseline, its changes from the current setting, and its means."""

    name: str
    changes: dict[str, Value]
    trials: int
    score: float
    speed: float
    ttft_s: float
    memory: int
    front: bool
    slow: bool = False  # for memory: slower than the slack allows


class FailedSetting(Struct, frozen=True):
    changes: dict[str, Value]
    reason: str


class QualityLoss(Struct, frozen=True):
    """What a kind of rounding costs in quality, and whether that is within the bound."""

    values: dict[str, Value]
    perplexity: float
    reference: float
    rise: float
    divergence: float | None
    within: bool


class Report(Struct, frozen=True, kw_only=True):
    model: str
    backend: str
    goal: Goal
    about: str
    at: str
    machine: dict[str, Any]
    budget_s: float
    spent_s: float
    trials: int
    grid: int
    noise: float | None  # of one trial; None if nothing was measured twice
    needed_s: float | None  # the budget that would confirm the best, if it is as good as it looks; None: no use
    finished: bool
    better: bool
    verdict: str
    gain: str  # what the best brings, in words; empty if unknown
    ratio: Interval | None
    ratios: dict[str, Interval]  # of the best to each baseline, from the confirmation
    best: dict[str, Value]
    baselines: dict[str, dict[str, Value]]
    changes: dict[str, Value]
    toml: str
    rows: tuple[ReportRow, ...]
    failures: tuple[FailedSetting, ...]
    losses: tuple[QualityLoss, ...]
    left_out: tuple[str, ...]
    bench: dict[str, EngineBenchResult] = {}
    applied: tuple[str, ...] = ()


def make_report(run: Optimizer, result: SearchResult, *, finished: bool = True) -> Report:
    model, plan = run.model, run.plan
    names = {setting: name for name, setting in reversed(model.baselines.items())}
    if result.best != result.current:
        names[result.best] = "best"
    ranking = goals.rank(plan.goal, run.measurements, run.floor)
    ratios = _ratios(run, result)
    gained = gain(plan.goal, result, ranking, ratios.get("current"))
    return Report(
        model=model.name,
        backend=model.backend,
        goal=plan.goal,
        about=goals.ABOUT[plan.goal],
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine={"system": platform.system(), "cpu": platform.processor() or platform.machine()},
        budget_s=plan.budget_s,
        spent_s=round(run.spent_s, 1),
        trials=sum(map(len, run.measurements.values())) + len(run.failures),
        grid=model.space.size,
        noise=result.table.noise()[0] if result.table.has_repeats else None,
        needed_s=run.needed_s,
        finished=finished,
        better=result.better,
        verdict=verdict(result, gained, finished=finished, min_rounds=plan.rules.min_rounds, needed_s=run.needed_s),
        gain=gained,
        ratio=ratios.get("current"),
        ratios=ratios,
        best=result.best.values,
        baselines={name: setting.values for name, setting in model.baselines.items()},
        changes=result.best.changes(result.current),
        toml=toml_fragment({tuple(map(str, path)): value for path, value in model.changes(result.best).items()}),
        rows=tuple(_row(one, names.get(one.setting, ""), result.current) for one in ranking),
        failures=tuple(FailedSetting(s.changes(result.current), str(why)) for s, why in run.failures.items()),
        losses=tuple(_quality_loss(run, rounding) for rounding in run.losses),
        left_out=tuple(model.left_out),
        bench={names.get(setting, "current"): found for setting, found in run.engine_bench.items()},
    )


def gain(goal: Goal, result: SearchResult, ranking: Sequence[RankedSetting], ratio: Interval | None) -> str:
    """What the best brings over the current setting. Less memory may cost speed within the slack: both are shown."""
    if result.best == result.current:
        return ""
    ranked = {one.setting: one for one in ranking}
    best, current = ranked.get(result.best), ranked.get(result.current)
    if goal == "memory" and best is not None and current is not None:
        text = f"{best.memory / current.memory:.2f} times the memory, {best.speed / current.speed:.2f} times the speed"
        return f"{text}; the current settings are slower than --slack allows" if current.slow else text
    return f"{ratio.middle:.2f} times as good" if ratio is not None else ""


def verdict(
    result: SearchResult, gained: str, *, finished: bool, min_rounds: int, needed_s: float | None = None
) -> str:
    table = result.table
    if result.best == result.current:
        if not finished:
            return "interrupted before anything better was found"
        if table.failures and not table.scores:
            return f"nothing could be measured: {next(iter(table.failures.values()))}"
        nothing = "nothing better than the current settings was found"
        return f"{nothing} before the time was up: a longer --budget tries more" if table.out_of_time else nothing
    if not finished:
        return "interrupted: the best so far is not confirmed"
    if result.better:
        return f"better than the current settings beyond the noise: {gained or 'it runs, the current setting does not'}"
    if failed := table.failures.get(result.best):
        return f"not confirmed: the best failed when it was measured again: {failed}"
    rounds = len(result.rounds.get(result.best, []))
    longer = "a longer --budget" if needed_s is None else f"--budget {math.ceil(needed_s / 60)}m"
    if result.ratio is None or rounds < min_rounds:
        return f"not confirmed: {rounds} of at least {min_rounds} rounds fitted into the time; {longer} may confirm it"
    if needed_s is not None:
        seen = f"{gained or 'it is better'} in {rounds} rounds, in which a setting varies by {table.noise()[0]:.0%}"
        return f"not confirmed beyond the noise: {seen}; {longer}, or a quieter machine, may confirm it"
    return "no difference from the current settings beyond the noise"


def _ratios(run: Optimizer, result: SearchResult) -> dict[str, Interval]:
    """Of scores. The ratio to the current setting is the (wider) interval that decided. For memory, ratios are of
    memory: a score that also penalizes slow settings is not a readable ratio."""
    found = {name: _ratio(run, result, setting) for name, setting in run.model.baselines.items()}
    if found.get("current") is not None and run.plan.goal != "memory":
        found["current"] = _finite(result.ratio)
    return {name: ratio for name, ratio in found.items() if ratio is not None}


def _ratio(run: Optimizer, result: SearchResult, other: Setting) -> Interval | None:
    """Round by round; an incomplete round has no counterpart."""
    ours, theirs = result.rounds.get(result.best, []), result.rounds.get(other, [])
    rounds = min(len(ours), len(theirs))
    if other == result.best or not rounds:
        return None
    if run.plan.goal == "memory":
        ours, theirs = ([1 / one.memory for one in run.measurements[each][-rounds:]] for each in (result.best, other))
    return _finite(ratio_interval(ours[:rounds], theirs[:rounds]))


def _finite(ratio: Interval | None) -> Interval | None:
    """The interval of a single round is infinite, which JSON cannot express."""
    return ratio if ratio is not None and ratio.high < float("inf") else None


def _row(one: RankedSetting, name: str, current: Setting) -> ReportRow:
    figures = {field: value for field, value in asdict(one).items() if field != "setting"}
    return ReportRow(name=name, changes=one.setting.changes(current), **figures)


def _quality_loss(run: Optimizer, rounding: Setting) -> QualityLoss:
    loss = run.losses[rounding]
    within = run.plan.bounds.objection(loss) is None
    return QualityLoss(rounding.values, loss.perplexity, loss.reference, loss.rise, loss.divergence, within)


def save(report: Report, folder: Path) -> Path:
    """Where the workbench reads reports; the newest is the last by name."""
    stamp = report.at.replace("-", "").replace(":", "")[:15]
    file = folder / f"{stamp}-{report.model.replace('/', '_')}-{report.goal}.json"
    write(report, file)
    return file


def write(report: Report, file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        raise Unavailable(f"{file} cannot be written: {error.strerror}") from error


# --- the terminal -----------------------------------------------------------------------------------------------------

_ROWS = 12
_MIN_WIDTH = 140
_PHASES = {"baselines": "baseline", "stage": "trying", "pairs": "trying", "confirmation": "confirming"}


class TerminalReport:
    """`err` gets the progress, `out` the result. `left_s` is the longest time that the rest may take."""

    def __init__(self, goal: Goal, current: Setting, budget_s: float, out: Console, err: Console) -> None:
        self._goal, self._current, self._budget, self._out, self._err = goal, current, budget_s, out, err
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[left]} left at most · {task.fields[trials]} trials · best: {task.fields[best]}"),
            console=err,
            transient=True,
        )
        left = format_duration(budget_s)
        self._task = self.progress.add_task("", total=budget_s, left=left, trials=0, best="not known yet")
        self._trials, self._left = 0, left

    def trial_started(self, request: ScoreRequest, left_s: float) -> None:
        what = "quality of" if request.quality else _PHASES[request.phase]
        description = f"{what} {format_changes(request.setting.changes(self._current))}"[:60]
        done, self._left = max(0.0, self._budget - left_s), format_duration(left_s)
        self.progress.update(self._task, description=description, completed=done, left=self._left)

    def trial_ended(self, request: ScoreRequest, outcome: Outcome, best: Setting, *, replayed: bool) -> None:
        self._trials += not request.quality
        self.progress.update(self._task, trials=self._trials, best=format_changes(best.changes(self._current)))
        setting = format_changes(request.setting.changes(self._current))
        line = f"{request.reason or request.phase}: {setting}: {_outcome_text(outcome)}"
        line += " (from the history)" if replayed else "" if self._err.is_terminal else f" ({self._left} left at most)"
        self._err.print(f"[dim]{escape(line)}[/dim]", soft_wrap=True, highlight=False)

    def warning(self, text: str) -> None:
        self._err.print(f"[yellow]warning[/yellow] {escape(text)}", soft_wrap=True, highlight=False)

    def show(self, report: Report) -> None:
        out = self._out
        if not out.is_terminal:  # do not wrap lines in a file
            out.width = max(out.width, _MIN_WIDTH)
        out.print(_table(report))
        for failed in report.failures:
            out.print(f"[yellow]failed[/yellow] {escape(format_changes(failed.changes))}: {escape(failed.reason)}")
        for loss in report.losses:
            bound = "[green]within the bound[/green]" if loss.within else "[yellow]too much: not recommended[/yellow]"
            rounding = escape(format_changes(loss.values))
            out.print(f"quality of {rounding}: {_loss_text(loss.rise, loss.divergence)}: {bound}")
        for name, found in report.bench.items():
            rates = f"prompt {found.prefill:.0f} tok/s, output {found.decode:.1f} tok/s"
            out.print(f"llama-bench, {escape(name)}: {rates}")
        for left in report.left_out:
            out.print(f"[dim]not tried: {escape(left)}[/dim]")
        noise = "" if report.noise is None else f" The noise of a trial is {report.noise:.1%}."
        out.print(
            f"[dim]{report.trials} trials in {format_duration(report.spent_s)}; a full grid has {report.grid}.{noise} "
            f"The goal: {goals.ABOUT[report.goal]}.[/dim]",
            soft_wrap=True,
        )
        for name, ratio in report.ratios.items():
            out.print(f"the best against {name}: {ratio.middle:.2f}× [{ratio.low:.2f}, {ratio.high:.2f}]")
        colour = "green" if report.better else "yellow"
        out.print(f"[{colour}]{escape(report.verdict)}[/{colour}]", soft_wrap=True)
        if report.toml:
            if not report.better:
                out.print("[dim]the best so far, not confirmed:[/dim]")
            out.print(report.toml, markup=False, highlight=False, soft_wrap=True)


def format_changes(changes: dict[str, Value]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in changes.items()) or "current settings"


def format_duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def _outcome_text(outcome: Outcome) -> str:
    if isinstance(outcome, Measurement):
        ttft, memory = outcome.ttft_s * 1000, format_size(outcome.memory)
        return f"{outcome.speed:.1f} tok/s, first token {ttft:.0f} ms, {memory}"
    if isinstance(outcome, QualityResult):
        return _loss_text(outcome.loss.rise, outcome.loss.divergence)
    return str(outcome)


def _loss_text(rise: float, divergence: float | None) -> str:
    text = f"perplexity {rise:+.2%}"
    return text if divergence is None else f"{text}, divergence {divergence:.4f}"


def _table(report: Report) -> Table:
    """The best settings, those with names, and the Pareto front."""
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("setting", f"{report.goal}: against current", "tok/s", "first token", "memory", "trials", "front"):
        table.add_column(column)
    current = current_row(report.rows)
    for index, row in enumerate(report.rows):
        if index < _ROWS or row.name or row.front:
            name = f"[bold]{escape(row.name)}[/bold] " if row.name else ""
            table.add_row(
                name + escape(format_changes(row.changes) if row.changes or not row.name else ""),
                against_current(row, current, report.goal),
                f"{row.speed:.1f}",
                f"{row.ttft_s * 1000:.0f} ms",
                f"{row.memory / 2**20:.0f} MiB",
                str(row.trials),
                "•" if row.front else "",
            )
    return table


def current_row(rows: Sequence[ReportRow]) -> ReportRow | None:
    return next((row for row in rows if row.name == "current" or not row.changes), None)


def against_current(row: ReportRow, current: ReportRow | None, goal: Goal) -> str:
    if row.slow:
        return "too slow"
    if current is None:
        return ""
    return f"{current.memory / row.memory if goal == 'memory' else row.score / current.score:.2f}×"


# --- the drawing: settings by memory and score, the Pareto front, and ratios ------------------------------------------

_WIDTH, _LEFT, _TOP, _CHART_WIDTH, _CHART_HEIGHT = 900, 80, 84, 560, 320
_PLAIN, _FRONT, _BEST, _CURRENT, _FAINT = "#9a9a9a", "#1f6fb4", "#2a8a3e", "#b0302f", "#dddddd"
_MIB = 2**20
_TICKS = 5
_LABEL_OFFSETS = {"best": -8, "current": 16}  # their circles are often close to each other


class Scale(Struct, frozen=True):
    """Maps values to positions on an axis; wide enough that noise does not fill it."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def of(cls, values: Sequence[float], begin: float, end: float) -> Scale:
        low, high = min(values), max(values)
        padding = max(0.08 * (high - low), 0.02 * high)
        return cls(max(0.0, low - padding), high + padding, begin, end)

    def at(self, value: float) -> float:
        return self.begin + (self.end - self.begin) * (value - self.low) / (self.high - self.low)

    @property
    def ticks(self) -> list[float]:
        """Round numbers: steps of 1, 2 or 5 times a power of ten."""
        rough = (self.high - self.low) / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [round(number * step, 9) for number in range(first, last + 1)]


def plot(report: Report) -> Drawing:
    noise = "" if report.noise is None else f", noise {report.noise:.1%}"
    shapes: list[DrawingShape] = [
        Label((16, 28), f"{report.model} for {report.goal}: {report.verdict}", size=15),
        Label((16, 48), f"{report.trials} trials of {report.grid} in a full grid{noise}", size=11),
    ]
    if report.rows:
        shapes += _chart(report.rows, report.goal)
    shapes += _draw_ratios(report)
    return Drawing(_WIDTH, _TOP + _CHART_HEIGHT + 60, tuple(shapes))


def _chart(rows: Sequence[ReportRow], goal: Goal) -> Iterator[DrawingShape]:
    current = current_row(rows)
    unit = chart_value(current or rows[0], goal)
    x_scale = Scale.of([row.memory / _MIB for row in rows], _LEFT, _LEFT + _CHART_WIDTH)
    y_scale = Scale.of([1.0, *(chart_value(row, goal) / unit for row in rows)], _TOP + _CHART_HEIGHT, _TOP)
    title = f"{COUNTS[goal]}, {'current' if current is not None else 'the best'} = 1"
    yield Label((16, _TOP - 14), title, size=11)
    yield from _axes(x_scale, y_scale)
    points = [(x_scale.at(row.memory / _MIB), y_scale.at(chart_value(row, goal) / unit)) for row in rows]
    if len(front := pareto_front(points)) > 1:
        yield Polyline(tuple(front), _FRONT)
    for row, at in sorted(zip(rows, points, strict=True), key=lambda pair: bool(pair[0].name)):
        colour = {"best": _BEST, "current": _CURRENT}.get(row.name, _FRONT if row.front else _PLAIN)
        yield Circle(at, colour, 5 if row.name else 3)
        if row.name:
            is_right = at[0] > _LEFT + 0.75 * _CHART_WIDTH
            position = (at[0] - 8 if is_right else at[0] + 8, at[1] + _LABEL_OFFSETS.get(row.name, 28))
            yield Label(position, row.name, "end" if is_right else "start", 11, colour)
    x, y = _LEFT + _CHART_WIDTH + 40, _TOP + _CHART_HEIGHT - 20
    yield Circle((x + 3, y - 4), _FRONT, 3)
    yield Label((x + 12, y), "not beaten in speed, first", size=11)
    yield Label((x + 12, y + 14), "token and memory at once", size=11)


def chart_value(row: ReportRow, goal: Goal) -> float:
    """The score; for memory, which has the other axis, the speed."""
    return row.speed if goal == "memory" else row.score


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in both coordinates, from left to right. A smaller y is higher in a drawing."""
    front: list[Point] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def _axes(x_scale: Scale, y_scale: Scale) -> Iterator[DrawingShape]:
    bottom, right = _TOP + _CHART_HEIGHT, _LEFT + _CHART_WIDTH
    for tick in y_scale.ticks:
        yield Polyline(((_LEFT, y_scale.at(tick)), (right, y_scale.at(tick))), _FAINT)
        yield Label((_LEFT - 8, y_scale.at(tick) + 4), f"{tick:g}×", "end", 10)
    for tick in x_scale.ticks:
        yield Polyline(((x_scale.at(tick), bottom), (x_scale.at(tick), bottom + 4)), "#222222")
        yield Label((x_scale.at(tick), bottom + 18), f"{tick:g}", "middle", 10)
    yield Polyline(((_LEFT, _TOP), (_LEFT, bottom), (right, bottom)), "#222222")
    yield Label((right, bottom + 36), "memory, MiB", "end", 11)


def _draw_ratios(report: Report) -> Iterator[DrawingShape]:
    x = _LEFT + _CHART_WIDTH + 40
    if report.ratios:
        yield Label((x, _TOP + 10), "the best against", size=12)
    for index, (name, ratio) in enumerate(report.ratios.items()):
        y = _TOP + 34 + 40 * index
        yield Label((x, y), name, size=12)
        yield Label((x, y + 16), f"{ratio.middle:.2f}× [{ratio.low:.2f}, {ratio.high:.2f}]", size=12, colour=_BEST)
