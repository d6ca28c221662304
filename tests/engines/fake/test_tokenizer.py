"""The shipped tokenizer."""

from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.engines.fake import Options, tokenizer_path
from tests.engines.fake.stage import vocabulary

SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"),
)


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(text: str) -> None:
    assert vocabulary().decode(vocabulary().encode_plain(text)) == text


def test_markers_are_one_token_each() -> None:
    assert set(SPECIALS) <= vocabulary().specials.keys()
    assert all(len(vocabulary().encode(text)) == 1 for text in SPECIALS)


def test_a_turn_ends_with_im_end() -> None:
    assert vocabulary().specials["<|im_end|>"] in vocabulary().eos


def test_english_costs_few_tokens() -> None:
    text = "The quick answer is that this function returns the number of items in the list."
    assert len(vocabulary().encode(text)) < len(text) / 3


def test_file_is_small() -> None:
    folder = tokenizer_path(Options())
    assert sum(path.stat().st_size for path in folder.iterdir()) < 300_000
