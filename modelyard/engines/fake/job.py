"""One job of the fake TextEngine: from the prompt to its End, counting every token as a real engine would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterator
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Literal

from modelyard.core.engine import Chunk, End, Generation, Progress, Prompt, Tokens
from modelyard.core.errors import ContextOverflow, ModelyardError, Timeout
from modelyard.core.events import Timings, Usage
from modelyard.engines.fake.base import crash
from modelyard.engines.fake.memory import Key, Sequences
from modelyard.engines.fake.numbers import logprob
from modelyard.engines.fake.plan import Deed, Ending, Hang, Prefill, Say, Wait, walk
from modelyard.engines.fake.player import Beat, Paced, Pause, Player, Put, Standstill
from modelyard.engines.fake.script import ScriptStep

if TYPE_CHECKING:
    from modelyard.engines.fake.text import FakeTextEngine

Reason = Literal["stop", "length", "window", "cancelled", "error"]

_REPORTS = 8  # progress reports where `prefill_rate` alone says how long reading takes


class TextJob:
    def __init__(self, engine: FakeTextEngine, prompt: Prompt) -> None:
        self._engine, self._prompt = engine, prompt
        self._player: Player[Chunk] = Player(self._beats(), engine.options.delay, self._cancel)
        self._out: list[int] = []
        self._limit = 0
        self._cut: Reason = "length"
        self._cached = 0
        self._slot: tuple[Sequences, Key] | None = None
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
            sequences.keep(key, self._prompt.ids, self._out[: self._player.spoken])

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
        info, sequences = self._engine.cache(self._prompt.cache)
        self._fit(info.window)
        deeds = walk(self._engine.plan(self._prompt))
        first = next(deeds, None)
        if not isinstance(first, Ending):
            yield from self._begin(sequences, first)
        for deed in chain(() if first is None else (first,), deeds):
            reason = yield from self._do(deed)
            if reason is not None:
                return self._end(reason)
            if self._player.box.closed:
                return None
        return self._end("stop")

    def _fit(self, window: int) -> None:
        total, asked = self._prompt.n_tokens, self._prompt.max_tokens
        room = window - total
        if room < 1:
            raise ContextOverflow(total, window)
        self._limit, self._cut = (room, "window") if room < asked else (asked, "length")

    def _begin(self, sequences: Sequences, first: Deed | None) -> Iterator[Beat]:
        key, accepted = sequences.take(self._prompt.ids, self._prompt.session)
        self._slot, self._cached = (sequences, key), accepted.cached_tokens
        total, rate = self._prompt.n_tokens, self._engine.options.prefill_rate
        self._engine.reused += self._cached
        self._engine.evaluated += total - self._cached
        yield Put([accepted])
        if rate is not None and not isinstance(first, Prefill):
            yield from self._prefill(Prefill((total - self._cached) / rate, _REPORTS))
        self._read_at = time.perf_counter()

    def _do(self, deed: Deed) -> Generator[Beat, None, Reason | None]:
        """One deed; the reason if the job is over with it."""
        if isinstance(deed, Say):
            return (yield from self._say(deed.ids))
        if isinstance(deed, Wait):
            yield Pause(deed.seconds)
        elif isinstance(deed, Prefill):
            yield from self._prefill(deed)
        elif isinstance(deed, Hang):
            yield Standstill()
        elif isinstance(deed, Ending):
            self._break(deed.step)
        return None

    def _say(self, ids: list[int]) -> Generator[Beat, None, Reason | None]:
        left = self._limit - len(self._out)
        stop = min((ids.index(token) for token in self._prompt.stop_ids if token in ids), default=len(ids))
        said = ids[: min(left, stop)]
        if self._first_at is None:
            self._first_at = time.perf_counter()
        if said:
            self._out += said
            yield Paced(said, Tokens if self._prompt.logprobs is None else self._with_logprobs)
        if stop < left:
            return "stop" if stop < len(ids) else None
        return self._cut

    def _with_logprobs(self, ids: list[int]) -> Tokens:
        size, wanted = self._engine.vocab.size, self._prompt.logprobs or 0
        return Tokens(ids, [logprob(token, wanted, size) for token in ids])

    def _prefill(self, deed: Prefill) -> Iterator[Beat]:
        total = self._prompt.n_tokens
        fresh, parts = total - self._cached, max(1, deed.reports)
        for part in range(1, parts + 1):
            yield Pause(deed.seconds / parts)
            if deed.reports:
                yield Put([Progress(self._cached + fresh * part // parts, total)])
        self._read_at = time.perf_counter()

    def _break(self, step: ScriptStep) -> None:
        error = step.error
        if error is not None and step.die is not None:
            self._engine.die(error)
        elif error is not None:
            self.fail(error)
