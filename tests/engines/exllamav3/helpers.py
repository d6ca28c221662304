"""Shared by the ExLlamaV3 tests: a model folder, and engines on the fake or the real library."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import struct
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from shutil import copyfile
from typing import Any

import modelyard_exllamav3 as exllamav3
import modelyard_fake as fake
from modelyard.core.engine import CacheInfo, Chunk, EngineSpec, Prompt, TokenRun
from modelyard.core.request import Sampling
from modelyard.core.tokenizer import Tokenizer
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from modelyard_exllamav3 import engine as model
from modelyard_exllamav3.engine import ExllamaEngine
from tests.engines.exllamav3.fake_library import FakeLibrary, in_step_with
from tests.engines.reading import ids

GREEDY = Sampling(temperature=0)
# A quantized model for the real library on a machine with a GPU; otherwise the fake library is used.
REAL = os.environ.get("MODELYARD_EXL3_MODEL")
N_VOCAB = 4100  # of the fake engine's tokenizer
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": N_VOCAB,
    "max_position_embeddings": 8192,
    "eos_token_id": 2,
    "quantization_config": {"quant_method": "exl3", "bits": 4.0},
}
WEIGHTS = {
    "model.embed_tokens.weight": ("F16", (N_VOCAB, 64)),
    "model.layers.0.mlp.up_proj.trellis": ("I16", (4, 8, 64)),
    "lm_head.trellis": ("I16", (4, 256, 96)),
}


def write_weights(file: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]] = WEIGHTS) -> Path:
    """A safetensors file of zeros with 16 bits per number."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = 2
        for side in shape:
            size *= side
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    about = json.dumps(head).encode()
    file.write_bytes(struct.pack("<Q", len(about)) + about + bytes(end))
    return file


def write_model(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    write_weights(folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        copyfile(fake.tokenizer_path(fake.Options()) / name, folder / name)
    return folder


@cache
def model_folder() -> Path:
    if REAL is not None:
        return Path(REAL)
    kept = tempfile.TemporaryDirectory(prefix="exl3-")
    atexit.register(kept.cleanup)
    return write_model(Path(kept.name) / "tiny-exl3")


@cache
def tokenizer() -> Tokenizer:
    return HuggingFaceTokenizer.load(model_folder())


def spec(caches: Mapping[str, CacheInfo] | None = None, **options: Any) -> EngineSpec:
    values = {"path": str(model_folder()), "exllama_warmup": False} | options
    return EngineSpec("tiny", exllamav3.Options(**values), caches or {"main": CacheInfo(512, 4)})


def make(spec: EngineSpec, library: FakeLibrary | None = None, *, slow: bool = False) -> ExllamaEngine:
    """On the real library if there is one. `slow`: each step waits for the readers of the previous one."""
    if REAL is not None and library is None:
        return ExllamaEngine(spec, model.load_library)
    library = library or FakeLibrary()
    if slow:
        library.before_step = in_step_with(asyncio.get_running_loop())
    return ExllamaEngine(spec, library.load)


@asynccontextmanager
async def running(
    caches: Mapping[str, CacheInfo] | None = None,
    library: FakeLibrary | None = None,
    *,
    slow: bool = False,
    **options: Any,
) -> AsyncIterator[ExllamaEngine]:
    engine = make(spec(caches, **options), library or FakeLibrary(), slow=slow)
    try:
        await engine.open(lambda *_: None)
        yield engine
    finally:
        await engine.close()


def prompt(text: str = "Hello, how are you today?", **fields: Any) -> Prompt:
    chat = text if "<|" in text else f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    values = {"sampling": GREEDY, "max_tokens": 8, "cache": "main"} | fields
    return Prompt(parts=(TokenRun(tokenizer().encode(chat)),), **values)


def text_of(chunks: list[Chunk]) -> str:
    return tokenizer().decode(ids(chunks))
