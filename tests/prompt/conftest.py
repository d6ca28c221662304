"""A small real tokenizer."""

from __future__ import annotations

import pytest

from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.tokenizer import sample_tokenizers


@pytest.fixture(scope="session")
def vocab() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer.from_text(sample_tokenizers.byte_level())
