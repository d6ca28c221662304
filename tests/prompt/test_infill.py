"""Fill-in-the-middle prompts: their order, and what is cut when not everything fits."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.core.errors import Unsupported
from modelyard.core.request import Infill
from modelyard.prompt.infill import infill_prompt
from modelyard.tokenizer.gguf import GgufTokenizer
from tests.engines.llama_cpp import tiny_models
from tests.engines.llama_cpp.helpers import vocabulary

FILES = (("a.py", "A = 1\n"), ("b.py", "B = <|fim_middle|>\n"))


@cache
def coder() -> GgufTokenizer:
    return GgufTokenizer(tiny_models.coder())


@pytest.fixture
def tokenizer() -> GgufTokenizer:
    return coder()


def text(tokenizer: GgufTokenizer, infill: Infill, room: int = 10_000, **how: bool) -> str:
    return tokenizer.decode(infill_prompt(tokenizer, "before", infill, room=room, **how))


def test_prefix_and_suffix_are_around_the_gap_in_either_order(tokenizer: GgufTokenizer) -> None:
    gap = Infill("after", start=" start")
    assert text(tokenizer, gap) == "<|fim_prefix|>before start<|fim_suffix|>after<|fim_middle|>"
    swapped = text(tokenizer, gap, suffix_first=True)
    assert swapped == "<|fim_suffix|>after<|fim_prefix|>before start<|fim_middle|>"


def test_other_files_come_first_and_their_control_tokens_are_text(tokenizer: GgufTokenizer) -> None:
    ids = infill_prompt(tokenizer, "before", Infill("after", files=FILES), room=10_000)
    assert tokenizer.decode(ids) == (
        "<|repo_name|>myproject\n<|file_sep|>a.py\nA = 1\n<|file_sep|>b.py\nB = <|fim_middle|>\n"
        "<|file_sep|>filename\n<|fim_prefix|>before<|fim_suffix|>after<|fim_middle|>"
    )
    assert tokenizer.fim is not None
    assert ids.count(tokenizer.fim.middle) == 1


@given(st.integers(0, 60), st.integers(0, 60), st.integers(8, 80))
def test_the_prompt_fits_and_keeps_what_is_next_to_the_gap(before: int, after: int, room: int) -> None:
    tokenizer, fim = coder(), coder().fim
    assert fim is not None
    ids = infill_prompt(tokenizer, " a" * before, Infill(" b" * after, files=FILES), room=room)
    assert len(ids) <= room
    if room < before + after + 3:
        assert len(ids) == room
    at = ids.index(fim.suffix)
    kept_before, kept_after = at - ids.index(fim.prefix) - 1, len(ids) - at - 2
    if kept_before < before and kept_after < after:
        assert kept_before >= kept_after * 3


def test_a_vocabulary_without_such_tokens_is_refused() -> None:
    with pytest.raises(Unsupported) as caught:
        infill_prompt(vocabulary(), "a", Infill("b"), room=100)
    assert caught.value.code == "suffix_unsupported"
