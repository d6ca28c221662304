"""A stand-in for ExLlamaV3 and torch: the calls that the engine makes, with the real ones' semantics, on a CPU.

What decides about jobs is mirrored from release 1.6.5: the queue, pages of 256 tokens and what of them is reused,
chunks of a prompt, tokens that are held back, results and their keys. The «model» is a few lines that copy what
followed the same words before. The same tests run against the real library on a GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from modelyard.engines.exllamav3.model import ExllamaLibrary
from tests.engines.exllamav3.fake_library import samplers, tensors
from tests.engines.exllamav3.fake_library.generator import Generator, Job
from tests.engines.exllamav3.fake_library.model import Cache, Config, Model, Tokenizer


class FakeLibrary:
    """`calls` are the arguments that everything was made with; `before_step` may wait or raise in a step's place;
    `fault` is what the next job that is read fails with, alone; `steps` counts."""

    def __init__(self) -> None:
        self.calls: dict[str, list[dict[str, Any]]] = {}
        self.before_step: Callable[[], None] = lambda: None
        self.before_load: Callable[[], None] = lambda: None
        self.fault: Exception | None = None
        self.steps = 0

    def load(self) -> ExllamaLibrary:
        made = {name: self._noted(name, kind) for name, kind in (("Cache", Cache), ("Generator", Generator))}
        jobs = {"Job": self._noted("Job", Job), "CustomSampler": samplers.CustomSampler}
        layers = {"CacheLayer_fp16": "fp16", "CacheLayer_quant": "quant"}
        config = SimpleNamespace(from_directory=lambda where: Config(where, self))
        plain = {"Config": config, "Model": Model, "Tokenizer": Tokenizer}
        breakers = {"dry_sequence_breaker_tokens": lambda tokenizer, words: frozenset(map(len, words))}
        return ExllamaLibrary(SimpleNamespace(**made, **jobs, **layers, **plain, **breakers, **samplers.STEPS), tensors)

    def _noted(self, name: str, kind: Any) -> Any:
        def make(*positional: Any, **called: Any) -> Any:
            self.calls.setdefault(name, []).append(called)
            return kind(*positional, **called)

        return make


def in_step_with(loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """Lets the loop do all that it has to before each step: its readers keep up, however busy the machine is."""

    async def rounds() -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    return lambda: asyncio.run_coroutine_threadsafe(rounds(), loop).result(60)
