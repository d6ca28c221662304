"""Settings in the files of a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from modelyard.tokenizer.huggingface import SpecialTokens, read_special_tokens, tokenizer_file


def test_an_empty_folder_has_no_settings(tmp_path: Path) -> None:
    assert read_special_tokens(tmp_path) == SpecialTokens()


def test_tokenizer_config_overrides_special_tokens_map(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<old>"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<new>"}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert read_special_tokens(tmp_path) == SpecialTokens("<s>", "<new>", (7,), None)


def test_a_folder_and_its_file_are_the_same_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    assert tokenizer_file(tmp_path) == tokenizer_file(file) == file
