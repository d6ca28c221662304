"""One job in the engine's hands: how much it may say, what it has said, and its way out."""

from __future__ import annotations

import time
from typing import Any

from modelyard.core.engine import CacheInfo, Chunk, End, Prompt
from modelyard.core.errors import ModelyardError
from modelyard.core.events import Timings, Usage
from modelyard.engines.exllamav3.filters import Filter
from modelyard.engines.generation_queue import GenerationQueue


class Job:
    """Made on the reader's loop; from `admit` on it belongs to the engine's thread, except for `cancelled`, which
    anybody may set and the thread reads between two steps."""

    def __init__(self, prompt: Prompt, loop: Any) -> None:
        self.prompt = prompt
        self.queue: GenerationQueue[Chunk] = GenerationQueue(on_cancel=self.cancel, loop=loop)
        self.ids, self.prompt_tokens = prompt.ids, prompt.n_tokens
        self.cancelled: bool = False
        self.filter: Filter | None = None  # set before the thread sees the job
        self.raw: Any = None  # ExLlamaV3's own
        self.cached: int | None = None  # unknown until it begins to be read
        self.most = self.said = 0
        self.began = time.perf_counter()
        self.first_at: float | None = None

    def __repr__(self) -> str:
        return f"<Job {self.prompt_tokens} tokens, {self.said}/{self.most} said>"

    def cancel(self) -> None:
        self.cancelled = True

    def is_late(self, now: float) -> bool:
        """`now` is unix time, as deadlines are."""
        return self.prompt.deadline is not None and now >= self.prompt.deadline

    def fit(self, cache: CacheInfo) -> None:
        """How much it may say in this cache: to ExLlamaV3 a window is what the pages hold."""
        room = cache.window - self.prompt_tokens
        self.most = min(self.prompt.max_tokens, room)
        self.full: str = "window" if room < self.prompt.max_tokens else "length"

    def speaks(self, tokens: int) -> None:
        if self.first_at is None:
            self.first_at = time.perf_counter()
        self.said += tokens

    def end(self, reason: Any, error: ModelyardError | None = None, told: dict[str, Any] | None = None) -> End:
        """`told`: ExLlamaV3's last word on the job, with its own times."""
        return End(reason, Usage(self.prompt_tokens, self.cached or 0, self.said), self._timings(told or {}), error)

    def _timings(self, told: dict[str, Any]) -> Timings:
        now, first = time.perf_counter(), self.first_at
        waited = first - self.began if first is not None else None
        decode = now - first if first is not None else None
        return Timings(
            prefill=told.get("time_prefill", waited),
            first_token=waited,
            decode=told.get("time_generate", decode),
            total=now - self.began,
        )
