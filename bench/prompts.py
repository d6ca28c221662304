"""Prompts with an exact number of tokens that no cache has seen, and the tokenizer of SmolLM2-135M that counts them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from jinja2 import Template
from tokenizers import Tokenizer

from modelyard.library import default_model
from modelyard.library.cache_dir import cache_dir
from modelyard.library.gguf import read_metadata
from modelyard_convert.writers import tokenizer_files

# SmolLM2's tokens that end a text or a turn. A bias against them gives every output the requested length.
NO_END = {0: -100.0, 2: -100.0}


class RandomPrompts:
    """Random words, each of them one token."""

    def __init__(self, folder: Path, seed: int = 1) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        self._template = Template(config["chat_template"])
        # With the space before them; ids in the middle of the vocabulary are neither bytes nor rare words.
        texts = (self._tokenizer.decode([id]) for id in range(1000, 30_000))
        self._words = [word for word in texts if word[:1] == " " and word[1:].isalpha() and word.isascii()]
        self._rng = random.Random(seed)
        self._overhead = self.count([_message("system", ""), _message("user", "")])

    def messages(self, tokens: int) -> list[dict[str, str]]:
        """A system message of a few words, so that no prefix is shared, and a user message with all the others."""
        system = _message("system", self._text(min(6, max(1, (tokens - self._overhead) // 3))))
        user = self._text(tokens - self.count([system, _message("user", "")]))
        return [system, _message("user", user)]

    def count(self, messages: list[dict[str, str]]) -> int:
        text = self._template.render(messages=messages, add_generation_prompt=True)
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _text(self, tokens: int) -> str:
        return "".join(self._rng.choices(self._words, k=max(1, tokens)))


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


# --- SmolLM2's tokenizer ----------------------------------------------------------------------------------------------


def tokenizer_folder() -> Path:
    """SmolLM2's tokenizer and chat template as a Hugging Face folder, made once from the default model's file."""
    folder = cache_dir() / "bench" / "smollm2-135m"
    if not (folder / "tokenizer_config.json").exists():
        with default_model.fetch().open("rb") as file:
            write_tokenizer(folder, read_metadata(file))
    return folder


def write_tokenizer(folder: Path, metadata: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer_files(metadata, context=8192):
        (folder / name).write_bytes(content)
