"""vLLM and our engine on it in one process, run by vLLM's interpreter for `bench/overhead.py`.

`python -m bench.vllm_direct FOLDER` reads lines of JSON, `{"path": "direct" | "engine", "streams": 8, "tokens": 64}`,
and replies to each with the number of output tokens and their seconds. Both paths use the same AsyncLLM: `direct`
iterates its `generate` on its own loop, `engine` goes through our engine and is read on another loop, as by a gateway.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from typing import Any

import modelyard_vllm as vllm
from modelyard.core.engine import CacheInfo, EngineSpec, Prompt, TokenRun, Tokens
from modelyard.core.request import Sampling
from modelyard_vllm.async_llm import load_library
from modelyard_vllm.engine import VllmEngine

WINDOW, PROMPT_TOKENS = 2048, 32
NO_END = {0: -100.0, 2: -100.0}  # SmolLM2's tokens that end a text: every output has the requested length
_numbers = itertools.count(1)


def prompt_ids(stream: int) -> list[int]:
    """Ids that no cache has seen: every stream of every round starts with another token."""
    return [
        1000 + (next(_numbers) * 31 + stream) % 40000,
        *(2000 + (stream * 977 + at * 13) % 40000 for at in range(PROMPT_TOKENS - 1)),
    ]


async def run_direct(engine: VllmEngine, streams: int, tokens: int) -> int:
    """On vLLM's own loop, with the same settings."""
    lib = load_library()
    llm: Any = engine._runner._llm  # type: ignore[union-attr]

    async def one(stream: int) -> int:
        params = lib.SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logit_bias=NO_END,
            output_kind=lib.DELTA,
        )
        count = 0
        async for output in llm.generate(lib.tokens_input(prompt_ids(stream)), params, f"direct-{next(_numbers)}"):
            count += len(output.outputs[0].token_ids)
        return count

    async def run_all() -> int:
        return sum(await asyncio.gather(*(one(stream) for stream in range(streams))))

    return await engine._thread.run(run_all())


async def run_engine(engine: Any, streams: int, tokens: int, logit_bias: dict[int, float] = NO_END) -> int:
    """Through our engine interface; the number of output tokens."""

    async def one(stream: int) -> int:
        sampling = Sampling(temperature=0, logit_bias=logit_bias)
        prompt = Prompt(parts=(TokenRun(prompt_ids(stream)),), sampling=sampling, max_tokens=tokens, cache="main")
        return sum([len(c.ids) async for batch in engine.generate(prompt) for c in batch if isinstance(c, Tokens)])

    return sum(await asyncio.gather(*(one(stream) for stream in range(streams))))


async def main(folder: str, out: Any) -> None:
    options = vllm.Options(
        vllm_model=folder, vllm_dtype="float32", vllm_enforce_eager=True, vllm_kv_cache_memory_bytes=1 << 29
    )
    engine = VllmEngine(EngineSpec("bench", options, {"main": CacheInfo(WINDOW, 8)}))
    await engine.open(lambda *_: None)
    try:
        print(json.dumps({"ready": True}), file=out, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            job = json.loads(line)
            run = run_direct if job["path"] == "direct" else run_engine
            began = time.perf_counter()
            count = await run(engine, job["streams"], job["tokens"])
            print(json.dumps({"tokens": count, "seconds": time.perf_counter() - began}), file=out, flush=True)
    finally:
        await engine.close()


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w")  # vLLM logs to stdout
    os.dup2(2, 1)
    asyncio.run(main(sys.argv[1], replies))
