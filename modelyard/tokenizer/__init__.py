"""Token ids of text and text of token ids: tokenizers, the token cache, streaming detokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from modelyard.core.tokenizer import Tokenizer
from modelyard.plugins import MissingLibrary


class FileTokenizer(Tokenizer, Protocol):
    """A vocabulary as files bring it: with the texts that templates ask for, and the template where there is one."""

    @property
    def bos_token(self) -> str: ...
    @property
    def eos_token(self) -> str: ...
    @property
    def template(self) -> str | None: ...


def open_tokenizer(path: Path) -> FileTokenizer:
    """From a GGUF file through llama.cpp, from everything else through `tokenizers`."""
    if path.suffix.lower() == ".gguf":
        return _through_llama(path)
    from modelyard.tokenizer.huggingface import HuggingFaceTokenizer

    return HuggingFaceTokenizer.load(path)


def _through_llama(path: Path) -> FileTokenizer:
    try:
        from modelyard.tokenizer.gguf import GgufTokenizer

        return GgufTokenizer(path)
    except ModuleNotFoundError as error:
        raise MissingLibrary(f"a GGUF file needs the Python package {error.name!r}: run make install") from error
