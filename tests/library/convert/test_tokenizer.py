"""A converted tokenizer.json gives the same ids as llama.cpp with the GGUF file."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path

import pytest

from modelyard.core.errors import Unsupported
from modelyard.library.convert import tokenizer
from modelyard.library.gguf import read_contents
from modelyard.tokenizer.gguf import GgufTokenizer
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.engines.llama_cpp.helpers import model_file
from tests.library.convert import tiny_models

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
    for name, content in tokenizer.tokenizer_files(read_contents(file)[0], 8192):
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
    made = {name: content.decode() for name, content in tokenizer.tokenizer_files(metadata, 256)}
    config = json.loads(made["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert config["model_max_length"] == 256
    assert made["chat_template.jinja"] == config["chat_template"] == tiny_models.TEMPLATE
    assert json.loads(made["generation_config.json"])["eos_token_id"] == [0, 2]


def test_the_bos_token_is_added_if_the_file_says_so(tmp_path: Path):
    metadata = dict(read_contents(tiny_models.write_model(tmp_path / "tiny.gguf"))[0]) | {
        "tokenizer.ggml.add_bos_token": True
    }
    for name, content in tokenizer.tokenizer_files(metadata, 256):
        (tmp_path / name).write_bytes(content)
    assert HuggingFaceTokenizer.load(tmp_path).bos == 1


def test_another_tokenizer_type_is_refused_with_an_alternative():
    with pytest.raises(Unsupported, match="ct2-transformers-converter"):
        list(tokenizer.tokenizer_files({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": []}, 256))
