"""What the CTranslate2 engine's tests share: the default model converted once, engines of one thread, prompts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

from modelyard.core.engine import CacheInfo, Chunk, EngineSpec, Prompt, TokenRun
from modelyard.core.request import Sampling
from modelyard.engines import ct2
from modelyard.engines.ct2.engine import Ct2Engine
from modelyard.library.convert import convert
from modelyard.tokenizer.hf import HuggingFaceTokenizer
from tests.engines.reading import ids

GREEDY = Sampling(temperature=0)


@cache
def model_folder() -> Path:
    """Converted where this machine has not done so yet, which takes seconds."""
    return Path(convert("smollm2", "ct2").path)


@cache
def vocabulary() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.load(model_folder())


def spec(caches: Mapping[str, CacheInfo] | None = None, **options: Any) -> EngineSpec:
    """Computes in float32: in int8 the same job was seen to differ by 0.6 from itself in another batch, while here
    nothing is rounded and two runs can be compared."""
    chosen = {"path": str(model_folder()), "device": "cpu", "intra_threads": 1, "compute_type": "float32"} | options
    return EngineSpec("smollm2", ct2.Options(**chosen), caches or {"main": CacheInfo(512, 4)})


@asynccontextmanager
async def running(caches: Mapping[str, CacheInfo] | None = None, **options: Any) -> AsyncIterator[Ct2Engine]:
    engine = ct2.create(spec(caches, **options))
    assert isinstance(engine, Ct2Engine)
    try:
        await engine.open(lambda *_: None)
        yield engine
    finally:
        await engine.close()


def prompt(text: str = "Hello!", **fields: Any) -> Prompt:
    whole = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    chosen = {"sampling": GREEDY, "max_tokens": 8, "cache": "main"} | fields
    return Prompt(parts=(TokenRun(vocabulary().encode(whole)),), **chosen)


def said(chunks: list[Chunk]) -> str:
    return vocabulary().decode(ids(chunks))
