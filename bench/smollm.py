"""SmolLM2-135M's own tokenizer and chat template as a Hugging Face folder, from the default model's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from modelyard.library import default_model
from modelyard.library.cache_dir import cache_dir
from modelyard.library.gguf import read_metadata

_CONTROL = 3  # GGUF's token type of a special token


def tokenizer_folder() -> Path:
    """tokenizer.json and tokenizer_config.json, made once."""
    folder = cache_dir() / "bench" / "smollm2-135m"
    if not (folder / "tokenizer_config.json").exists():
        with default_model.fetch().open("rb") as file:
            write_folder(folder, read_metadata(file))
    return folder


def write_folder(folder: Path, metadata: dict[str, Any]) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "add_bos_token": metadata["tokenizer.ggml.add_bos_token"],
        "chat_template": metadata["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE; GGUF names the pre-tokenizer "smollm": every digit alone, then GPT-2's words."""
    if (pre := metadata["tokenizer.ggml.pre"]) != "smollm":
        raise ValueError(f"a pre-tokenizer {pre!r}, where 'smollm' was expected")
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer
