"""The tokenizers of `sample_tokenizers`, created once."""

from __future__ import annotations

import pytest

from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.tokenizer import sample_tokenizers


@pytest.fixture(scope="session")
def byte_vocab() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.from_text(sample_tokenizers.byte_level())


@pytest.fixture(scope="session")
def piece_vocab() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.from_text(sample_tokenizers.metaspace("first"))


@pytest.fixture(scope="session")
def word_vocab() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.from_text(sample_tokenizers.word_piece())
