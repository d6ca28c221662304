"""A small real tokenizer."""

from __future__ import annotations

import pytest

from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.tokenizer import tokenizers_made as made


@pytest.fixture(scope="session")
def vocab() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.from_text(made.byte_level())
