"""The prebuilt llama.cpp library beside the one that is built for this machine: prefill, decode, and the same text.

    python -m bench.libraries [--rounds N] [--threads N ...] [--model FILE] [--json FILE]

Each measurement is a child process that loads one of the two libraries and runs our engine on it. The libraries
alternate within a round, so that other work on the machine slows both; the better of two passes of a child counts.
With one thread tokens per CPU-second are shown too, which depend less on other work.
Both must continue a text that leaves no doubt (numbers in a row) alike. Where flash attention rounds differently, texts
with close choices differ after some tokens. `modelyard setup` offers the build on CPUs for which this shows a gain of
more than 10 %: BUILD_GAINS of engines/llama_cpp/setup.py.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.progress import track

from bench.decode_step import open_engine
from bench.prompts import NO_END
from bench.report import Comparison, console, save_json, show
from modelyard.core.engine import End, Prompt, TokenRun, Tokens
from modelyard.core.request import Sampling
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.engines.llama_cpp.library import cpu_features
from modelyard.library import default_model, llama_cpp_build, llama_cpp_package
from modelyard.tokenizer import open_tokenizer

PROMPT, OUTPUT, PASSES = 512, 48, 2
NUMBERS = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"


class Speed(Struct, frozen=True):
    """Tokens per second, tokens per CPU-second, and the tokens that continue the numbers."""

    prefill: float
    decode: float
    cpu_prefill: float
    cpu_decode: float
    ids: tuple[int, ...]


# --- the child --------------------------------------------------------------------------------------------------------


async def run_child(file: Path, threads: int) -> Speed:
    engine = await open_engine(file, threads, 1)
    try:
        passes = [await _measure(engine, number) for number in range(PASSES)]
        greedy, _, _ = await _generate(engine, open_tokenizer(file).encode(NUMBERS), 24)
        return Speed(*(max(column) for column in zip(*passes, strict=True)), ids=tuple(greedy))
    finally:
        await engine.close()


async def _measure(engine: LlamaCppEngine, number: int) -> tuple[float, float, float, float]:
    ids = [(number * 7919 + at * 104729) % 40_000 + 1_000 for at in range(PROMPT)]
    made, first, rest = await _generate(engine, ids, OUTPUT)
    return PROMPT / first[0], (len(made) - 1) / rest[0], PROMPT / first[1], (len(made) - 1) / rest[1]


_Times = tuple[float, float]  # of the clock, and of the processor


async def _generate(engine: LlamaCppEngine, ids: list[int], count: int) -> tuple[list[int], _Times, _Times]:
    """The tokens, the time to the first, and the time from the first to the last."""
    sampling = Sampling(temperature=0.0, logit_bias=NO_END)
    prompt = Prompt(parts=(TokenRun(ids),), sampling=sampling, max_tokens=count, session=str(ids[0]))
    made = list[int]()
    began = first = _now()
    async for batch in engine.generate(prompt):
        for item in batch:
            if isinstance(item, End) and item.error is not None:
                raise item.error
            if isinstance(item, Tokens):
                first = first if made else _now()
                made += item.ids
    end = _now()
    return made, (first[0] - began[0], first[1] - began[1]), (end[0] - first[0], end[1] - first[1])


def _now() -> _Times:
    return time.perf_counter(), time.process_time()


# --- the parent -------------------------------------------------------------------------------------------------------


def measure(folder: Path, file: Path, threads: int) -> Speed:
    command = [sys.executable, "-m", "bench.libraries", "--child", str(threads), "--model", str(file)]
    env = os.environ | {"LLAMA_CPP_LIB_PATH": str(folder)}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=Speed)


def compare(folders: tuple[Path, Path], file: Path, threads: list[int], rounds: int) -> list[Comparison]:
    """Of the built library to the prebuilt one. Raises if their greedy texts differ."""
    found = []
    for count in threads:
        pairs = [tuple(measure(folder, file, count) for folder in folders) for _ in track(range(rounds), f"{count}")]
        if any(built.ids != prebuilt.ids for built, prebuilt in pairs):
            raise SystemExit(f"the libraries write different greedy texts with {count} threads")
        # Several threads spin while they wait for each other: their CPU time says nothing.
        units = {"": "tok/s", "cpu_": "tok/CPU-s"} if count == 1 else {"": "tok/s"}
        for name, (kind, unit) in product(("prefill", "decode"), units.items()):
            ours, theirs = (tuple(getattr(pair[side], kind + name) for pair in pairs) for side in (0, 1))
            found.append(Comparison(f"{name}, threads: {count}", unit, ours, theirs))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    file = options.model or default_model.fetch()
    if options.child:
        sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(run_child(file, options.child))))
        return
    prebuilt = llama_cpp_package.packages_for("cpu")[0]
    folders = (llama_cpp_build.build(), llama_cpp_package.fetch(prebuilt))
    kinds = sorted(cpu_features() & {"avx2", "avx512f", "avx512_vnni", "amx_int8", "asimddp"})
    notes = (f"{prebuilt.title}; built: {llama_cpp_build.SOURCE}", f"{file.name}; {', '.join(kinds)}")
    found = compare(folders, file, options.threads, options.rounds)
    show("Built for this machine beside prebuilt", found, ("built", "prebuilt"), notes, console())
    if options.json:
        save_json(found, notes, options.json)


if __name__ == "__main__":
    main()
