"""A run over subjects that answer as they are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from modelyard.benchmark.bench.book import Book, Subject
from modelyard.benchmark.bench.plan import Plan, Step
from modelyard.benchmark.bench.run import run
from modelyard.benchmark.bench.subjects import Candidate, Say
from modelyard.benchmark.lanes import Load
from modelyard.benchmark.sample import Sample
from modelyard.benchmark.workload import Ask, named
from tests.benchmark.fakes import Scripted

PLAN = Plan(workload=named("chat", prompt_tokens=5), streams=(1, 2), rounds=2)


class Notes:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.steps: list[Step] = []
        self.samples = 0

    def say(self, line: str) -> None:
        self.said.append(line)

    def begins(self, step: Step) -> None:
        self.steps.append(step)

    def saw(self, sample: Sample) -> None:
        self.samples += 1

    def ended(self, step: Step) -> None:
        assert self.steps[-1] == step


def candidate(name: str, load: Load, open_now: list[str]) -> Candidate:
    @asynccontextmanager
    async def opened(say: Say) -> AsyncIterator[Load]:
        say("loading")
        open_now.append(name)
        try:
            yield load
        finally:
            open_now.remove(name)

    return Candidate(name=name, model="m", open=opened)


def book() -> Book:
    return Book(PLAN, [Subject("A", "a"), Subject("B", "b")])


async def test_every_subject_gets_every_round_and_all_are_closed_again() -> None:
    held, watcher, found = [], Notes(), book()
    loads = Scripted(), Scripted()
    await run([candidate(name, load, held) for name, load in zip("ab", loads, strict=True)], PLAN, found, watcher)
    assert [(subject.label, s.rounds, s.answers) for subject, s, _ in found.results()] == [
        ("A", 2, 4), ("B", 2, 4), ("A", 2, 8), ("B", 2, 8)
    ]  # fmt: skip
    assert watcher.said == ["a: loading", "b: loading"]
    assert len(watcher.steps) == 2 + 2 * 2 * 2
    assert watcher.samples == 2 * 2 + 24
    assert held == []


class Stuck:
    """The second answer never comes."""

    name = "stuck"

    def __init__(self) -> None:
        self.is_stuck, self._asked = asyncio.Event(), 0

    def begin(self) -> Stuck:
        return self

    async def ask(self, ask: Ask) -> Sample:
        self._asked += 1
        if self._asked == 1:
            return Sample(output_tokens=1)
        self.is_stuck.set()
        await asyncio.Event().wait()
        raise AssertionError


async def test_a_cancelled_run_leaves_in_the_book_what_was_measured() -> None:
    plan = Plan(workload=PLAN.workload, streams=(1,), warmup=0)
    held, load, found = [], Stuck(), Book(plan, [Subject("A", "a")])
    task = asyncio.create_task(run([candidate("a", load, held)], plan, found, Notes()))
    await load.is_stuck.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert found.answers == 1
    assert held == []
