"""Shared by the CTranslate2 tests: SmolLM2 converted once, a tiny random model, engines with one thread, prompts."""

from __future__ import annotations

import atexit
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
from ctranslate2.specs import common_spec, transformer_spec

import modelyard_ct2 as ct2
from modelyard.core.engine import CacheInfo, Chunk, EngineSpec, Prompt, TokenRun
from modelyard.core.request import Sampling
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from modelyard_convert import convert
from modelyard_ct2.engine import Ct2Engine
from modelyard_ct2.model_folder import read_vocabulary
from tests.engines.reading import ids

GREEDY = Sampling(temperature=0)
_LAYERS, _HEADS, _WIDTH, _INNER = 2, 4, 64, 96


@cache
def model_folder() -> Path:
    """SmolLM2; the first call on a machine converts it, which takes seconds."""
    return Path(convert("smollm2", "ct2").path)


@cache
def tiny_folder() -> Path:
    """A random model with SmolLM2's vocabulary in float32: its steps cost almost nothing."""
    temporary = tempfile.TemporaryDirectory(prefix="ct2-")
    atexit.register(temporary.cleanup)
    folder, vocabulary = Path(temporary.name) / "tiny-ct2", read_vocabulary(model_folder())
    folder.mkdir()
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        _LAYERS,
        _HEADS,
        activation=common_spec.Activation.SWISH,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,
        rotary_interleave=False,
    )
    _fill(spec.decoder, len(vocabulary))
    spec.register_vocabulary(vocabulary)
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "<|im_end|>"
    spec.config.layer_norm_epsilon = 1e-5
    spec.validate()
    spec.save(str(folder))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copyfile(model_folder() / name, folder / name)
    return folder


def _fill(decoder: Any, n_vocab: int) -> None:
    random = np.random.default_rng(5)

    def weights(*shape: int, scale: float = 0.3) -> Any:
        return random.normal(0, scale, shape).astype(np.float32)

    def norm() -> Any:
        return np.ones(_WIDTH, np.float32)

    decoder.scale_embeddings = False
    decoder.embeddings.weight = weights(n_vocab, _WIDTH, scale=1.0)
    decoder.projection.weight = weights(n_vocab, _WIDTH)
    decoder.layer_norm.gamma = norm()
    for layer in decoder.layer:
        layer.self_attention.layer_norm.gamma, layer.ffn.layer_norm.gamma = norm(), norm()
        layer.self_attention.linear[0].weight = weights(3 * _WIDTH, _WIDTH)
        layer.self_attention.linear[1].weight = weights(_WIDTH, _WIDTH)
        layer.ffn.linear_0.weight = weights(_INNER, _WIDTH)
        layer.ffn.linear_0_noact.weight = weights(_INNER, _WIDTH)
        layer.ffn.linear_1.weight = weights(_WIDTH, _INNER)


@cache
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.load(model_folder())


def spec(caches: Mapping[str, CacheInfo] | None = None, **options: Any) -> EngineSpec:
    """On the tiny model. In float32, so that two runs can be compared: in int8 the log probabilities of a job differ by
    up to 0.6 between batches."""
    defaults = {"path": str(tiny_folder()), "device": "cpu", "intra_threads": 1, "compute_type": "float32"}
    return EngineSpec("smollm2", ct2.Options(**defaults | options), caches or {"main": CacheInfo(512, 4)})


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
    chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    defaults = {"sampling": GREEDY, "max_tokens": 8, "cache": "main"}
    return Prompt(parts=(TokenRun(tokenizer().encode(chat)),), **defaults | fields)


def text_of(chunks: list[Chunk]) -> str:
    return tokenizer().decode(ids(chunks))
