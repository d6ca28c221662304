"""What the tests of measuring share: the scripted engine by itself, and a load that answers as it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from modelyard import plugins
from modelyard.benchmark.sample import Sample
from modelyard.benchmark.workload import Ask
from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.tokenizer import FileTokenizer, open_tokenizer

FAKE: Any = plugins.load("engines", "fake")


@asynccontextmanager
async def engine(steps: Sequence[dict[str, Any]], *, window: int = 4096, **options: Any) -> AsyncIterator[Any]:
    """The fake engine, open, with one answer for everybody and four places."""
    chosen = FAKE.Options.model_validate({"script": [{"steps": list(steps)}], "token_delay": 0, **options})
    made = FAKE.create(EngineSpec("demo", chosen, {"main": CacheInfo(window, 4)}))
    await made.open(lambda done, what: None)
    try:
        yield made
    finally:
        await made.close()


def vocabulary() -> FileTokenizer:
    return open_tokenizer(FAKE.tokenizer_path(FAKE.Options()))


class Scripted:
    """A load that keeps what it was asked, and answers with `samples` over and over."""

    name = "scripted"

    def __init__(self, *samples: Sample) -> None:
        self.samples = samples or (Sample(prompt_tokens=4, output_tokens=2, ttft_s=0.1, gaps_s=(0.1,), total_s=0.2),)
        self.asked: list[list[Ask]] = []
        self._count = 0

    def begin(self) -> _Said:
        self.asked.append([])
        return _Said(self, self.asked[-1])

    def next(self) -> Sample:
        self._count += 1
        return self.samples[(self._count - 1) % len(self.samples)]


class _Said:
    def __init__(self, load: Scripted, asks: list[Ask]) -> None:
        self._load, self._asks = load, asks

    async def ask(self, ask: Ask) -> Sample:
        self._asks.append(ask)
        return self._load.next()
