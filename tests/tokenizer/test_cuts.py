from __future__ import annotations

import json

import msgspec
import pytest

from modelyard.tokenizer.cuts import TokenizerFile, exact_cuts
from tests.tokenizer import tokenizers_made as made


def cuts(text: str) -> frozenset[str]:
    return exact_cuts(msgspec.json.decode(text, type=TokenizerFile))


def with_tokens(*contents: str) -> str:
    made_one = json.loads(made.byte_level())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    made_one["added_tokens"] = [{"id": n, "content": content} | flags for n, content in enumerate(contents)]
    return json.dumps(made_one)


def test_plain_control_tokens_may_be_cut_at() -> None:
    assert cuts(made.byte_level()) == {*made.CONTROLS, *made.MARKERS}


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "normalized", "single_word"])
def test_tokens_that_take_neighbours_along_may_not(flag: str) -> None:
    assert cuts(made.edited(made.byte_level(), **{flag: True})) == frozenset()


def test_a_token_inside_another_one_may_not() -> None:
    assert cuts(with_tokens("<a>", "<<a>>")) == {"<<a>>"}


def test_a_token_that_another_one_can_run_into_may_not() -> None:
    assert cuts(with_tokens("ab<x", "<xyz>")) == {"ab<x"}


def test_an_unknown_step_rules_all_cuts_out() -> None:
    text = json.loads(made.byte_level())
    text["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [text["pre_tokenizer"], {"type": "LooksAround"}]}
    assert cuts(json.dumps(text)) == frozenset()


def test_a_model_with_dropout_rules_all_cuts_out() -> None:
    text = json.loads(made.byte_level())
    text["model"]["dropout"] = 0.1
    assert cuts(json.dumps(text)) == frozenset()
