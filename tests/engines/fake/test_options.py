"""The fake engine as a plug-in: its options and its tokenizer."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import modelyard_fake as fake
from modelyard import plugins
from modelyard.core.engine import AvailableMemory
from tests.engines.fake.helpers import spec, tokenizer

SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"),
)


def test_fake_is_a_backend_and_shared_modules_are_not() -> None:
    assert "fake" in plugins.names("engines")
    assert not {"generation_queue", "managed", "upstream"} & set(plugins.names("engines"))
    assert plugins.load("engines", "fake") is fake.ENGINE


def test_kind_follows_the_options() -> None:
    assert fake.ENGINE.kind_of(fake.Options()) == "text"
    assert fake.ENGINE.kind_of(fake.Options(kind="chat")) == "chat"


def test_estimate_grows_with_the_caches() -> None:
    memory = AvailableMemory(ram_free=0)
    small, large = (fake.estimate(spec(window=window), memory) for window in (1000, 2000))
    assert 0 < small.total < large.total
    assert small.weights == 0


def test_unknown_option_is_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        fake.Options.model_validate({"tokens_delay": 1})


def test_only_the_demo_has_a_delay_by_default() -> None:
    assert fake.Options().delay > 0
    assert fake.Options(echo=True).delay == 0
    assert fake.Options(token_delay=0).delay == 0


def test_tokenizer_can_be_replaced() -> None:
    assert fake.tokenizer_path(fake.Options(tokenizer_path=Path("x"))) == Path("x")
    assert (fake.tokenizer_path(fake.Options()) / "tokenizer.json").is_file()


# --- the shipped tokenizer --------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(text: str) -> None:
    assert tokenizer().decode(tokenizer().encode_plain(text)) == text


def test_markers_are_one_token_each() -> None:
    assert set(SPECIALS) <= tokenizer().specials.keys()
    assert all(len(tokenizer().encode(text)) == 1 for text in SPECIALS)
    assert tokenizer().specials["<|im_end|>"] in tokenizer().eos


def test_english_costs_few_tokens_and_the_file_is_small() -> None:
    text = "The quick answer is that this function returns the number of items in the list."
    assert len(tokenizer().encode(text)) < len(text) / 3
    assert sum(path.stat().st_size for path in fake.tokenizer_path(fake.Options()).iterdir()) < 300_000
