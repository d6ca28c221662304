"""The tokenizers of `sample_tokenizers`, created once."""

from __future__ import annotations

import pytest

from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.tokenizer import tokenizers_made as made


@pytest.fixture(scope="session")
def byte_vocab() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.from_text(made.byte_level())


@pytest.fixture(scope="session")
def piece_vocab() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.from_text(made.metaspace("first"))


@pytest.fixture(scope="session")
def word_vocab() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.from_text(made.word_piece())
