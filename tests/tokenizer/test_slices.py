"""Long texts in slices: they tokenize as the whole does, and the work can be stopped between two of them."""

from __future__ import annotations

from random import Random

import pytest

from modelyard.tokenizer import slices
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from modelyard.tokenizer.prefix_cache import TokenCache
from modelyard.tokenizer.shield import SENTINEL
from tests.tokenizer import sample_tokenizers
from tests.tokenizer.test_prefix_cache import VOCABS

_WORDS = ("fox", " the", "\n", " jumps", ".", "\n\n", " over", "é", " 42", "  ", "(", ")", "ing", "漢字", " The", "X")


def _text(length: int, seed: int = 1) -> str:
    random = Random(seed)
    return "".join(random.choice(_WORDS) for _ in range(length))


class Stop(Exception):
    pass


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of a few words, so that a test has many."""
    monkeypatch.setattr(slices, "MAX_SLICE", 40)
    monkeypatch.setattr("modelyard.tokenizer.prefix_cache.MAX_SLICE", 40)
    monkeypatch.setattr(slices, "_MIN_SLICE", 20)
    monkeypatch.setattr(slices, "EXACT_CHARS", 200)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("vocabulary", list(VOCABS))
def test_a_long_text_has_the_same_tokens_with_and_without_slices(vocabulary: str) -> None:
    tokenizer = VOCABS[vocabulary]
    for seed in range(30):
        text = _text(120, seed) + "<|im_start|>" + _text(60, seed + 1)
        expected = TokenCache(tokenizer, tokenizer.cuts).encode(text)
        assert TokenCache(tokenizer, tokenizer.cuts).encode(text, lambda *_: None) == expected
        assert slices.encode_long(tokenizer, text, lambda *_: None) == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("vocabulary", "expected"),
    [("byte level", True), ("stripping normalizer", False), ("greedy neighbours", False), ("legacy llama", False)],
)
def test_only_an_exact_tokenizer_is_given_slices(vocabulary: str, expected: bool) -> None:
    assert slices.can_slice(VOCABS[vocabulary]) is expected


def test_a_token_that_spans_two_words_rules_out_slices() -> None:
    assert slices.spans_words(["of", "ofĠthe"])
    assert slices.spans_words(["of▁"])
    assert not slices.spans_words(["Ġof", "▁the", "Ċ", ".Ċ"])


def test_slices_end_between_words_and_are_the_text_together() -> None:
    text = "one word after another " * 10_000
    parts = list(slices.slices(text))
    assert "".join(parts) == text
    assert len(parts) > 5
    assert all(len(part) <= slices.MAX_SLICE and part[0] == " " for part in parts[1:])
    assert list(slices.slices("x" * 100_000)) == ["x" * 100_000]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("text", ["word after word " * 500, "x" * 8000, SENTINEL + "word after word " * 500])
def test_the_work_stops_between_two_slices(text: str) -> None:
    tokenizer = HuggingFaceTokenizer.from_text(sample_tokenizers.byte_level())
    calls: list[tuple[int, int]] = []

    def on_progress(tokens: int, chars: int) -> None:
        calls.append((tokens, chars))
        if tokens > 10:
            raise Stop

    for encode in (TokenCache(tokenizer, tokenizer.cuts).encode, lambda *a: slices.encode_long(tokenizer, *a)):
        calls.clear()
        with pytest.raises(Stop):
            encode(text, on_progress)
        assert calls[-1][1] < len(text) / 4
