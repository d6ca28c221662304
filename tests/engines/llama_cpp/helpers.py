"""Shared helpers: the default model's file, engines with one thread, greedy prompts."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import CacheInfo, Chunk, EngineSpec, Prompt, TokenRun, Tokens
from modelyard.core.request import Sampling
from modelyard.engines import llama_cpp
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.engine import LlamaCppEngine
from modelyard.engines.llama_cpp.job import LlamaCppJob
from modelyard.library.default_model import fetch
from modelyard.tokenizer import llama_log
from modelyard.tokenizer.gguf import GgufTokenizer
from tests.engines.reading import ids, read

GREEDY = Sampling(temperature=0)
UBATCH = 16
shared_loop = pytest.mark.asyncio(loop_scope="module")  # for tests that use the fixture `engine`


@cache
def model_file() -> Path:
    """Downloaded on first use."""
    return fetch()


@cache
def vocabulary() -> GgufTokenizer:
    return GgufTokenizer(model_file())


def spec(caches: Mapping[str, CacheInfo] | None = None, **options: Any) -> EngineSpec:
    # One thread: two that spin for each other on a busy machine take ten times as long.
    # No speculation: whether it pays is measured, and a test must not depend on the load of the machine.
    # Flash attention: the default depends on the library's fp16 arithmetic.
    usual = {"n_threads": 1, "n_ubatch": UBATCH, "n_batch": UBATCH, "speculation": "off", "flash_attn": "on"}
    chosen = {"path": str(model_file())} | usual | options
    return EngineSpec("smollm2", llama_cpp.Options(**chosen), caches or {"main": CacheInfo(512, 4)})


@asynccontextmanager
async def running(caches: Mapping[str, CacheInfo] | None = None, **options: Any) -> AsyncIterator[LlamaCppEngine]:
    engine = llama_cpp.create(spec(caches, **options))
    assert isinstance(engine, LlamaCppEngine)
    try:
        await engine.open(lambda *_: None)
        yield engine
    finally:
        await engine.close()


@contextmanager
def model_buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """Bytes of the buffers that llama.cpp logs in this block, by kind: model, KV, compute."""
    lines: list[str] = []
    found: dict[str, float] = {}
    listener: Any = lib.llama_log_callback(lambda _level, text, _: lines.append(text.decode("utf-8", "replace")))
    with monkeypatch.context() as patch:
        patch.setattr(llama_log, "callback", listener)
        llama_log.clear()
        yield found
    llama_log.clear()
    text = "".join(lines).replace(" RS buffer", " KV buffer")  # the states of recurrent layers
    for kind, size in re.findall(r"(model|KV|compute) buffer size = +([\d.]+) MiB", text):
        found[kind] = found.get(kind, 0.0) + float(size) * 2**20


def chatml(*turns: tuple[str, str], opening: str = "") -> str:
    text = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    return f"{text}<|im_start|>assistant\n{opening}"


def prompt(text: str = "Hello!", **fields: Any) -> Prompt:
    """`text` is the user's turn, or a whole prompt if it has markers. Greedy, with logprobs for comparisons."""
    whole = text if "<|" in text else chatml(("user", text))
    return id_prompt(vocabulary().encode(whole), **fields)


def id_prompt(ids: list[int], **fields: Any) -> Prompt:
    chosen = {"sampling": GREEDY, "max_tokens": 8, "cache": "main", "logprobs": 2} | fields
    return Prompt(parts=(TokenRun(ids),), **chosen)


async def answer(engine: LlamaCppEngine, text: str = "Hello!", **fields: Any) -> list[Chunk]:
    return await read(engine.generate(prompt(text, **fields)))


def text_of(chunks: list[Chunk]) -> str:
    return vocabulary().decode(ids(chunks))


class Tap:
    """Sees every chunk on the engine's thread, in order. Create it before the first job."""

    def __init__(self, engine: LlamaCppEngine) -> None:
        self.seen: list[tuple[int, Chunk]] = []
        for held in engine._contexts:
            held._emit, held._emit_batch = self._emit, self._emit_batch
        self._next = engine._dispatch.put

    def _emit(self, job: LlamaCppJob, chunks: list[Chunk], last: bool) -> None:
        self.seen += [(job.arrival, chunk) for chunk in chunks]
        for chunk in chunks:
            self.on_chunk(job, chunk)
        self._next(job, chunks, last)

    def _emit_batch(self, jobs: Sequence[LlamaCppJob], tokens: list[int]) -> None:
        for job, token in zip(jobs, tokens, strict=True):
            self._emit(job, [Tokens([token])], False)

    def on_chunk(self, job: LlamaCppJob, chunk: Chunk) -> None:
        """A hook for tests that act at a certain point of a job."""
