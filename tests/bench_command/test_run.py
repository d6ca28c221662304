"""A run over scripted targets, and its progress bar."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from rich.console import Console

from modelyard_bench.load import LoadTarget, Sample
from modelyard_bench.results import BenchmarkResults, Plan, Step, TargetInfo
from modelyard_bench.run import ProgressBar, run
from modelyard_bench.targets import Status, TargetSpec
from modelyard_bench.workload import UserTurn, get_workload
from tests.bench_command.fakes import ScriptedTarget

PLAN = Plan(workload=get_workload("chat", prompt_tokens=5), streams=(1, 2), rounds=2)


class Recorder:
    """An observer that records its calls."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps: list[Step] = []
        self.samples = 0

    def status(self, line: str) -> None:
        self.lines.append(line)

    def step_started(self, step: Step) -> None:
        self.steps.append(step)

    def sampled(self, sample: Sample) -> None:
        self.samples += 1

    def step_ended(self, step: Step) -> None:
        assert self.steps[-1] == step


def spec(name: str, target: LoadTarget, opened: list[str]) -> TargetSpec:
    @asynccontextmanager
    async def open_target(status: Status) -> AsyncIterator[LoadTarget]:
        status("loading")
        opened.append(name)
        try:
            yield target
        finally:
            opened.remove(name)

    return TargetSpec(name=name, model="m", open=open_target)


async def test_every_target_gets_every_round_and_is_closed() -> None:
    opened: list[str] = []
    observer, results = Recorder(), BenchmarkResults(PLAN, [TargetInfo("A", "a"), TargetInfo("B", "b")])
    await run([spec(name, ScriptedTarget(), opened) for name in "ab"], results, observer)
    assert [(target.label, s.rounds, s.answers) for target, s, _ in results.summaries()] == [
        ("A", 2, 4), ("B", 2, 4), ("A", 2, 8), ("B", 2, 8)
    ]  # fmt: skip
    assert observer.lines == ["a: loading", "b: loading"]
    assert len(observer.steps) == 2 + 2 * 2 * 2
    assert observer.samples == 2 * 2 + 24
    assert opened == []


class StuckTarget:
    """The second response never comes."""

    name = "stuck"

    def __init__(self) -> None:
        self.is_stuck, self._count = asyncio.Event(), 0

    def start(self) -> StuckTarget:
        return self

    async def send(self, turn: UserTurn) -> Sample:
        self._count += 1
        if self._count == 1:
            return Sample(output_tokens=1)
        self.is_stuck.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_cancelled_run_leaves_the_results_until_then() -> None:
    plan = Plan(workload=PLAN.workload, streams=(1,), warmup=0)
    opened: list[str] = []
    target, results = StuckTarget(), BenchmarkResults(plan, [TargetInfo("A", "a")])
    task = asyncio.create_task(run([spec("a", target, opened)], results, Recorder()))
    await target.is_stuck.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert results.answers == 1
    assert opened == []


def test_the_bar_is_full_at_the_end_even_if_requests_failed() -> None:
    plan = Plan(workload=get_workload("agent", turns=3), streams=(1, 2), rounds=2)
    file = io.StringIO()
    with ProgressBar(plan, [TargetInfo("A", "a")], Console(file=file, force_terminal=True, width=100)) as bar:
        for step in plan.steps(1):
            bar.step_started(step)
            bar.sampled(Sample(error="gone"))
            bar.step_ended(step)
        (task,) = bar._bar.tasks
        assert task.completed == task.total == 6 + 2 * (3 + 6)
        assert task.description == "round 2 of 2: A with 2 streams"
    assert "round 2 of 2" in file.getvalue()


def test_nothing_is_drawn_without_a_terminal() -> None:
    file = io.StringIO()
    with ProgressBar(PLAN, [TargetInfo("A", "a")], Console(file=file)) as bar:
        bar.status("loading")
    assert file.getvalue() == ""
