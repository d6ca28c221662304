"""Compiled constraints: remembered, handed out fresh, and made on a thread that is nobody else's."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from llguidance import LLTokenizer

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint
from modelyard.engines import fake
from modelyard.engines.grammars import Grammars

DIGIT = Constraint("regex", "[0-9]")


def tokenizer() -> LLTokenizer:
    return LLTokenizer((fake.tokenizer_path(fake.Options()) / "tokenizer.json").read_text(), eos_token=2)


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(tokenizer)
    yield made
    made.close()


def test_matcher_is_fresh_each_time_though_its_grammar_is_compiled_once() -> None:
    asked: list[int] = []

    def counted() -> LLTokenizer:
        asked.append(1)
        return tokenizer()

    grammars = Grammars(counted)
    seven = tokenizer().tokenize_str("7")
    for _ in range(2):
        matcher = grammars.matcher(DIGIT)
        assert matcher.consume_tokens(seven)
        assert matcher.is_stopped()
    assert asked == [1]


def test_grammars_are_compiled_on_a_thread_of_their_own(grammars: Grammars) -> None:
    here = grammars.submit(threading.get_ident).result(60)
    assert here == grammars.submit(threading.get_ident).result(60) != threading.get_ident()


def test_what_cannot_be_compiled_names_the_field(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match="the regex cannot be compiled") as caught:
        grammars.submit(lambda: grammars.matcher(Constraint("regex", "(a"))).result(60)
    assert (caught.value.code, caught.value.param) == ("bad_grammar", "regex")


def test_one_that_was_never_used_closes() -> None:
    Grammars(tokenizer).close()
