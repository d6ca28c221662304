"""A converted model computes the same as llama.cpp with the GGUF file."""

from __future__ import annotations

import json
import random
import struct
import unicodedata
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import pytest

import modelyard_ct2 as ct2
from modelyard.core.engine import AvailableMemory, EngineSpec
from modelyard.core.errors import Unsupported
from modelyard.library.gguf import read_contents
from modelyard.tokenizer.gguf import GgufTokenizer
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from modelyard_convert import convert, writers
from tests.engines.llama_cpp import reference
from tests.engines.llama_cpp.helpers import model_file
from tests.library.convert import tiny_models

# A converted tokenizer.json gives the same ids as llama.cpp with the GGUF file.

PIECES = [
    *("hello", " world", "The", " capital", "don't", "I'LL", "WE'RE", "x1y22z333", " 2024", "12345678", "²½", "٣٤"),
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", " \n ", "a\n b"),
    *("!?", "...", " ->", "({[", "snake_case", "http://x.y/z?q=1", "é", "日本語", "한국어", "العربية", "🎉", "👩‍👧"),
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "\x00", "\ufeff", "\u200b"),
]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return model_file()


def texts() -> list[str]:
    choose = random.Random(5)
    return ["".join(choose.choices(PIECES, k=choose.randint(1, 12))) for _ in range(500)] + PIECES


def vocabularies(file: Path, folder: Path) -> tuple[GgufTokenizer, HuggingFaceTokenizer]:
    for name, content in writers.tokenizer_files(read_contents(file)[0], 8192):
        (folder / name).write_bytes(content)
    return GgufTokenizer(file), HuggingFaceTokenizer.load(folder)


def test_the_default_model_is_tokenized_like_llama_cpp(smollm2: Path, tmp_path: Path):
    original, converted = vocabularies(smollm2, tmp_path)
    for text in [*texts(), Path(__file__).read_text("utf-8")]:
        assert converted.encode(text) == original.encode(text), repr(text)
        assert converted.encode_plain(text) == original.encode_plain(text), repr(text)
    assert converted.specials == original.specials
    assert (converted.bos, converted.bos_token, converted.eos_token) == (
        original.bos,
        original.bos_token,
        original.eos_token,
    )
    assert {0, 2} <= converted.eos


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_each_pre_tokenizer_matches_llama_cpp(pre: str, smollm2: Path, tmp_path: Path):
    metadata = read_contents(smollm2)[0]
    merges = metadata["tokenizer.ggml.merges"][:4000]
    words = tiny_models.tokens()[: len(tiny_models.SPECIALS) + 256] + [merge.replace(" ", "") for merge in merges]
    words = list(dict.fromkeys(words))
    original, converted = vocabularies(
        tiny_models.write_vocabulary(tmp_path / "words.gguf", pre, words, merges), tmp_path
    )
    for text in texts():
        text = unicodedata.normalize("NFC", text)
        assert converted.encode(text) == original.encode(text), repr(text)


def test_the_files_have_special_tokens_and_template(tmp_path: Path):
    metadata = read_contents(tiny_models.write_model(tmp_path / "tiny.gguf"))[0]
    made = {name: content.decode() for name, content in writers.tokenizer_files(metadata, 256)}
    config = json.loads(made["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["model_max_length"] == 256
    assert made["chat_template.jinja"] == config["chat_template"] == tiny_models.TEMPLATE
    assert json.loads(made["generation_config.json"])["eos_token_id"] == [0, 2]


def test_the_bos_token_is_added_if_the_file_says_so(tmp_path: Path):
    metadata = dict(read_contents(tiny_models.write_model(tmp_path / "tiny.gguf"))[0]) | {
        "tokenizer.ggml.add_bos_token": True
    }
    for name, content in writers.tokenizer_files(metadata, 256):
        (tmp_path / name).write_bytes(content)
    assert HuggingFaceTokenizer.load(tmp_path).bos == 1


def test_another_tokenizer_type_is_refused_with_an_alternative():
    with pytest.raises(Unsupported, match="ct2-transformers-converter"):
        list(writers.tokenizer_files({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": []}, 256))


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
