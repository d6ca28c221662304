"""Texts in their frame read as the whole prompt does, whatever they say; where that is not sure there is no frame."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.tokenizer.frame import holds_together
from modelyard.tokenizer.hf import HuggingFaceTokenizer
from modelyard.tokenizer.prefix import PrefixTokens
from modelyard.tokenizer.shield import Shield
from tests.tokenizer import tokenizers_made as made

VOCABS = {
    "byte level": HuggingFaceTokenizer.from_text(made.byte_level()),
    "byte level, prefix space": HuggingFaceTokenizer.from_text(made.byte_level(prefix_space=True)),
    "metaspace first": HuggingFaceTokenizer.from_text(made.metaspace("first")),
    "metaspace always": HuggingFaceTokenizer.from_text(made.metaspace("always")),
    "greedy neighbours": HuggingFaceTokenizer.from_text(made.edited(made.byte_level(), lstrip=True, rstrip=True)),
}
CUTS = ("<|im_start|>", "<|im_end|>")
CHATML = ("<|im_start|>system\n", "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
FIXED = {
    "chatml": CHATML,
    "words before the first cut": ("Once upon a time <|im_start|>", " <|im_end|> and <|im_start|>", "<|im_end|>"),
    "nothing beside a text": ("<|im_start|>", "<|im_end|>", ""),
    "two control tokens in a row": ("<|im_start|><|im_end|>", "\n<|im_end|><|im_start|>", " the end"),
}
TEXTS = st.lists(
    st.sampled_from(
        [
            *made.CONTROLS,
            *made.MARKERS,
            "<|im_",
            "end|>",
            "<",
            " ",
            "\n",
            "fox",
            ". It",
            ", so",
            ".  ",
            "é",
            "👋🏽",
            "\ufdd0",
        ]
    )
    | st.text(max_size=5),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("name", VOCABS)
@pytest.mark.parametrize("fixed", FIXED.values(), ids=FIXED)
def test_a_frame_gives_the_ids_of_the_whole_prompt(name: str, fixed: tuple[str, ...]) -> None:
    vocab = VOCABS[name]
    shield = Shield(vocab.specials)
    tokens, whole = (PrefixTokens(vocab, vocab.cuts.intersection(CUTS), limit_bytes=20_000) for _ in range(2))
    frame = tokens.frame(fixed, [(1, False), (0, True)])
    assert (frame is None) == (not tokens.cuts)
    if frame is None:
        return

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(TEXTS, TEXTS)
    def holds(one: str, other: str) -> None:
        texts = [shield(one), shield(other)]
        wanted = whole.encode(fixed[0] + texts[1] + fixed[1] + texts[0] + fixed[2])
        assert frame.encode(texts) == wanted
        assert frame.encode(texts) == wanted  # from memory, too

    holds()


@pytest.mark.parametrize(
    ("fixed", "texts"),
    [
        (("<|im_start|>", " and ", "<|im_end|>"), 2),
        (("Once ", "<|im_end|>"), 1),
        (("", "<|im_end|>"), 1),
        (("<|im_start|>",), 0),
        (("<|im_start|>user<|im_", "<|im_end|>"), 1),
        (("<|im_start|>user", "end|>"), 1),
        (("<|im_start|>user<", ">"), 1),
    ],
)
def test_there_is_no_frame_where_texts_might_meet_or_make_a_control_token(fixed: tuple[str, ...], texts: int) -> None:
    tokens = PrefixTokens(VOCABS["byte level"], CUTS)
    assert tokens.frame(fixed, [(at, False) for at in range(texts)]) is None


@pytest.mark.parametrize(
    ("fixed", "cuts", "holds"),
    [
        (("a<x>b", "c<x>d"), ("<x>",), True),
        (("a<x>b<", "c<x>d"), ("<x>",), False),
        (("a<x>b", ">c<x>d"), ("<x>",), False),
        (("a<x>b", "c<x>d<"), ("<x>",), True),
        ((">a<x>b", "c<x>d"), ("<x>",), True),
        (("a<x>b", "c<x>d", "e"), ("<x>", "1<x>2"), False),
        (("", ""), (), True),
    ],
)
def test_words_hold_together_unless_a_text_may_complete_a_cut(
    fixed: tuple[str, ...], cuts: tuple[str, ...], holds: bool
) -> None:
    assert holds_together(fixed, cuts) is holds


def test_what_people_say_is_kept_when_it_comes_again() -> None:
    tokens = PrefixTokens(VOCABS["byte level"], CUTS)
    frame = tokens.frame(CHATML, [(0, False), (1, False)])
    assert frame is not None
    said = "Order 17 came today, and one lamp is dark. What now?"
    prompt = CHATML[0] + "Be brief." + CHATML[1] + said + CHATML[2]
    frame.encode(["Be brief.", said])
    assert tokens.fresh(prompt) == len(f"user\n{said}")
    frame.encode(["Be brief.", said])
    assert tokens.fresh(prompt) == 0


def test_what_a_model_may_have_said_is_kept_at_once() -> None:
    tokens = PrefixTokens(VOCABS["byte level"], CUTS)
    frame = tokens.frame(CHATML, [(0, False), (1, True)])
    assert frame is not None
    said = "Order 18 came today, and one lamp is dark. What now?"
    frame.encode(["Be brief.", said])
    assert tokens.fresh(CHATML[0] + "Be brief." + CHATML[1] + said + CHATML[2]) == 0
