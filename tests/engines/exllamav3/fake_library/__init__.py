"""A fake ExLlamaV3 and torch for CPUs: the calls that the engine makes, with the semantics of release 1.6.5.

It mirrors the queue, pages of 256 tokens and their reuse, prompt chunks, tokens that are held back, and the keys of
results. The model copies what followed the same tokens before. The same tests run against the real library on a GPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from modelyard_exllamav3.engine import ExllamaLibrary
from tests.engines.exllamav3.fake_library import samplers, tensors
from tests.engines.exllamav3.fake_library.generator import Generator, Job
from tests.engines.exllamav3.fake_library.model import Cache, Config, Model, Tokenizer


class FakeLibrary:
    """`calls` records constructor arguments by class. `before_step` may wait or raise. `job_error` fails the next job
    that is read."""

    def __init__(self) -> None:
        self.calls: dict[str, list[dict[str, Any]]] = {}
        self.before_step: Callable[[], None] = lambda: None
        self.before_load: Callable[[], None] = lambda: None
        self.job_error: Exception | None = None
        self.steps = 0

    def load(self) -> ExllamaLibrary:
        classes = {name: self._recorded(name, kind) for name, kind in (("Cache", Cache), ("Generator", Generator))}
        jobs = {"Job": self._recorded("Job", Job), "CustomSampler": samplers.CustomSampler}
        layers = {"CacheLayer_fp16": "fp16", "CacheLayer_quant": "quant"}
        config = SimpleNamespace(from_directory=lambda where: Config(where, self))
        plain = {"Config": config, "Model": Model, "Tokenizer": Tokenizer}
        breakers = {"dry_sequence_breaker_tokens": lambda tokenizer, words: frozenset(map(len, words))}
        return ExllamaLibrary(
            SimpleNamespace(**classes, **jobs, **layers, **plain, **breakers, **samplers.STEPS), tensors
        )

    def _recorded(self, name: str, kind: Any) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            self.calls.setdefault(name, []).append(kwargs)
            return kind(*args, **kwargs)

        return make


def in_step_with(loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """Lets the event loop run before each step, so that readers keep up on a busy machine."""

    async def rounds() -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    return lambda: asyncio.run_coroutine_threadsafe(rounds(), loop).result(60)
