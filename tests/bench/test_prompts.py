"""Prompts have the length they are asked for and share nothing."""

from __future__ import annotations

import pytest

from bench.prompts import Prompts
from bench.smollm import tokenizer_folder


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return Prompts(tokenizer_folder())


@pytest.mark.parametrize("tokens", [32, 128, 512])
def test_a_prompt_has_the_tokens_it_should(prompts: Prompts, tokens: int):
    assert abs(prompts._length(prompts.unlike_any(tokens)) - tokens) <= 2


def test_no_two_prompts_begin_alike(prompts: Prompts):
    systems = {prompts.unlike_any(64)[0]["content"] for _ in range(50)}
    assert len(systems) == 50
