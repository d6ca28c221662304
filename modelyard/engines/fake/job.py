"""One job of the fake TextEngine: from the prompt to its End, counting every token as a real engine would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Literal

from modelyard.core.engine import Accepted, Chunk, End, Generation, Progress, Prompt, Tokens
from modelyard.core.errors import ContextOverflow, ModelyardError, Timeout
from modelyard.core.events import Timings, Usage
from modelyard.engines.fake.base import crash
from modelyard.engines.fake.memory import Sequences
from modelyard.engines.fake.numbers import logprob
from modelyard.engines.fake.plan import Ending, Hang, Prefill, Say, Wait, walk
from modelyard.engines.fake.player import Beat, Paced, Pause, Player, Put, Standstill

if TYPE_CHECKING:
    from modelyard.engines.fake.text import FakeTextEngine

Reason = Literal["stop", "length", "window", "cancelled", "error"]


class TextJob:
    def __init__(self, engine: FakeTextEngine, prompt: Prompt) -> None:
        self._engine, self._prompt = engine, prompt
        self._player: Player[Chunk] = Player(self._beats(), engine.options.delay, self._cancel)
        self._out: list[int] = []
        self._cached = 0
        self._slot: tuple[Sequences, str] | None = None
        self._began = time.perf_counter()
        self._read_at: float | None = None
        self._first_at: float | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def start(self) -> Generation[Chunk]:
        if self._engine.dead is not None:
            self._player.stop([End("error", error=self._engine.dead)])
            return self._player.box
        self._engine.jobs.add(self)
        if self._prompt.deadline is not None:
            late = Timeout("the job's deadline passed")
            wait = self._prompt.deadline - time.time()
            self._deadline = self._engine.loop.call_later(max(0.0, wait), self.fail, late)
        self._player.play()
        return self._player.box

    # --- how it ends ------------------------------------------------------------------------------------------------

    def _cancel(self) -> None:
        self._engine.soon(partial(self._end, "cancelled"))

    def fail(self, error: ModelyardError) -> None:
        self._end("error", error)

    def _end(self, reason: Reason, error: ModelyardError | None = None) -> None:
        if self._player.box.closed:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._engine.jobs.discard(self)
        self._keep()
        self._player.stop([End(reason, self._usage(), self._timings(), error)])

    def _keep(self) -> None:
        if self._slot is not None:
            sequences, key = self._slot
            sequences.keep(key, self._prompt.ids + self._out[: self._player.spoken])

    def _usage(self) -> Usage:
        return Usage(self._prompt.n_tokens, self._cached, self._player.spoken)

    def _timings(self) -> Timings:
        now, began = time.perf_counter(), self._began
        first = self._first_at
        return Timings(
            prefill=self._read_at - began if self._read_at is not None else None,
            first_token=first - began if first is not None else None,
            decode=now - first if first is not None else None,
            backend=now - began,
            total=now - began,
        )

    # --- what it does -----------------------------------------------------------------------------------------------

    def _beats(self) -> Iterator[Beat]:
        """Whatever breaks in here ends this job, not the loop."""
        try:
            yield from self._play()
        except Exception as error:  # mapped and logged by crash()
            self.fail(crash(error))

    def _play(self) -> Iterator[Beat]:
        prompt = self._prompt
        info, sequences = self._engine.cache(prompt.cache)
        total = prompt.n_tokens
        if total >= info.window:
            raise ContextOverflow(total, info.window)
        deeds = walk(self._engine.plan(prompt))
        first = next(deeds, None)
        if not isinstance(first, Ending):
            yield self._accept(sequences)
            rate = self._engine.options.prefill_rate
            if rate is not None and not isinstance(first, Prefill):
                yield from self._prefill(Prefill((total - self._cached) / rate, 8))
            self._read_at = time.perf_counter()
        room = info.window - total
        limit, cut = (room, "window") if room < prompt.max_tokens else (prompt.max_tokens, "length")
        while first is not None and not self._player.box.closed:
            ...
