"""How far a run is: a bar with the time that is left, on the terminal's error stream; elsewhere nothing."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from modelyard.benchmark.bench.book import Subject
from modelyard.benchmark.bench.plan import Plan, Step, steps
from modelyard.benchmark.sample import Sample


def size(plan: Plan, step: Step) -> float:
    """Of one step, in answers; of a round that is measured by time, in seconds."""
    if step.is_warmup:
        return plan.warmup * step.streams * plan.workload.turns
    answers = plan.answers(step.streams)
    return answers if answers is not None else plan.seconds or 0.0


class Bar:
    """Shows a run as its `Watcher`. `with` it."""

    def __init__(self, plan: Plan, subjects: Sequence[Subject], console: Console) -> None:
        self._plan, self._subjects, self._console = plan, tuple(subjects), console
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        whole = sum(size(plan, step) for step in steps(plan, len(subjects)))
        self._task = self._bar.add_task("", total=whole)
        self._done = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        self._bar.update(self._task, description=line)

    def begins(self, step: Step) -> None:
        subject = self._subjects[step.subject].label
        what = "warm-up" if step.is_warmup else f"round {step.number + 1} of {self._plan.rounds}"
        self.say(f"{what}: {subject} with {step.streams} streams")

    def saw(self, sample: Sample) -> None:
        del sample
        if self._plan.seconds is None:
            self._bar.update(self._task, advance=1)

    def ended(self, step: Step) -> None:
        self._done += size(self._plan, step)  # answers that failed leave others out
        self._bar.update(self._task, completed=self._done)
