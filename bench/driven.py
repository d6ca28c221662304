"""vLLM and our engine on it in one process: `python -m bench.driven FOLDER`, run by vLLM's interpreter for overhead.py.

Reads lines of JSON, `{"how": "direct" | "seam", "streams": 8, "tokens": 64}`, and answers each with the tokens that
came and the seconds they took. Both ways use the same AsyncLLM: `direct` iterates its `generate` on its own loop,
`seam` goes through our engine and is read on another loop, as a gateway reads it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from typing import Any

from modelyard.core.engine import CacheInfo, EngineSpec, Prompt, TokenRun, Tokens
from modelyard.core.request import Sampling
from modelyard.engines import vllm
from modelyard.engines.vllm.async_llm import load_library
from modelyard.engines.vllm.engine import VllmEngine

WINDOW, PROMPT = 2048, 32
NO_END = {0: -100.0, 2: -100.0}  # SmolLM2's tokens that end a text: answers are of one length, whoever asks
_numbers = itertools.count(1)


def prompt_ids(stream: int) -> list[int]:
    """That no cache has seen: every stream of every round begins with another token."""
    return [
        1000 + (next(_numbers) * 31 + stream) % 40000,
        *(2000 + (stream * 977 + at * 13) % 40000 for at in range(PROMPT - 1)),
    ]


async def direct(engine: VllmEngine, streams: int, tokens: int) -> int:
    """On vLLM's own loop, with the same settings."""
    lib = load_library()
    llm: Any = engine._runner._llm  # type: ignore[union-attr]

    async def one(stream: int) -> int:
        call = lib.SamplingParams(
            max_tokens=tokens,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logit_bias=NO_END,
            output_kind=lib.DELTA,
        )
        heard = 0
        async for output in llm.generate(lib.tokens_input(prompt_ids(stream)), call, f"direct-{next(_numbers)}"):
            heard += len(output.outputs[0].token_ids)
        return heard

    async def all_of_them() -> int:
        return sum(await asyncio.gather(*(one(stream) for stream in range(streams))))

    return await engine._thread.run(all_of_them())


async def seam(engine: VllmEngine, streams: int, tokens: int) -> int:
    async def one(stream: int) -> int:
        sampling = Sampling(temperature=0, logit_bias=NO_END)
        asked = Prompt(parts=(TokenRun(prompt_ids(stream)),), sampling=sampling, max_tokens=tokens, cache="main")
        heard = 0
        async for batch in engine.generate(asked):
            heard += sum(len(chunk.ids) for chunk in batch if isinstance(chunk, Tokens))
        return heard

    return sum(await asyncio.gather(*(one(stream) for stream in range(streams))))


async def main(folder: str, answer: Any) -> None:
    options = vllm.Options(
        vllm_model=folder, vllm_dtype="float32", vllm_enforce_eager=True, vllm_kv_cache_memory_bytes=1 << 29
    )
    engine = VllmEngine(EngineSpec("bench", options, {"main": CacheInfo(WINDOW, 8)}))
    await engine.open(lambda *_: None)
    try:
        print(json.dumps({"ready": True}), file=answer, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            run = direct if order["how"] == "direct" else seam
            began = time.perf_counter()
            heard = await run(engine, order["streams"], order["tokens"])
            print(json.dumps({"tokens": heard, "seconds": time.perf_counter() - began}), file=answer, flush=True)
    finally:
        await engine.close()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")  # vLLM writes its log where answers belong
    os.dup2(2, 1)
    asyncio.run(main(sys.argv[1], answers))
