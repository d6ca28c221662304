"""What our seam and the gateway cost beside an engine that is driven directly: tokens a second, as ratios.

    python -m bench.overhead [vllm] [ct2] [--rounds N] [--tokens N] [--json FILE]

In each round every way has its turn, with 1 and with 8 streams: the engine's own API, our engine on the same loaded
model in the same process, and a running server over HTTP (for vLLM with the engine in its own environment and process,
as users run it). A ratio is of the same round; the target is 0.97. vLLM needs `make vllm-env`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.driven import NO_END, PROMPT, WINDOW, prompt_ids
from bench.ratios import interval
from bench.servers import ROOT, free_port, running
from modelyard.core.engine import CacheInfo, EngineSpec, Prompt, TokenRun, Tokens
from modelyard.core.request import Sampling
from modelyard.library import vllm_env
from modelyard.library.convert import convert

STREAMS = (1, 8)
TARGET = 0.97
Way = Callable[[int, int], Awaitable[float]]  # (streams, tokens) → tokens a second


# --- vLLM -----------------------------------------------------------------------------------------------------------


class Driven:
    """bench/driven.py in vLLM's environment, answering orders."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def way(self, how: str) -> Way:
        async def run(streams: int, tokens: int) -> float:
            return await asyncio.to_thread(self._ask, {"how": how, "streams": streams, "tokens": tokens})

        return run

    def _ask(self, order: dict[str, Any]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        told = self.answer()
        return float(told["tokens"] / told["seconds"])

    def answer(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit("vLLM's process has ended; its words are in the log beside")
        return json.loads(line)


@contextmanager
def driven(folder: str) -> Iterator[Driven]:
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    argv = [str(vllm_env.python()), "-m", "bench.driven", folder]
    with tempfile.NamedTemporaryFile(prefix="driven-", suffix=".log", delete=False) as log:
        print(f"vLLM's log: {log.name}", file=sys.stderr)
        process = subprocess.Popen(
            argv, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            it = Driven(process)
            it.answer()
            yield it
        finally:
            if process.stdin is not None:
                process.stdin.close()
            process.wait(60)
            if process.stdout is not None:
                process.stdout.close()


def vllm_model(folder: str) -> dict[str, Any]:
    return {
        "backend": "vllm",
        "python": str(vllm_env.python()),
        "vllm_model": folder,
        "vllm_dtype": "float32",
        "vllm_enforce_eager": True,
        "vllm_kv_cache_memory_bytes": 1 << 29,
        "n_ctx": WINDOW,
        "parallel": 8,
    }


# --- CTranslate2 ----------------------------------------------------------------------------------------------------


async def ct2_ways(stack: AsyncExitStack, folder: str) -> dict[str, Way]:
    from modelyard.engines import ct2
    from modelyard.engines.ct2.engine import Ct2Engine

    options = ct2.Options(path=folder, device="cpu", intra_threads=1)
    engine = Ct2Engine(EngineSpec("bench", options, {"main": CacheInfo(WINDOW, 8)}))
    stack.push_async_callback(engine.close)
    await engine.open(lambda *_: None)

    async def direct(streams: int, tokens: int) -> float:
        prompts = [[engine._vocabulary[id] for id in prompt_ids(stream)] for stream in range(streams)]
        heard = 0

        def on_token(_: Any) -> bool:
            nonlocal heard
            heard += 1
            return False

        began = time.perf_counter()
        await asyncio.to_thread(
            engine._generators[0].generate_batch,
            prompts,
            include_prompt_in_result=False,
            max_length=tokens,
            sampling_topk=1,
            end_token=[],
            callback=on_token,
        )
        return heard / (time.perf_counter() - began)

    return {"direct": direct, "seam": lambda streams, tokens: _seam(engine, streams, tokens)}


async def _seam(engine: Any, streams: int, tokens: int) -> float:
    async def one(stream: int) -> int:
        asked = Prompt(
            parts=(TokenRun(prompt_ids(stream)),), sampling=Sampling(temperature=0), max_tokens=tokens, cache="main"
        )
        return sum([len(c.ids) async for batch in engine.generate(asked) for c in batch if isinstance(c, Tokens)])

    began = time.perf_counter()
    heard = sum(await asyncio.gather(*(one(stream) for stream in range(streams))))
    return heard / (time.perf_counter() - began)


# --- over HTTP ------------------------------------------------------------------------------------------------------


def over_http(port: int) -> Way:
    """Streamed, with the same prompts as token ids; ends of text are made impossible, so that lengths are equal."""

    async def one(client: httpx.AsyncClient, stream: int, tokens: int) -> int:
        body = {
            "model": "bench",
            "prompt": prompt_ids(stream),
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logit_bias": NO_END,
        }
        usage = 0
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and (told := json.loads(line[6:]).get("usage")):
                    usage = told["completion_tokens"]
        return usage

    async def run(streams: int, tokens: int) -> float:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
            began = time.perf_counter()
            heard = sum(await asyncio.gather(*(one(client, stream, tokens) for stream in range(streams))))
            return heard / (time.perf_counter() - began)

    return run


@contextmanager
def server(model: dict[str, Any], folder: Path) -> Iterator[int]:
    port, file = free_port(), folder / "bench.json"
    file.write_text(json.dumps({"http": {"port": port}, "models": {"bench": model}}))
    command = [sys.executable, "-m", "modelyard", "serve", "--config", str(file)]
    with running(command, port, "/health/ready", within_s=300):
        yield port


# --- rounds ---------------------------------------------------------------------------------------------------------


async def measured(ways: dict[str, Way], rounds: int, tokens: int) -> dict[int, dict[str, list[float]]]:
    rates: dict[int, dict[str, list[float]]] = {streams: {name: [] for name in ways} for streams in STREAMS}
    for number in range(rounds + 1):
        for streams in STREAMS:
            order = list(ways) if number % 2 else list(reversed(ways))
            for name in order:
                rate = await ways[name](streams, tokens)
                if number:  # the first round only warms up
                    rates[streams][name].append(rate)
    return rates


def table(engine: str, rates: dict[int, dict[str, list[float]]]) -> Table:
    made = Table(title=f"{engine}: tokens a second beside the engine driven directly (target ≥ {TARGET:g}×)")
    for column in ("streams", "way", "tok/s", "ratio"):
        made.add_column(column, justify="right" if column != "way" else "left")
    for streams, ways in rates.items():
        for name, values in ways.items():
            ratio = interval([a / b for a, b in zip(values, ways["direct"], strict=True)])
            middle = sorted(values)[len(values) // 2]
            made.add_row(str(streams), name, f"{middle:.1f}", "" if name == "direct" else str(ratio))
    return made


async def run(engine: str, rounds: int, tokens: int) -> dict[int, dict[str, list[float]]]:
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if engine == "vllm":
            folder = str(convert("smollm2", "hf").path)
            port = stack.enter_context(server(vllm_model(folder), scratch))
            bare = stack.enter_context(driven(folder))
            ways = {"direct": bare.way("direct"), "seam": bare.way("seam"), "http": over_http(port)}
        else:
            folder = str(convert("smollm2", "ct2").path)
            model = {"backend": "ct2", "path": folder, "intra_threads": 1, "n_ctx": WINDOW, "parallel": 8}
            port = stack.enter_context(server(model | {"device": "cpu"}, scratch))
            ways = await ct2_ways(stack, folder) | {"http": over_http(port)}
        return await measured(ways, rounds, tokens)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("engines", nargs="*", choices=["vllm", "ct2"], default=["vllm", "ct2"])
    asked.add_argument("--rounds", type=int, default=5)
    asked.add_argument("--tokens", type=int, default=64)
    asked.add_argument("--json", type=Path)
    told = asked.parse_args()
    kept: dict[str, Any] = {"prompt": PROMPT, "tokens": told.tokens}
    for engine in told.engines:
        kept[engine] = rates = asyncio.run(run(engine, told.rounds, told.tokens))
        Console().print(table(engine, rates))
    if told.json is not None:
        told.json.write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
