"""Shared by the benchmark's tests: the fake engine without a server, a scripted target, and made-up results."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from modelyard import plugins
from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.tokenizer import FileTokenizer, open_tokenizer
from modelyard_bench.load import LoadGenerator, LoadTarget, Round, RoundLength, Sample
from modelyard_bench.results import BenchmarkResults, Plan, TargetInfo
from modelyard_bench.workload import UserTurn, Workload, get_workload

FAKE: Any = plugins.load("engines", "fake")


@asynccontextmanager
async def fake_engine(steps: Sequence[dict[str, Any]], *, window: int = 4096, **options: Any) -> AsyncIterator[Any]:
    """The fake engine, open, with one script for all requests and four slots."""
    chosen = FAKE.Options.model_validate({"script": [{"steps": list(steps)}], "token_delay": 0, **options})
    made = FAKE.create(EngineSpec("demo", chosen, {"main": CacheInfo(window, 4)}))
    await made.open(lambda done, what: None)
    try:
        yield made
    finally:
        await made.close()


def fake_tokenizer() -> FileTokenizer:
    return open_tokenizer(FAKE.tokenizer_path(FAKE.Options()))


async def run_round(target: LoadTarget, workload: Workload, conversations: int = 1, **options: Any) -> Round:
    return await LoadGenerator(target, workload, RoundLength(conversations=conversations), **options).run()


class ScriptedTarget:
    """Records its turns and responds with `samples`, over and over."""

    name = "scripted"

    def __init__(self, *samples: Sample) -> None:
        self.samples = samples or (Sample(prompt_tokens=4, output_tokens=2, ttft_s=0.1, gaps_s=(0.1,), total_s=0.2),)
        self.conversations: list[list[UserTurn]] = []
        self._count = 0

    def start(self) -> _ScriptedConversation:
        self.conversations.append([])
        return _ScriptedConversation(self, self.conversations[-1])

    def next(self) -> Sample:
        self._count += 1
        return self.samples[(self._count - 1) % len(self.samples)]


class _ScriptedConversation:
    def __init__(self, target: ScriptedTarget, turns: list[UserTurn]) -> None:
        self._target, self._turns = target, turns

    async def send(self, turn: UserTurn) -> Sample:
        self._turns.append(turn)
        return self._target.next()


def sample(scale: float = 1.0, **changed: object) -> Sample:
    gaps = (0.01 * scale,) * 9
    base = {"prompt_tokens": 64, "output_tokens": 10, "ttft_s": 0.1 * scale, "gaps_s": gaps, "total_s": 0.2 * scale}
    return Sample(**{**base, **changed})  # type: ignore[arg-type]


def filled_results(
    *scales: float, streams: tuple[int, ...] = (1, 4), rounds: int = 4, **changed: object
) -> BenchmarkResults:
    """One target per scale: 2.0 is twice as slow. Rounds differ by a few per cent."""
    plan = Plan(workload=get_workload("chat"), streams=streams, rounds=rounds, seed=7)
    results = BenchmarkResults(plan, [TargetInfo("ABCD"[n], f"http://h:{n}", "m") for n in range(len(scales))])
    for step in plan.steps(len(scales)):
        scale = scales[step.target] * (1 + 0.01 * ((step.number * 7 + step.target * 3) % 5))
        samples = tuple(sample(scale, **changed) for _ in range(step.streams))
        results.add(step, Round(streams=step.streams, wall_s=0.2 * scale, samples=samples))
    return results
