"""One job in the engine's hands: how much it may say, what it has said, and its way out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from modelyard.core.engine import CacheInfo, Chunk, End, Prompt
from modelyard.core.errors import ModelyardError
from modelyard.core.events import Timings, Usage
from modelyard.engines.ct2.call import Call, arguments
from modelyard.engines.ct2.options import Options
from modelyard.engines.generation_queue import GenerationQueue


class Job:
    """Made on the reader's loop. While its batch runs it belongs to the batch's thread, except for `cancelled`, which
    anybody may set."""

    def __init__(self, prompt: Prompt, loop: Any, on_cancel: Callable[[], None]) -> None:
        self.prompt, self._on_cancel = prompt, on_cancel
        self.queue: GenerationQueue[Chunk] = GenerationQueue(on_cancel=self.cancel, loop=loop)
        self.ids, self.prompt_tokens = prompt.ids, prompt.n_tokens
        self.stops = frozenset(prompt.stop_ids)
        self.cancelled: bool = False
        self.ended: bool = False
        self.call: Call = {}
        self.most = self.said = 0
        self.began = time.perf_counter()
        self.first_at: float | None = None

    def __repr__(self) -> str:
        return f"<Job {self.prompt_tokens} tokens, {self.said}/{self.most} said>"

    def cancel(self) -> None:
        self.cancelled = True
        self._on_cancel()

    def is_late(self, now: float) -> bool:
        """`now` is unix time, as deadlines are."""
        return self.prompt.deadline is not None and now >= self.prompt.deadline

    def fit(self, cache: CacheInfo, options: Options) -> None:
        """How much it may say in this cache: CTranslate2 itself goes over any window."""
        room = cache.window - self.prompt_tokens
        self.most = min(self.prompt.max_tokens, room)
        self.full: str = "window" if room < self.prompt.max_tokens else "length"
        self.call = arguments(self.prompt, self.most, options)

    def speaks(self, tokens: int = 1) -> None:
        if self.first_at is None:
            self.first_at = time.perf_counter()
        self.said += tokens

    def end(self, reason: Any, error: ModelyardError | None = None) -> End:
        self.ended = True
        return End(reason, Usage(self.prompt_tokens, 0, self.said), self._timings(), error)

    def _timings(self) -> Timings:
        now, first = time.perf_counter(), self.first_at
        told = first - self.began if first is not None else None
        decode = now - first if first is not None else None
        return Timings(prefill=told, first_token=told, decode=decode, total=now - self.began)
