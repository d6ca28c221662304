"""The word cache gives exactly the ids of the library on every ASCII text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from modelyard.tokenizer.shield import TokenSpellings
from modelyard.tokenizer.word_cache import MAX_TEXT, WordCache
from tests.tokenizer import sample_tokenizers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ASCII = st.text(st.characters(max_codepoint=127), max_size=60)
WORDS = st.lists(
    st.sampled_from(
        ["The", " quick", "  ", "\n\n", " \n", "12", " 345", "'s", "'LL", "(", ") {", "\t", "\x0b", "\x1c", "X9", "_"]
    ),
    max_size=20,
).map("".join)


def split(pattern: str) -> dict[str, Any]:
    piece = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    after = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [piece, after]}


def vocabulary(pre_tokenizer: dict[str, Any] | None = None) -> HuggingFaceTokenizer:
    text = json.loads(sample_tokenizers.byte_level())
    if pre_tokenizer is not None:
        text["pre_tokenizer"] = pre_tokenizer
    return HuggingFaceTokenizer.from_text(json.dumps(text))


DIGITS_APART = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
VOCABULARIES = {
    "byte level": vocabulary(),
    "digits apart": vocabulary(DIGITS_APART),
    "llama 3": vocabulary(split(LLAMA3)),
    "qwen 2": vocabulary(split(QWEN2)),
    "gpt-4o": vocabulary(split(GPT4O)),
}


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=150, deadline=None)
@given(text=ASCII | WORDS)
@example(text="a 12 b")
@example(text="x  \n  y\r\n 7 ")
def test_cached_words_give_the_ids_of_the_library(name: str, text: str) -> None:
    vocab = VOCABULARIES[name]
    assert vocab.words is not None
    found = vocab.words.encode(text)
    assert found is None or found == vocab._encode(text)


CLAUSES = st.lists(
    st.sampled_from(
        [
            "The lamp",
            "a",
            "7",
            "'s",
            "it's, ",
            ". ",
            ", ",
            ".  ",
            ",\n",
            ". \n",
            " .",
            ".\x1c ",
            "(x). ",
            "\0",
            "\n\n",
            ".",
        ]
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=150, deadline=None)
@given(text=CLAUSES)
@example(text="One. Two,  three. ")
@example(text="One. \nTwo, \tthree.")
def test_clauses_cached_in_another_context_give_the_same_ids(name: str, text: str) -> None:
    vocab = VOCABULARIES[name]
    assert vocab.words is not None
    for requested in (text, f"Before, {text}", f"{text} behind. It"):
        found = vocab.words.encode(requested)
        assert found is None or found == vocab._encode(requested)


def counted(vocab: HuggingFaceTokenizer) -> tuple[WordCache, list[str]]:
    """An empty word cache, and the texts that it passes to the library."""
    assert vocab.words is not None
    requested: list[str] = []

    def encode(new: list[str]) -> list[list[int]]:
        requested.extend(new)
        return [vocab._encode(word) for word in new]

    pattern: re.Pattern[str] = vocab.words._find.__self__
    return WordCache(pattern, TokenSpellings(()), encode), requested


@pytest.mark.parametrize("name", VOCABULARIES)
def test_only_new_words_are_passed_to_the_library(name: str) -> None:
    vocab = VOCABULARIES[name]
    words, requested = counted(vocab)
    first, second = ("Order 1 came, and one lamp is dark.", "Order 2 came, and one lamp is dark.")
    assert words.encode(first) == vocab._encode(first)
    requested.clear()
    assert words.encode(second) == vocab._encode(second)
    assert "".join(requested).strip() == "2"


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ordinary_prose_is_encoded_word_by_word(name: str) -> None:
    vocab = VOCABULARIES[name]
    assert vocab.words is not None
    assert vocab.words.encode("The quick brown fox, aged 12, doesn't jump.\n\nIt sleeps.") is not None


@pytest.mark.parametrize("text", ["naïve", "<|im_end|>", "a <think> b", "x" * (MAX_TEXT + 1)])
def test_uncertain_texts_are_left_to_the_library(text: str) -> None:
    vocab = VOCABULARIES["byte level"]
    assert vocab.words is not None
    assert vocab.words.encode(text) is None
    assert vocab.encode(text) == vocab._encode(text)


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        split(r"\p{Han}+|\s+"),
        split(r"[\p{L}&&[a-c]]+"),
        {"type": "Sequence", "pretokenizers": [split("a")["pretokenizers"][0]] * 2 + [split("a")["pretokenizers"][1]]},
    ],
)
def test_an_unknown_pattern_is_not_translated(pre_tokenizer: dict[str, Any]) -> None:
    try:
        vocab = vocabulary(pre_tokenizer)
    except Exception:  # the library may refuse it, too
        return
    assert vocab.words is None


def test_other_tokenizers_have_no_word_cache() -> None:
    assert HuggingFaceTokenizer.from_text(sample_tokenizers.metaspace("first")).words is None


@pytest.mark.parametrize(
    ("pattern", "breaks"),
    [(LLAMA3, True), (QWEN2, True), (GPT4O, False), (r"\s+\p{N}", False), (r"\p{L}+ \p{L}+|\s+", False)],
)
def test_text_is_cut_at_spaces_only_for_patterns_that_break_there(pattern: str, breaks: bool) -> None:
    words = vocabulary(split(pattern)).words
    assert (words is not None and words._breaks_at_spaces) is breaks


@pytest.mark.parametrize("name", VOCABULARIES)
@pytest.mark.parametrize(
    "text", ["one two", "one  two", "one   two", "one\n two", " one two ", "one \t two\n\n one two 12"]
)
def test_runs_that_are_cached_do_not_change_how_white_space_is_split(name: str, text: str) -> None:
    vocab = VOCABULARIES[name]
    assert vocab.words is not None
    vocab.words.encode("one two")
    assert vocab.words.encode(text) == vocab._encode(text) == vocab.words.encode(text)
