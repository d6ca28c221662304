"""Compiled constraints: cached, returned as new matchers, and compiled on a separate thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from llguidance import LLTokenizer

import modelyard_fake as fake
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Constraint
from modelyard.engines.grammars import Grammars

DIGIT = Constraint("regex", "[0-9]")


def tokenizer() -> LLTokenizer:
    return LLTokenizer((fake.tokenizer_path(fake.Options()) / "tokenizer.json").read_text(), eos_token=2)


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    grammars = Grammars(tokenizer)
    yield grammars
    grammars.close()


def test_each_matcher_is_new_and_its_grammar_is_compiled_once() -> None:
    loads: list[int] = []

    def counted() -> LLTokenizer:
        loads.append(1)
        return tokenizer()

    grammars = Grammars(counted)
    seven = tokenizer().tokenize_str("7")
    for _ in range(2):
        matcher = grammars.matcher(DIGIT)
        assert matcher.consume_tokens(seven)
        assert matcher.is_stopped()
    assert loads == [1]
    grammars.close()


def test_grammars_are_compiled_on_a_separate_thread(grammars: Grammars) -> None:
    compiler = grammars.submit(threading.get_ident).result(60)
    assert compiler == grammars.submit(threading.get_ident).result(60) != threading.get_ident()


def test_bad_grammar_names_the_field_of_the_request(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match="the regex cannot be compiled") as caught:
        grammars.submit(lambda: grammars.matcher(Constraint("regex", "(a"))).result(60)
    assert (caught.value.code, caught.value.param) == ("bad_grammar", "regex")


def test_a_grammar_that_takes_too_long_is_refused_once_and_for_all(grammars: Grammars) -> None:
    slow = Constraint("json_schema", '{"type": "integer", "multipleOf": 9999991}')
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"it takes .*; use a simpler one") as caught:
            grammars.matcher(slow)
        assert (caught.value.code, caught.value.param) == ("bad_grammar", "response_format")
    assert len(grammars._compiled) == 1


def test_unused_grammars_can_be_closed() -> None:
    Grammars(tokenizer).close()
