from __future__ import annotations

import pytest

from modelyard.tokenizer.hf import HuggingFaceTokenizer
from tests.tokenizer import tokenizers_made as made


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_text_in_the_middle_reads_as_it_does_behind_a_control_token(scheme: str) -> None:
    vocab = HuggingFaceTokenizer.from_text(made.metaspace(scheme))
    for text in ("fox", " fox", "  fox dog", "é👋"):
        assert vocab.encode_plain_inside(text) == vocab.encode("<|im_end|>" + text)[1:]


def test_a_model_with_control_tokens_among_its_words_gets_the_spelling_in_pieces() -> None:
    vocab = HuggingFaceTokenizer.from_text(made.unigram())
    ids = vocab.encode_plain("abc</s></s>")
    assert vocab.specials["</s>"] not in ids
    assert vocab.decode(ids).replace(" ", "") == "abc</s></s>"


def test_nothing_is_no_tokens() -> None:
    vocab = HuggingFaceTokenizer.from_text(made.metaspace("always"))
    assert vocab.encode_plain("") == vocab.encode_plain_inside("") == []
