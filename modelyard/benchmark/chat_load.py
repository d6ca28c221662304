"""Load on a ChatEngine itself: a conversation in messages, answered in events, without a server around it."""

from __future__ import annotations

import asyncio
import time

from modelyard.benchmark.hearing import Hearing, words
from modelyard.benchmark.sample import Sample
from modelyard.benchmark.sizes import WordSizes
from modelyard.benchmark.workload import Ask
from modelyard.core.engine import ChatEngine, Generation
from modelyard.core.errors import ModelyardError
from modelyard.core.events import Event
from modelyard.core.request import Message, Request, Sampling, Text

_LET_GO_S = 30.0


class ChatLoad:
    def __init__(self, engine: ChatEngine, model: str, *, name: str = "", limit_s: float = 600.0) -> None:
        self.name = name or engine.info.backend
        self.engine, self.model, self.limit_s = engine, model, limit_s
        self.sizes = WordSizes()

    def begin(self) -> _Talk:
        return _Talk(self)


class _Talk:
    def __init__(self, load: ChatLoad) -> None:
        self._load = load
        self._messages: list[Message] = []

    async def ask(self, ask: Ask) -> Sample:
        load, sizes = self._load, self._load.sizes
        text = sizes.more(ask) if self._messages else sizes.first(ask)
        self._messages.append(Message("user", (Text(text),)))
        request = Request(
            model=load.model,
            messages=tuple(self._messages),
            sampling=Sampling(temperature=0.0),
            max_tokens=ask.output_tokens,
            stream=True,
            include_usage=True,
        )
        hearing = Hearing(time.perf_counter())
        try:
            sample = await _read(hearing, load.engine.chat(request), load.limit_s)
        except ModelyardError as error:  # refused before it was a job
            return Sample(error=words(error))
        if len(self._messages) == 1:
            sizes.learn(text, sample.prompt_tokens)
        self._messages.append(Message("assistant", (Text(hearing.text),)))
        return sample


async def _read(hearing: Hearing, generation: Generation[Event], limit_s: float) -> Sample:
    error: str | None = None
    try:
        async with asyncio.timeout(limit_s):
            await _drain(hearing, generation)
    except TimeoutError:
        error = f"not finished within {limit_s:g} s"
    finally:
        generation.cancel()
    sample = hearing.sample(time.perf_counter(), error)
    if error is not None:
        await _let_go(generation)
    return sample


async def _drain(hearing: Hearing, generation: Generation[Event]) -> None:
    async for events in generation:
        hearing.hear(events, time.perf_counter())


async def _let_go(generation: Generation[Event]) -> None:
    """Its last word says that the place is free; one that never comes is no reason to wait for ever."""
    try:
        async with asyncio.timeout(_LET_GO_S):
            async for _ in generation:
                pass
    except TimeoutError:
        return
