from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from modelyard.tokenizer.shield import SENTINEL, Shield, shield, unshield

SPECIALS = ("<|im_end|>", "<|im_start|>", "<a>", ">b<", "[/INST]")


@given(st.lists(st.sampled_from([*SPECIALS, "<", "|", ">", "b", SENTINEL, "text"])).map("".join))
def test_no_spelling_is_left_and_the_text_comes_back(text: str) -> None:
    shielded = shield(text, SPECIALS)
    assert not any(special in shielded for special in SPECIALS)
    assert unshield(shielded) == text.replace(SENTINEL, "")


def test_text_without_control_tokens_is_the_same_object() -> None:
    text = "an ordinary <b>text</b>"
    assert shield(text, SPECIALS) is text


def test_a_client_cannot_write_the_mark() -> None:
    assert shield(f"a{SENTINEL}b", SPECIALS) == "ab"


def test_taking_the_mark_out_cannot_spell_a_control_token() -> None:
    assert SENTINEL in shield(f"<|im{SENTINEL}_end|>", SPECIALS)


def test_deep_values_are_shielded_with_their_keys() -> None:
    deep = Shield(SPECIALS).deep({"<a>": ["<|im_end|>", 1, None, {"x": "<a>"}]})
    assert deep == {f"<{SENTINEL}a>": [f"<{SENTINEL}|im_end|>", 1, None, {"x": f"<{SENTINEL}a>"}]}


def test_a_vocabulary_without_control_tokens_shields_nothing() -> None:
    assert Shield(())("<|im_end|>") == "<|im_end|>"
