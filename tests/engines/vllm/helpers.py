"""Shared by the vLLM tests: the fake library, the folder of a model for it, engines and prompts."""

from __future__ import annotations

import atexit
import json
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import modelyard_vllm as vllm
from modelyard.core.engine import CacheInfo, EngineSpec, Prompt, TokenRun
from modelyard.core.request import Sampling
from modelyard_vllm.engine import VllmEngine
from tests.engines.fake import helpers as fake_helpers

GREEDY = Sampling(temperature=0)
BLOCK = 16
FAKE_LIBRARY = Path(__file__).parent / "fake_library"


def use_fake_library() -> None:
    """Appended to the path: a real vLLM, if installed, would be found first; its tests are marked."""
    if str(FAKE_LIBRARY) not in sys.path:
        sys.path.append(str(FAKE_LIBRARY))


@cache
def model_folder() -> Path:
    """A config and small complete weights, without a tokenizer."""
    folder = Path(tempfile.mkdtemp(prefix="modelyard-vllm-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps({"vocab_size": fake_helpers.tokenizer().size}))
    (folder / "model.safetensors").write_bytes(weights(64))
    return folder


def weights(size: int) -> bytes:
    head = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    return len(head).to_bytes(8, "little") + head + bytes(size)


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def spec(caches: Mapping[str, CacheInfo] | None = None, behaviour: dict[str, Any] | None = None, **options: Any) -> Any:
    """`behaviour` configures the fake library."""
    engine_args = {"block_size": BLOCK, **({"additional_config": behaviour} if behaviour else {})}
    values = {"vllm_model": str(model_folder()), "vllm_engine_args": engine_args} | options
    modalities = tuple(values.pop("modalities", ("text",)))
    return EngineSpec("fake", vllm.Options(**values), caches or {"main": CacheInfo(512, 4)}, modalities)


def make(caches: Mapping[str, CacheInfo] | None = None, **options: Any) -> VllmEngine:
    use_fake_library()
    engine = vllm.create(spec(caches, **options))
    assert isinstance(engine, VllmEngine)
    return engine


@asynccontextmanager
async def running(caches: Mapping[str, CacheInfo] | None = None, **options: Any) -> AsyncIterator[VllmEngine]:
    engine = make(caches, **options)
    try:
        await engine.open(lambda *_: None)
        yield engine
    finally:
        await engine.close()


def prompt(text: str = "Hello there!", **fields: Any) -> Prompt:
    chat = fake_helpers.chatml(("user", text))
    parts = (TokenRun(fake_helpers.tokenizer().encode(chat)),)
    return Prompt(**{"parts": parts, "sampling": GREEDY, "max_tokens": 8, "cache": "main"} | fields)
