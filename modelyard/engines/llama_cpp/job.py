"""One job in the engine's hands: its tokens, how far they are read, and its way out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from modelyard.core.engine import Chunk, Prompt
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.engines.llama_cpp.masks import Mask, Triggered
from modelyard.engines.llama_cpp.sample import Chain


class Job:
    """`ids` holds prompt and output in one growing array; `done` of them are in the KV cache.

    Made on the reader's loop; from `admit` on it belongs to the engine's thread, except for `cancelled`, which anybody
    may set and the thread reads at each step.
    """

    def __init__(self, prompt: Prompt, loop: Any, arrived: int) -> None:
        self.prompt, self.arrived = prompt, arrived
        self.queue: GenerationQueue[Chunk] = GenerationQueue(on_cancel=self.cancel, loop=loop)
        self.cancelled = False
        self.prompt_tokens = prompt.n_tokens
        self._room = np.empty(self.prompt_tokens + min(prompt.max_tokens, 1024), np.int32)
        ids = prompt.ids  # fewer than there are prompt tokens where media are: such a job is refused
        self._room[: len(ids)] = ids
        self.length = len(ids)
        self.done = self.cached = 0
        self.pauses: list[int] = []  # where its state is to be kept while it is read, in order; set by the thread
        # Tokens at which it ends, if not before; `begin` may lower it.
        self.limit = self.prompt_tokens + prompt.max_tokens
        self.stops = frozenset(prompt.stop_ids)
        self.chain: Chain  # set by the engine's thread
        self.mask: Mask | Triggered | None = None  # set before the thread sees the job
        self.scripted: Iterator[int] | None = None  # what it is to say instead of what is drawn; set by the thread
        self.began = time.perf_counter()
        self.first_at: float | None = None

    def cancel(self) -> None:
        self.cancelled = True

    @property
    def is_plain(self) -> bool:
        """It says what its samplers draw from the row's logits as they are, and nobody asks how likely that was."""
        return self.mask is None and self.scripted is None and self.prompt.logprobs is None

    @property
    def takes_the_best(self) -> bool:
        return self.is_plain and self.chain.takes_the_best

    def is_late(self, now: float) -> bool:
        """`now` is unix time, as deadlines are."""
        return self.prompt.deadline is not None and now >= self.prompt.deadline

    @property
    def ids(self) -> Any:
        return self._room[: self.length]

    @property
    def held(self) -> Any:
        """What of it is in the KV cache."""
        return self._room[: self.done]

    @property
    def newest(self) -> int:
        return int(self._room[self.length - 1])

    @property
    def pending(self) -> int:
        return self.length - self.done

    @property
    def until_pause(self) -> int:
        return (self.pauses[0] if self.pauses else self.length) - self.done

    @property
    def generating(self) -> bool:
        return self.first_at is not None

    @property
    def output(self) -> int:
        return self.length - self.prompt_tokens

    def begin(self, keep: int, window: int) -> None:
        self.done = self.cached = keep
        self.limit = min(self.limit, window)

    def prefilled(self) -> None:
        if self.first_at is None:
            self.first_at = time.perf_counter()

    def append(self, token: int) -> None:
        if self.length == len(self._room):
            self._room = np.concatenate([self._room, np.empty(max(1024, self.length // 2), np.int32)])
        self._room[self.length] = token
        self.length += 1

    def say(self, token: int) -> None:
        """The token after all that was read in this step."""
        self.append(token)
        self.done += 1

    def close(self) -> None:
        self.chain.close()
