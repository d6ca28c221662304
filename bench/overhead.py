"""What our engine interface and the gateway cost beside vLLM and CTranslate2 used directly, as ratios of tokens/s.

    python -m bench.overhead [vllm] [ct2] [--rounds N] [--tokens N] [--json FILE]

Every round measures every path with 1 and with 8 streams: the library's own API, our engine on the same loaded model in
the same process, and a running server over HTTP (vLLM in its own environment and process, as users run it). The target
is a ratio of 0.97 in the same round. vLLM needs `make vllm-env`.
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
from statistics import fmean
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.raw_http import HttpClient
from bench.servers import ROOT, modelyard_server
from bench.vllm_direct import NO_END, PROMPT_TOKENS, WINDOW, prompt_ids, run_engine
from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard_bench.statistics import ratio_interval
from modelyard_convert import convert
from modelyard_vllm import env as vllm_env

STREAMS = (1, 8)
TARGET = 0.97
RunPath = Callable[[int, int], Awaitable[float]]  # (streams, tokens) → tokens per second


def timed(run: Callable[[int, int], Awaitable[int]]) -> RunPath:
    async def rate(streams: int, tokens: int) -> float:
        began = time.perf_counter()
        return await run(streams, tokens) / (time.perf_counter() - began)

    return rate


# --- vLLM -------------------------------------------------------------------------------------------------------------


class VllmProcess:
    """`bench/vllm_direct.py` in vLLM's environment."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def path(self, name: str) -> RunPath:
        async def rate(streams: int, tokens: int) -> float:
            return await asyncio.to_thread(self._run, {"path": name, "streams": streams, "tokens": tokens})

        return rate

    def _run(self, job: dict[str, Any]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        reply = self.read_reply()
        return float(reply["tokens"] / reply["seconds"])

    def read_reply(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit("vLLM's process has ended; see its log")
        return json.loads(line)


@contextmanager
def vllm_process(folder: str) -> Iterator[VllmProcess]:
    env = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    command = [str(vllm_env.python()), "-m", "bench.vllm_direct", folder]
    with tempfile.NamedTemporaryFile(prefix="vllm-direct-", suffix=".log", delete=False) as log:
        print(f"vLLM's log: {log.name}", file=sys.stderr)
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            made = VllmProcess(process)
            made.read_reply()
            yield made
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


# --- CTranslate2 ------------------------------------------------------------------------------------------------------


async def ct2_paths(stack: AsyncExitStack, folder: str) -> dict[str, RunPath]:
    import modelyard_ct2 as ct2
    from modelyard_ct2.engine import Ct2Engine

    options = ct2.Options(path=folder, device="cpu", intra_threads=1)
    engine = Ct2Engine(EngineSpec("bench", options, {"main": CacheInfo(WINDOW, 8)}))
    stack.push_async_callback(engine.close)
    await engine.open(lambda *_: None)

    async def direct(streams: int, tokens: int) -> int:
        prompts = [[engine._vocabulary[id] for id in prompt_ids(stream)] for stream in range(streams)]
        count = 0

        def on_token(_: Any) -> bool:
            nonlocal count
            count += 1
            return False

        await asyncio.to_thread(
            engine._generators[0].generate_batch,
            prompts,
            include_prompt_in_result=False,
            max_length=tokens,
            sampling_topk=1,
            end_token=[],
            callback=on_token,
        )
        return count

    return {"direct": timed(direct), "engine": timed(lambda streams, tokens: run_engine(engine, streams, tokens, {}))}


# --- over HTTP --------------------------------------------------------------------------------------------------------


def http_path(url: str) -> RunPath:
    """Streamed completions of the same prompts as token ids; a bias against end tokens makes lengths equal."""

    async def run(streams: int, tokens: int) -> int:
        client = HttpClient(url)

        async def one(stream: int) -> int:
            body = {
                "model": "bench",
                "prompt": prompt_ids(stream),
                "max_tokens": tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "logit_bias": NO_END,
            }
            response = await client.send(client.request("POST", "/v1/completions", msgspec.json.encode(body)), 600.0)
            events = [line[6:] for line in response.body.splitlines() if line.startswith(b"data: {")]
            usage = [found for event in events if (found := msgspec.json.decode(event).get("usage"))]
            if response.error is not None or response.status != 200 or not usage:
                raise SystemExit(f"the server failed: {response.error or response.body[:500]!r}")
            return int(usage[-1]["completion_tokens"])

        return sum(await asyncio.gather(*(one(stream) for stream in range(streams))))

    return timed(run)


# --- rounds -----------------------------------------------------------------------------------------------------------

Rates = dict[int, dict[str, list[float]]]  # by streams and path


async def measure(paths: dict[str, RunPath], rounds: int, tokens: int) -> Rates:
    rates: Rates = {streams: {name: [] for name in paths} for streams in STREAMS}
    for number in range(rounds + 1):
        for streams in STREAMS:
            for name in paths if number % 2 else reversed(paths):
                rate = await paths[name](streams, tokens)
                if number:  # the first round is the warm-up
                    rates[streams][name].append(rate)
    return rates


def table(engine: str, rates: Rates) -> Table:
    made = Table(title=f"{engine}: tokens/s beside the library used directly (target ≥ {TARGET:g}×)")
    for column in ("streams", "path", "tok/s", "ratio"):
        made.add_column(column, justify="right" if column != "path" else "left")
    for streams, paths in rates.items():
        for name, values in paths.items():
            ratio = "" if name == "direct" else str(ratio_interval(values, paths["direct"])).replace("[", r"\[")
            made.add_row(str(streams), name, f"{fmean(values):.1f}", ratio)
    return made


async def run(engine: str, rounds: int, tokens: int) -> Rates:
    async with AsyncExitStack() as stack:
        if engine == "vllm":
            folder = str(convert("smollm2", "hf").path)
            model = vllm_model(folder)
        else:
            folder = str(convert("smollm2", "ct2").path)
            model = {"backend": "ct2", "path": folder, "intra_threads": 1, "n_ctx": WINDOW, "parallel": 8}
            model |= {"device": "cpu"}
        server = stack.enter_context(modelyard_server({"models": {"bench": model}}, within_s=300))
        if engine == "vllm":
            process = stack.enter_context(vllm_process(folder))
            paths = {name: process.path(name) for name in ("direct", "engine")}
        else:
            paths = await ct2_paths(stack, folder)
        return await measure(paths | {"http": http_path(server.url)}, rounds, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="*", choices=["vllm", "ct2"], default=["vllm", "ct2"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    saved: dict[str, Any] = {"prompt_tokens": PROMPT_TOKENS, "tokens": options.tokens}
    for engine in options.engines:
        saved[engine] = rates = asyncio.run(run(engine, options.rounds, options.tokens))
        Console().print(table(engine, rates))
    if options.json is not None:
        options.json.write_text(json.dumps(saved, indent=1))


if __name__ == "__main__":
    main()
