"""Text to token ids and back: tokenizers, the token cache, streaming detokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from modelyard.core.tokenizer import Tokenizer


class FileTokenizer(Tokenizer, Protocol):
    """A tokenizer read from files, with the token texts that templates use, and a chat template if the file has one."""

    @property
    def bos_token(self) -> str: ...
    @property
    def eos_token(self) -> str: ...
    @property
    def template(self) -> str | None: ...
    def named_template(self, name: str | None) -> str | None: ...


def open_tokenizer(path: Path) -> FileTokenizer:
    """Through llama.cpp for a GGUF file, through `tokenizers` for everything else."""
    if path.suffix.lower() == ".gguf":
        from modelyard.tokenizer.gguf import GgufTokenizer

        return GgufTokenizer(path)
    from modelyard.tokenizer.huggingface import HuggingFaceTokenizer

    return HuggingFaceTokenizer.load(path)
