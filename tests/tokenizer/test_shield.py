"""Shielding control tokens in user text."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from modelyard.tokenizer.shield import SENTINEL, Shield, TokenSpellings, shield, spelling_pattern, unshield

SPECIALS = ("<|im_end|>", "<|im_start|>", "<a>", ">b<", "[/INST]")


@given(st.lists(st.sampled_from([*SPECIALS, "<", "|", ">", "b", SENTINEL, "text"])).map("".join))
def test_shielded_text_contains_no_control_token_and_round_trips(text: str) -> None:
    shielded = shield(text, SPECIALS)
    assert not any(special in shielded for special in SPECIALS)
    assert unshield(shielded) == text.replace(SENTINEL, "")


def test_text_without_control_tokens_is_the_same_object() -> None:
    text = "an ordinary <b>text</b>"
    assert shield(text, SPECIALS) is text


def test_a_client_cannot_send_the_shield_mark() -> None:
    assert shield(f"a{SENTINEL}b", SPECIALS) == "ab"


def test_removing_the_mark_cannot_create_a_control_token() -> None:
    assert SENTINEL in shield(f"<|im{SENTINEL}_end|>", SPECIALS)


def test_nested_values_are_shielded_with_their_keys() -> None:
    deep = Shield(SPECIALS).deep({"<a>": ["<|im_end|>", 1, None, {"x": "<a>"}]})
    assert deep == {f"<{SENTINEL}a>": [f"<{SENTINEL}|im_end|>", 1, None, {"x": f"<{SENTINEL}a>"}]}


def test_a_vocabulary_without_control_tokens_shields_nothing() -> None:
    assert Shield(())("<|im_end|>") == "<|im_end|>"


WORDS = st.text(alphabet="<ab|>.", min_size=1, max_size=5)


@given(st.lists(WORDS, min_size=1, max_size=6), st.text(alphabet="<ab|>.", max_size=30))
def test_the_pattern_matches_like_a_longest_first_alternation(words: list[str], text: str) -> None:
    pattern = spelling_pattern(words)
    plain = re.compile("|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))
    assert pattern is not None
    assert pattern.findall(text) == plain.findall(text)


def test_no_control_tokens_give_no_pattern() -> None:
    assert spelling_pattern([]) is None


def test_thousands_of_long_control_tokens_compile() -> None:
    pattern = spelling_pattern([f"<unused{n}>" for n in range(5000)] + ["x" * 3000])
    assert pattern is not None
    assert pattern.findall("a<unused42><unused4x>") == ["<unused42>"]


@given(st.lists(WORDS, max_size=6), st.text(alphabet="<ab|>.", max_size=30))
def test_contains_a_control_token(words: list[str], text: str) -> None:
    assert TokenSpellings(words).found_in(text) == any(word in text for word in words)


def test_many_first_characters_are_left_to_the_pattern() -> None:
    spellings = TokenSpellings(["<a>", "[b]", "(c)", "{d}", "|e|", "/f/"])
    assert spellings.found_in("x /f/")
    assert not spellings.found_in("x /f and |e")
