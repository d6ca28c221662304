"""Load on a TextEngine itself: token ids in, token ids out, prompts and answers of exactly the wanted length."""

from __future__ import annotations

import asyncio
import time

from modelyard.benchmark.hearing import words
from modelyard.benchmark.sample import Arrivals, Sample
from modelyard.benchmark.workload import Ask
from modelyard.core.engine import Accepted, Chunk, End, Generation, Prompt, TextEngine, TokenRun, Tokens
from modelyard.core.errors import Incomplete, ModelyardError
from modelyard.core.request import Sampling
from modelyard.core.tokenizer import Tokenizer

_LET_GO_S = 30.0


class EngineLoad:
    """Of an open engine. No template is applied: what a model makes of the text is not the question here."""

    def __init__(
        self, engine: TextEngine, vocab: Tokenizer, *, name: str = "", cache: str = "", limit_s: float = 600.0
    ) -> None:
        self.name = name or engine.info.backend
        self.engine, self.vocab, self.cache, self.limit_s = engine, vocab, cache, limit_s

    def begin(self) -> _Talk:
        return _Talk(self)


class _Talk:
    def __init__(self, load: EngineLoad) -> None:
        self._load = load
        bos = load.vocab.bos
        self._ids: list[int] = [] if bos is None else [bos]

    async def ask(self, ask: Ask) -> Sample:
        room = ask.tokens - (1 if len(self._ids) == 1 else 0)  # the first token of all counts, too
        self._ids += self._load.vocab.encode_plain(ask.words)[: max(1, room)]
        prompt = Prompt(
            parts=(TokenRun(list(self._ids)),),
            sampling=Sampling(temperature=0.0),
            max_tokens=ask.output_tokens,
            cache=self._load.cache,
        )  # no stop ids: the answer has the wanted length
        answer = _Answer(prompt)
        try:
            sample = await answer.read(self._load.engine.generate(prompt), self._load.limit_s)
        except ModelyardError as error:  # refused before it was a job
            return Sample(prompt_tokens=prompt.n_tokens, error=words(error))
        self._ids += answer.ids
        return sample


class _Answer:
    def __init__(self, prompt: Prompt) -> None:
        self._prompt_tokens = prompt.n_tokens
        self._arrivals = Arrivals(time.perf_counter())
        self._cached, self._end = 0, End("error", error=Incomplete("the engine's answer has no end"))
        self.ids: list[int] = []

    async def read(self, generation: Generation[Chunk], limit_s: float) -> Sample:
        error: str | None = None
        try:
            async with asyncio.timeout(limit_s):
                await self._drain(generation)
            error = None if self._end.error is None else words(self._end.error)
        except TimeoutError:
            error = f"not finished within {limit_s:g} s"
        finally:
            generation.cancel()
        at = time.perf_counter()
        if error is not None:
            await self._let_go(generation)
        return self._arrivals.sample(
            at,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached,
            output_tokens=self._arrivals.tokens,
            error=error,
        )

    async def _drain(self, generation: Generation[Chunk]) -> None:
        async for chunks in generation:
            now = time.perf_counter()
            for chunk in chunks:
                self._take(chunk, now)

    def _take(self, chunk: Chunk, now: float) -> None:
        if isinstance(chunk, Tokens):
            self._arrivals.add(now, len(chunk.ids))
            self.ids += chunk.ids
        elif isinstance(chunk, Accepted):
            self._cached = chunk.cached_tokens
        elif isinstance(chunk, End):
            self._end = chunk

    async def _let_go(self, generation: Generation[Chunk]) -> None:
        """Its last word says that the place is free; one that never comes is no reason to wait for ever."""
        try:
            async with asyncio.timeout(_LET_GO_S):
                await self._drain(generation)
        except TimeoutError:
            return
