"""How long many agents wait for their first tokens when they arrive together.

    python -m bench.arrivals --model FILE [--count 64] [--shared 3000] [--own 500] [--long 8000] [--new 16]
                             [--option NAME=VALUE …]

Two questions to the llama.cpp engine, without the gateway; prompts are random ids, so any file will do:

1. `--count` prompts at once, of which the first `--shared` tokens are the same. The time until all have their first
   token, as a multiple of the time that reading as many distinct tokens takes: the same number of prompts at once,
   which share nothing.
2. As many short prompts (64 tokens) at once, in an empty engine and after as many long conversations of `--long` tokens
   have filled every sequence: the times to their first tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct

from modelyard.core.engine import Accepted, CacheInfo, End, EngineSpec, Prompt, TokenRun, Tokens
from modelyard.core.request import Sampling
from modelyard.engines import llama_cpp
from modelyard.engines.llama_cpp.engine import LlamaCppEngine

SHORT = 64  # tokens
Ids = list[int]


class Waited(Struct, frozen=True):
    """Of one round: the times to first tokens in order, and the prompt tokens that were evaluated."""

    first: list[float]
    evaluated: int

    @property
    def p50(self) -> float:
        return self.first[len(self.first) // 2]

    @property
    def last(self) -> float:
        return self.first[-1]

    def __str__(self) -> str:
        return f"first token p50 {self.p50:.2f} s, last {self.last:.2f} s, {self.evaluated:,} tokens evaluated"


def some_ids(count: int, size: int, *seed: object) -> Ids:
    random = Random(repr(seed))
    return [random.randrange(300, size) for _ in range(count)]


async def arrive(engine: LlamaCppEngine, prompts: list[Ids], new: int) -> Waited:
    """All at once."""
    began = time.monotonic()

    async def one(number: int, ids: Ids) -> tuple[float, int]:
        first, evaluated = 0.0, len(ids)
        prompt = Prompt(parts=(TokenRun(ids),), sampling=Sampling(temperature=0), max_tokens=new, session=str(number))
        async for batch in engine.generate(prompt):
            for each in batch:
                if isinstance(each, Accepted):
                    evaluated -= each.cached_tokens
                elif isinstance(each, Tokens) and not first:
                    first = time.monotonic() - began
                elif isinstance(each, End) and each.error is not None:
                    raise each.error
        return first, evaluated

    found = await asyncio.gather(*(one(*each) for each in enumerate(prompts)))
    return Waited(sorted(first for first, _ in found), sum(evaluated for _, evaluated in found))


async def together(engine: LlamaCppEngine, count: int, shared: int, own: int, new: int) -> tuple[Waited, Waited]:
    """Prompts that begin alike, and as many distinct tokens that share nothing."""
    size, system = engine.n_vocab, some_ids(shared, engine.n_vocab, "system")
    alike = [system + some_ids(own, size, "own", number) for number in range(count)]
    each = own + -(-shared // count)
    apart = [some_ids(each, size, "apart", number) for number in range(count)]
    return await arrive(engine, alike, new), await arrive(engine, apart, new)


async def after_long(engine: LlamaCppEngine, count: int, long: int, new: int) -> tuple[Waited, Waited, Waited]:
    """Short prompts before and after long ones, and the long ones."""

    def some(length: int, name: str) -> list[Ids]:
        return [some_ids(length, engine.n_vocab, name, number) for number in range(count)]

    before = await arrive(engine, some(SHORT, "before"), new)
    talks = await arrive(engine, some(long, "long"), new)
    return before, talks, await arrive(engine, some(SHORT, "after"), new)


async def measure(file: Path, count: int, shared: int, own: int, long: int, new: int, given: dict[str, Any]) -> None:
    chosen = llama_cpp.Options.model_validate({"path": str(file), "speculation": "off", "kv_store": False, **given})
    window = -(-(max(shared + own, long) + new) // 256) * 256

    async def opened() -> LlamaCppEngine:
        engine = llama_cpp.create(EngineSpec("bench", chosen, {"main": CacheInfo(window, count)}))
        assert isinstance(engine, LlamaCppEngine)
        await engine.open(lambda *_: None)
        await arrive(engine, [some_ids(SHORT, engine.n_vocab, "first")], new)
        return engine

    engine = await opened()
    try:
        alike, apart = await together(engine, count, shared, own, new)
    finally:
        await engine.close()
    print(f"{count} prompts at once, {shared:,} shared + {own:,} own tokens: {alike}")
    print(
        f"as many distinct tokens, nothing shared: {apart}; ratio of the last {alike.last / apart.last:.2f}", flush=True
    )
    engine = await opened()
    try:
        before, talks, after = await after_long(engine, count, long, new)
    finally:
        await engine.close()
    print(f"{count} short prompts: {before}\n{count} long ones: {talks}\n{count} short ones after them: {after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    for name, default in (("count", 64), ("shared", 3000), ("own", 500), ("long", 8000), ("new", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of the llama_cpp engine")
    given = parser.parse_args()
    options = dict(each.split("=", 1) for each in given.option)
    numbers = (given.count, given.shared, given.own, given.long, given.new)
    asyncio.run(measure(given.model, *numbers, options))


if __name__ == "__main__":
    main()
