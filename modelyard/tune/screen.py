"""A run on the terminal: what is tried, how it did beside the best so far, and how long it may still take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from modelyard.core.knobs import Goal, Setting, Value
from modelyard.tune import goals
from modelyard.tune.order import Failure, Figures, Judged, Outcome
from modelyard.tune.race import Ask
from modelyard.tune.report import Lost, Report, Row

_ROWS = 12
_WIDE = 140
_PHASES = {"baselines": "what holds now", "stage": "trying", "pairs": "trying", "proof": "proving"}


class Terminal:
    """`out` gets the result, `err` everything on the way."""

    def __init__(self, goal: Goal, current: Setting, budget_s: float, out: Console, err: Console) -> None:
        self._goal, self._current, self._budget, self._out, self._err = goal, current, budget_s, out, err
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[left]} left at most · {task.fields[trials]} trials · best: {task.fields[best]}"),
            console=err,
            transient=True,
        )
        self._task = self._progress.add_task("", total=budget_s, left=span(budget_s), trials=0, best="not known yet")
        self._trials = 0

    @contextmanager
    def shown(self) -> Iterator[None]:
        with self._progress:
            yield

    def asked(self, ask: Ask, left_s: float) -> None:
        what = "quality of" if ask.loss else _PHASES[ask.phase]
        told = f"{what} {words(ask.setting.changes(self._current))}"
        done = max(0.0, self._budget - left_s)
        self._progress.update(self._task, description=told[:60], completed=done, left=span(left_s))

    def told(self, ask: Ask, outcome: Outcome, best: Setting, *, kept: bool) -> None:
        self._trials += not ask.loss
        self._progress.update(self._task, trials=self._trials, best=words(best.changes(self._current)))
        again = " (from the journal)" if kept else ""
        line = f"{ask.why or ask.phase}: {words(ask.setting.changes(self._current))}: {self._words(outcome)}{again}"
        self._err.print(f"[dim]{escape(line)}[/dim]", soft_wrap=True, highlight=False)

    def warned(self, text: str) -> None:
        self._err.print(f"[yellow]warning[/yellow] {escape(text)}", soft_wrap=True, highlight=False)

    def _words(self, outcome: Outcome) -> str:
        if isinstance(outcome, Failure):
            return str(outcome)
        if isinstance(outcome, Judged):
            return _lost(outcome.loss.rise, outcome.loss.divergence)
        return _figures(outcome) if isinstance(outcome, Figures) else str(outcome)

    # --- the end ------------------------------------------------------------------------------------------------------

    def report(self, told: Report) -> None:
        if not self._out.is_terminal:  # a file has no edge to break lines at
            self._out.width = max(self._out.width, _WIDE)
        self._out.print(_table(told))
        for failed in told.failures:
            self._out.print(f"[yellow]failed[/yellow] {escape(words(failed.changes))}: {escape(failed.reason)}")
        for lost in told.losses:
            self._out.print(_quality(lost))
        for name, seen in told.bench.items():
            self._out.print(
                f"llama-bench, {escape(name)}: prompt {seen.prefill:.0f} tok/s, answer {seen.decode:.1f} tok/s"
            )
        for left in told.left_out:
            self._out.print(f"[dim]not tried: {escape(left)}[/dim]")
        self._summary(told)

    def _summary(self, told: Report) -> None:
        self._out.print(
            f"[dim]{told.trials} trials in {span(told.spent_s)}; a full grid has {told.grid}.{_noise(told.noise)} "
            f"The goal: {goals.ABOUT[told.goal]}.[/dim]",
            soft_wrap=True,
        )
        for name, ratio in told.ratios.items():
            self._out.print(f"the best against {name}: {ratio.middle:.2f}× [{ratio.low:.2f}, {ratio.high:.2f}]")
        colour = "green" if told.better else "yellow"
        self._out.print(f"[{colour}]{escape(told.verdict)}[/{colour}]", soft_wrap=True)
        if told.toml:
            if not told.better:
                self._out.print("[dim]what did best so far, unproved:[/dim]")
            self._out.print(told.toml, markup=False, highlight=False, soft_wrap=True)


def _noise(noise: float | None) -> str:
    return "" if noise is None else f" One trial's noise is {noise:.1%}."


def words(changes: dict[str, Value]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in changes.items()) or "current settings"


def span(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole // 60}m {whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def _figures(seen: Figures) -> str:
    return f"{seen.speed:.1f} tok/s, first token {seen.ttft_s * 1000:.0f} ms, {seen.memory / 2**20:.0f} MiB"


def _lost(rise: float, divergence: float | None) -> str:
    told = f"perplexity {rise:+.2%}"
    return told if divergence is None else f"{told}, divergence {divergence:.4f}"


def _quality(lost: Lost) -> str:
    verdict = "[green]within the bound[/green]" if lost.within else "[yellow]too much: never recommended[/yellow]"
    told = ", ".join(f"{name} = {value}" for name, value in lost.values.items())
    return f"quality of {escape(told)}: {_lost(lost.rise, lost.divergence)}: {verdict}"


def _table(told: Report) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("setting", f"{told.goal}: against current", "tok/s", "first token", "memory", "trials", "front"):
        table.add_column(column)
    current = next((row for row in told.rows if row.name == "current" or not row.changes), None)
    for row in _shown(told.rows):
        table.add_row(*_cells(row, against(row, current, told.goal)))
    return table


def against(row: Row, current: Row | None, goal: Goal) -> str:
    if row.slow:
        return "too slow"
    if current is None:
        return ""
    return f"{current.memory / row.memory if goal == 'memory' else row.score / current.score:.2f}×"


def _shown(rows: tuple[Row, ...]) -> list[Row]:
    """The best ones, all that have names, and the front."""
    return [row for place, row in enumerate(rows) if place < _ROWS or row.name or row.front]


def _cells(row: Row, against: str) -> tuple[str, ...]:
    name = f"[bold]{escape(row.name)}[/bold] " if row.name else ""
    return (
        name + escape(words(row.changes) if row.changes or not row.name else ""),
        against,
        f"{row.speed:.1f}",
        f"{row.ttft_s * 1000:.0f} ms",
        f"{row.memory / 2**20:.0f} MiB",
        str(row.trials),
        "•" if row.front else "",
    )
