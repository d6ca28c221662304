"""Text to token ids and back: tokenizers, the token cache, streaming detokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from modelyard.core.tokenizer import Tokenizer
from modelyard.plugins import MissingLibrary


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
        return _open_gguf(path)
    from modelyard.tokenizer.huggingface import HuggingFaceTokenizer

    return HuggingFaceTokenizer.load(path)


def _open_gguf(path: Path) -> FileTokenizer:
    try:
        from modelyard.tokenizer.gguf import GgufTokenizer

        return GgufTokenizer(path)
    except ModuleNotFoundError as error:
        raise MissingLibrary(f"a GGUF file needs the Python package {error.name!r}: run make install") from error
