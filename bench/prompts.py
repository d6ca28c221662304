"""Prompts of an exact number of tokens that no server has seen before: words by chance, each of them one token."""

from __future__ import annotations

import json
import random
from pathlib import Path

from jinja2 import Template
from tokenizers import Tokenizer


class Prompts:
    def __init__(self, folder: Path, seed: int = 1) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        told = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        self._template = Template(told["chat_template"])
        self._words = _plain_words(self._tokenizer)
        self._dice = random.Random(seed)
        self._around = self._length([_system(""), _user("")])

    def unlike_any(self, tokens: int) -> list[dict[str, str]]:
        """A system message of half a dozen words and a user's of all the others."""
        system = self.text(min(6, max(1, (tokens - self._around) // 3)))
        user = self.text(tokens - self._length([_system(system), _user("")]))
        return [_system(system), _user(user)]

    def text(self, tokens: int) -> str:
        return "".join(self._dice.choices(self._words, k=max(1, tokens)))

    def _length(self, messages: list[dict[str, str]]) -> int:
        text = self._template.render(messages=messages, add_generation_prompt=True)
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _plain_words(tokenizer: Tokenizer) -> list[str]:
    """With the blank before them; ids in the middle of the vocabulary are neither bytes nor rarities."""
    spelled = (tokenizer.decode([id]) for id in range(1000, 30_000))
    return [word for word in spelled if word[:1] == " " and word[1:].isalpha() and word.isascii()]
