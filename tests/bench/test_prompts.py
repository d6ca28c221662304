"""Prompts of an exact length, and the tokenizer that is built from a GGUF file's metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from bench.prompts import RandomPrompts, tokenizer_folder, write_tokenizer
from modelyard.core.errors import Unsupported
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer


def test_prompts_have_the_wanted_length_and_share_no_prefix() -> None:
    prompts = RandomPrompts(tokenizer_folder())
    for tokens in (32, 128, 512):
        assert abs(prompts.count(prompts.messages(tokens)) - tokens) <= 2
    assert len({prompts.messages(64)[0]["content"] for _ in range(50)}) == 50


def metadata(**changed: Any) -> dict[str, Any]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<|im_start|>", "<|im_end|>", *letters, "he", "Ġhe"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": ["h e", "Ġ he"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages }}",
    } | changed


def test_the_tokenizer_merges_splits_digits_and_knows_its_control_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, metadata())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|> he 42<|im_end|>").tokens == [
        *("<|im_start|>", "Ġhe", "Ġ", "4", "2", "<|im_end|>")
    ]


def test_another_pre_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="tekken"):
        write_tokenizer(tmp_path, metadata(**{"tokenizer.ggml.pre": "tekken"}))


def test_the_gateway_can_load_the_folder(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "made", metadata())
    tokenizer = HuggingFaceTokenizer.load(tmp_path / "made")
    assert tokenizer.specials == {"<|im_start|>": 0, "<|im_end|>": 1}
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.bos) == ("<|im_start|>", "<|im_end|>", None)
    assert tokenizer.decode(tokenizer.encode("he höhe 7")) == "he höhe 7"
    assert json.loads((tmp_path / "made/tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
