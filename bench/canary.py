"""The isolation canary: thousands of interleaved requests of several API keys to several caches of one model.

    python -m bench.canary [--requests N] [--seed N]

Conversations of three keys share two caches, and with them one context: they run at the same time, are cut, evicted,
parked in RAM and brought back, and many begin with the same tokens. The model is tiny, random and unquantized, so that
one foreign token in the KV changes the answer. Two things are checked for each request:

    the answer    is the one that the same prompt gets on an engine that holds nothing else
    its reuse     is no longer than what its own key has sent to its own cache, and had answered there
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from msgspec import Struct

from modelyard.core.engine import CacheInfo, Chunk, Control, EngineSpec, Prompt, TokenRun
from modelyard.core.request import Sampling
from modelyard.engines import llama_cpp
from modelyard.engines.llama_cpp import sequences
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from tests.engines.llama_cpp.exact_models import VOCAB, exact_model
from tests.engines.reading import assert_alike, end, ids, read

CACHES = {"main": CacheInfo(256, 3), "fast": CacheInfo(256, 2)}
KEYS = ("ann", "bob", "eve")
_TALKS = 24  # conversations, of all keys and caches
_OUTPUT = 4  # tokens
_LONGEST = 90  # tokens of a conversation before it begins anew


class CanaryResult(Struct):
    requests: int = 0
    reused: int = 0  # requests that reused KV
    parked: int = 0  # tokens that came back from RAM
    faults: list[str] = []


class Talk:
    """One conversation of one key in one cache."""

    def __init__(self, number: int, random: Random) -> None:
        self.key, self.cache = KEYS[number % len(KEYS)], tuple(CACHES)[number // len(KEYS) % len(CACHES)]
        self.session = f"{self.key}/{number}" if number % 4 else None
        self._random, self.ids, self._begun = random, list[int](), 0
        self.begin()

    def begin(self) -> None:
        """Many begin alike: what one key has sent is what another one would like to know. But not for ever the same."""
        self.ids = _run(3 * self._begun + self._random.randrange(3), 40)
        self._begun += 1

    def continue_with(self, answer: list[int]) -> None:
        self.ids = self.ids + answer + [self._random.randrange(VOCAB) for _ in range(self._random.randint(1, 20))]
        if self._random.random() < 0.1:  # an edit
            self.ids = self.ids[: self._random.randint(10, len(self.ids))]
        if len(self.ids) > _LONGEST:
            self.begin()

    def prompt(self) -> Prompt:
        return Prompt(
            parts=(TokenRun(list(self.ids)),),
            sampling=Sampling(temperature=0),
            max_tokens=_OUTPUT,
            logprobs=2,
            cache=self.cache,
            session=self.session,
            scope=self.key,
        )


def _run(seed: int, count: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB) for _ in range(count)]


class History:
    """What each key has sent to each cache, with the answers, as a tree of prefixes."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], set[tuple[int, ...]]] = {}

    def add(self, talk: Talk, tokens: Sequence[int]) -> None:
        known = self._known.setdefault((talk.key, talk.cache), set())
        for count in range(len(tokens), 0, -1):
            prefix = tuple(tokens[:count])
            if prefix in known:
                break
            known.add(prefix)

    def allows(self, talk: Talk, prompt: Sequence[int], reused: int) -> bool:
        return not reused or tuple(prompt[:reused]) in self._known.get((talk.key, talk.cache), ())


