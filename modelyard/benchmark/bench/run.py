"""The run itself: every subject made ready, warmed up and measured round by round, each written down as it ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from modelyard.benchmark.bench.book import Book
from modelyard.benchmark.bench.plan import Plan, Step, steps
from modelyard.benchmark.bench.subjects import Candidate
from modelyard.benchmark.lanes import Extent, Lanes, Load
from modelyard.benchmark.sample import Sample


class Watcher(Protocol):
    """Whoever shows how far it is."""

    def say(self, line: str) -> None: ...
    def begins(self, step: Step) -> None: ...
    def saw(self, sample: Sample) -> None: ...
    def ended(self, step: Step) -> None: ...


async def run(candidates: Sequence[Candidate], plan: Plan, book: Book, watcher: Watcher) -> None:
    """Into `book`, which holds what there is also where this is cancelled."""
    async with AsyncExitStack() as held:
        loads = [await _opened(held, candidate, watcher) for candidate in candidates]
        book.name_models([getattr(load, "model", "") for load in loads])
        for step in steps(plan, len(loads)):
            watcher.begins(step)
            await _measure(loads[step.subject], step, plan, book, watcher)
            watcher.ended(step)


async def _opened(held: AsyncExitStack, candidate: Candidate, watcher: Watcher) -> Load:
    return await held.enter_async_context(candidate.open(lambda line: watcher.say(f"{candidate.name}: {line}")))


async def _measure(load: Load, step: Step, plan: Plan, book: Book, watcher: Watcher) -> None:
    extent = Extent(conversations=plan.warmup) if step.is_warmup else plan.extent(step.streams)
    lanes = Lanes(
        load,
        plan.workload,
        extent,
        streams=step.streams,
        seed=plan.seed,
        key=step.key,
        seen=watcher.saw,
    )
    try:
        book.note(step, await lanes.run())
    except BaseException:
        book.note(step, lanes.round(), whole=False)
        raise
