"""What a cache has saved, and what speculation has brought: counted as vLLM tells it."""

from __future__ import annotations

from typing import Any


class Tally:
    """Prompt tokens of one cache: `reused` had been read before."""

    def __init__(self) -> None:
        self.reused = self.evaluated = 0

    def read(self, tokens: int, cached: int) -> None:
        self.reused += cached
        self.evaluated += tokens - cached


class Speculation:
    """vLLM tells of guesses to those who log its statistics, so this poses as such a logger."""

    def __init__(self) -> None:
        self.guessed = self.accepted = 0

    def logger(self, vllm_config: Any, engine_index: int = 0) -> Speculation:
        del vllm_config, engine_index
        return self

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **more: Any) -> None:
        del iteration_stats, more
        told = getattr(scheduler_stats, "spec_decoding_stats", None)
        if told is not None:
            self.guessed += told.num_draft_tokens
            self.accepted += told.num_accepted_tokens

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        del is_awake, level