class Canary:
    def __init__(self, seed: int, **options: Any) -> None:
        self._random, self._options = Random(seed), options
        self._talks = [Talk(number, self._random) for number in range(_TALKS)]
        self._history, self.result = History(), CanaryResult()

    async def run(self, requests: int, tick: Callable[[int], None] = lambda _: None) -> CanaryResult:
        mixed, alone = await _open(CACHES, **self._options), await _open({"main": CacheInfo(256)})
        try:
            while self.result.requests < requests:
                await self._round(mixed, alone)
                tick(self.result.requests)
            self.result.parked = sum(cache.fetched for cache in mixed._caches.values())
        finally:
            await mixed.close()
            await alone.close()
        return self.result

    async def _round(self, mixed: LlamaCppEngine, alone: LlamaCppEngine) -> None:
        """As many at once as the caches take, some of them cancelled by their clients."""
        chosen: list[Talk] = []
        for talk in self._random.sample(self._talks, self._random.randint(1, _TALKS)):
            if sum(other.cache == talk.cache for other in chosen) < CACHES[talk.cache].parallel:
                chosen.append(talk)
        sent = [(talk, list(talk.ids), mixed.generate(talk.prompt())) for talk in chosen]
        for talk, prompt, generation in sent:
            if self._random.random() < 0.05:
                generation.cancel()
            chunks = await read(generation)
            # A prefix that several of a key read together is read once, whichever is first.
            beside = [ids for other, ids, _ in sent if other is not talk and _share(other, talk)]
            self._check_reuse(talk, prompt, beside, end(chunks).usage.cached)
            if ids(chunks):
                await self._compare(talk, prompt, chunks, alone)
            self._history.add(talk, prompt + ids(chunks))
            talk.continue_with(ids(chunks))

    def _check_reuse(self, talk: Talk, prompt: list[int], beside: list[list[int]], reused: int) -> None:
        self.result.requests += 1
        self.result.reused += bool(reused)
        together = any(other[:reused] == prompt[:reused] for other in beside)
        if not together and not self._history.allows(talk, prompt, reused):
            self.result.faults.append(f"{talk.key} reused {reused} tokens in {talk.cache} that it had not sent there")

    async def _compare(self, talk: Talk, prompt: list[int], chunks: list[Chunk], alone: LlamaCppEngine) -> None:
        await alone.control(Control("evict"))
        expected = await read(alone.generate(Prompt(**_fields(talk.prompt(), prompt, len(ids(chunks))))))
        try:
            assert_alike(chunks, expected)
        except AssertionError as error:
            self.result.faults.append(f"{talk.key} in {talk.cache}: {error}")


def _share(one: Talk, other: Talk) -> bool:
    return (one.key, one.cache) == (other.key, other.cache)


def _fields(prompt: Prompt, ids_: list[int], count: int) -> dict[str, Any]:
    """The same prompt, alone; a cancelled answer is as true as far as it goes."""
    own = {name: getattr(prompt, name) for name in prompt.__struct_fields__}
    return own | {"parts": (TokenRun(ids_),), "max_tokens": count, "cache": "main", "session": None, "scope": ""}


async def _open(caches: dict[str, CacheInfo], **options: Any) -> LlamaCppEngine:
    usual: dict[str, Any] = {
        "kv_store": False,
        "n_threads": 1,
        "n_ubatch": 32,
        "n_batch": 32,
        "flash_attn": "on",
        "speculation": "ngram",
    }
    chosen = llama_cpp.Options(path=str(exact_model()), **usual | options)
    engine = llama_cpp.create(EngineSpec("canary", chosen, caches))
    assert isinstance(engine, LlamaCppEngine)
    await engine.open(lambda *_: None)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sequences.is_copy_worthwhile = lambda saved, *_: saved > 0  # short ones are copied and parked, too
    started = time.perf_counter()
    result = asyncio.run(Canary(options.seed).run(options.requests))
    print(
        f"{result.requests:,} requests of {len(KEYS)} keys in {len(CACHES)} caches in "
        f"{time.perf_counter() - started:.0f} s: {result.reused:,} reused their own KV, {result.parked:,} tokens came "
        f"back from RAM, {len(result.faults)} faults"
    )
    for fault in result.faults[:20]:
        print(f"  {fault}")
    sys.exit(bool(result.faults))


if __name__ == "__main__":
    main()
