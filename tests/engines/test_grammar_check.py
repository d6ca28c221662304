"""A grammar is translated and compiled in a child process, which is killed if that takes too long."""

from __future__ import annotations

import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.engines.grammar_check import compile_with_bytes, translate, translated
from modelyard.processes.sandbox import Stopped, pool

_SLOW = '{"type": "integer", "multipleOf": 9999991}'  # minutes, on any machine


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_object", ""),
        ("json_schema", '{"type": "integer"}'),
        ("gbnf", 'root ::= "a" | [0-9]+'),
        ("regex", "[a-z]+"),
        ("lark", 'start: <[151657]> <|im_start|> "a"\n'),
    ],
)
def test_a_grammar_is_translated_as_in_the_servers_process(kind: str, text: str) -> None:
    assert pool.call(translate, kind, text) == translated(kind, text)


def test_a_grammar_that_cannot_be_translated_has_a_reason() -> None:
    with pytest.raises(InvalidRequest, match="No 'root' rule"):
        pool.call(translate, "gbnf", 'other ::= "a"')


def test_control_tokens_and_ids_of_a_real_vocabulary_are_no_obstacle() -> None:
    compile_with_bytes(translated("lark", "start: <[151657]> <|im_start|> <[^100-200000]>\n"))


def test_a_slow_grammar_ends_its_child_and_the_next_grammar_gets_a_new_one() -> None:
    with pytest.raises(Stopped, match=r"more than 5 s of CPU time|longer than 20 s"):
        pool.call(translate, "json_schema", _SLOW)
    assert pool.call(translate, "regex", "a")
