"""A converted model computes the same as llama.cpp with the GGUF file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import pytest

from modelyard.core.engine import AvailableMemory, EngineSpec
from modelyard.engines import ct2
from modelyard.library.convert import convert
from tests.engines.llama_cpp import reference
from tests.library.convert import tiny_models


def converted(tmp_path: Path, architecture: str = "llama", quantization: str | None = None) -> Path:
    file = tiny_models.write_model(tmp_path / "tiny.gguf", architecture)
    return Path(convert(str(file), "hf", quantization=quantization, out=tmp_path / "out").path)


def tensors(folder: Path) -> dict[str, tuple[str, Any]]:
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    head, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    assert head.pop("__metadata__") == {"format": "pt"}
    assert max(about["data_offsets"][1] for about in head.values()) == len(body)
    return {name: (about["dtype"], _values(about, body)) for name, about in head.items()}


def _values(about: dict[str, Any], body: bytes) -> Any:
    start, end = about["data_offsets"]
    raw = body[start:end]
    if about["dtype"] == "BF16":
        values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[about["dtype"]]).astype(np.float32)
    return values.reshape(about["shape"])


def test_the_config_has_the_shape(tmp_path: Path):
    config = json.loads((converted(tmp_path) / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["hidden_size"], config["num_hidden_layers"]) == (tiny_models.WIDTH, tiny_models.LAYERS)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (tiny_models.HEADS, tiny_models.KV_HEADS)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (5000.0, 1e-05)
    assert config["vocab_size"] == len(tiny_models.tokens())
    assert not config["tie_word_embeddings"]
    assert config["torch_dtype"] == "bfloat16"


def test_tied_embeddings_are_marked(tmp_path: Path):
    folder = converted(tmp_path, "qwen2")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    found = tensors(folder)
    assert "lm_head.weight" not in found
    assert "model.layers.1.self_attn.k_proj.bias" in found


@pytest.mark.parametrize(
    ("quantization", "dtype", "off"),
    [("float32", "F32", 0.0), ("float16", "F16", 2.0**-11), ("bfloat16", "BF16", 2.0**-8)],
)
def test_weights_are_rounded_to_nearest(quantization: str, dtype: str, off: float, tmp_path: Path):
    found = tensors(converted(tmp_path, quantization=quantization))
    for new, old in (("model.embed_tokens.weight", "token_embd.weight"), ("lm_head.weight", "output.weight")):
        kind, got = found[new]
        wanted = tiny_models.random_weights("llama")[old].astype(np.float32)
        assert kind == dtype
        assert np.all(np.abs(got - wanted) <= off * np.abs(wanted) + 1e-7)


def test_queries_and_keys_are_deinterleaved(tmp_path: Path):
    """llama.cpp rotates neighbouring rows, Hugging Face the first half with the second."""
    found = tensors(converted(tmp_path, quantization="float32"))
    stored, half = (
        tiny_models.random_weights("llama")["blk.0.attn_q.weight"].astype(np.float32),
        tiny_models.WIDTH // tiny_models.HEADS // 2,
    )
    got = found["model.layers.0.self_attn.q_proj.weight"][1]
    assert np.array_equal(got[:half], stored[0 : 2 * half : 2])
    assert np.array_equal(got[half : 2 * half], stored[1 : 2 * half : 2])


IDS = [1, 20, 30, 40, 77, 140, 3, 9, 200, 31, 8]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_log_probabilities_match_llama_cpp(architecture: str, tmp_path: Path):
    file = tiny_models.write_model(tmp_path / "tiny.gguf", architecture)
    folder = convert(str(file), "ct2", quantization="float32", out=tmp_path / "out").path
    generator = ctranslate2.Generator(folder, intra_threads=1, compute_type="float32")
    view = generator.forward_batch([IDS], return_log_probs=True)
    got = np.array(view)[0, -1]
    del generator, view
    (expected,) = reference.logprobs(file, IDS, [[len(IDS)]])
    assert np.abs(got - expected).max() < 0.1  # llama.cpp's KV cache has 16 bits
    assert np.ptp(expected) > 10, "a flat distribution would show nothing"


@pytest.mark.parametrize(("quantization", "at_most"), [("int8", 0.3), ("float16", 0.6), ("float32", 1.1)])
def test_the_quantization_determines_the_size(quantization: str, at_most: float, tmp_path: Path):
    file = tiny_models.write_model(tmp_path / "tiny.gguf")
    folder = Path(convert(str(file), "ct2", quantization=quantization, out=tmp_path / "out").path)
    numbers = sum(data.size for data in tiny_models.random_weights("llama").values())
    assert (folder / "model.bin").stat().st_size < at_most * 4 * numbers + 8192


def test_the_engine_estimates_the_memory_of_a_conversion(tmp_path: Path):
    file = tiny_models.write_model(tmp_path / "tiny.gguf")
    folder = convert(str(file), "ct2", out=tmp_path / "out").path
    memory = ct2.estimate(EngineSpec("tiny", ct2.Options(path=folder), {}), AvailableMemory(1 << 30))
    assert memory.weights > 0
    assert memory.kv == 0
