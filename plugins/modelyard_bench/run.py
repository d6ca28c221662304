"""Runs a plan: opens every target, warms it up, and measures round by round into the results."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from modelyard_bench.load import LoadGenerator, RoundLength, Sample
from modelyard_bench.results import BenchmarkResults, Plan, Step, TargetInfo
from modelyard_bench.targets import TargetSpec


class ProgressBar:
    """The progress of a run: a bar with the remaining time on a terminal, and nothing elsewhere."""

    def __init__(self, plan: Plan, targets: Sequence[TargetInfo], console: Console) -> None:
        self._plan, self._targets = plan, tuple(targets)
        description = TextColumn("{task.description}", markup=False)
        columns = (description, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=sum(plan.size(step) for step in plan.steps(len(targets))))
        self._done = 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def status(self, line: str) -> None:
        self._bar.update(self._task, description=line)

    def step_started(self, step: Step) -> None:
        label = self._targets[step.target].label
        what = "warm-up" if step.is_warmup else f"round {step.number + 1} of {self._plan.rounds}"
        self.status(f"{what}: {label} with {step.streams} streams")

    def sampled(self, sample: Sample) -> None:
        del sample
        if self._plan.seconds is None:
            self._bar.update(self._task, advance=1)

    def step_ended(self, step: Step) -> None:
        self._done += self._plan.size(step)  # a failed conversation has fewer responses than planned
        self._bar.update(self._task, completed=self._done)


async def run(specs: Sequence[TargetSpec], results: BenchmarkResults, observer: ProgressBar) -> None:
    """The results hold what was measured also if this is cancelled."""
    plan = results.plan
    async with AsyncExitStack() as stack:
        targets = [
            await stack.enter_async_context(
                spec.open(lambda line, name=spec.name: observer.status(f"{name}: {line}"))  # type: ignore[misc]
            )
            for spec in specs
        ]
        results.set_models([getattr(target, "model", "") for target in targets])
        for step in plan.steps(len(targets)):
            observer.step_started(step)
            length = RoundLength(conversations=plan.warmup) if step.is_warmup else plan.round_length(step.streams)
            generator = LoadGenerator(
                targets[step.target],
                plan.workload,
                length,
                streams=step.streams,
                seed=plan.seed,
                key=step.key,
                on_sample=observer.sampled,
            )
            try:
                results.add(step, await generator.run())
            except BaseException:
                results.add(step, generator.result(), complete=False)
                raise
            observer.step_ended(step)
