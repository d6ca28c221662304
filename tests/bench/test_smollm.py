"""The tokenizer that is built from a GGUF file's metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from bench.smollm import build_tokenizer, write_folder
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer


def metadata(**changed: Any) -> dict[str, Any]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|im_start|>", "<|im_end|>", *letters, "he", "Ġhe"]
    return {
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": ["h e", "Ġ he"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    } | changed


def test_the_tokenizer_merges_splits_digits_and_knows_its_control_tokens():
    tokenizer = build_tokenizer(metadata())
    assert tokenizer.encode("<|im_start|> he 42<|im_end|>").tokens == [
        *("<|im_start|>", "Ġhe", "Ġ", "4", "2", "<|im_end|>")
    ]


def test_another_pre_tokenizer_is_refused():
    with pytest.raises(ValueError, match="llama-bpe"):
        build_tokenizer(metadata(**{"tokenizer.ggml.pre": "llama-bpe"}))


def test_the_folder_is_one_that_the_gateway_reads(tmp_path: Path):
    write_folder(tmp_path / "made", metadata())
    vocab = HuggingFaceTokenizer.load(tmp_path / "made")
    assert vocab.specials == {"<|im_start|>": 0, "<|im_end|>": 1}
    assert (vocab.bos_token, vocab.eos_token, vocab.bos) == ("<|im_start|>", "<|im_end|>", None)
    assert vocab.decode(vocab.encode("he höhe 7")) == "he höhe 7"
    assert json.loads((tmp_path / "made/tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
