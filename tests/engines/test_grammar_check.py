"""A grammar is translated and compiled in a child process, which is killed if that takes too long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from modelyard.engines.grammar_check import BadGrammar, GrammarChecker, TooExpensive, compile_with_bytes, translated

_SLOW = '{"type": "integer", "multipleOf": 999983}'  # half a minute


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker(wall_s=60)
    yield checker
    checker.close()


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
def test_a_grammar_is_translated_as_in_the_servers_process(checker: GrammarChecker, kind: str, text: str) -> None:
    assert checker.translate(kind, text) == translated(kind, text)


def test_a_grammar_that_cannot_be_translated_has_a_reason(checker: GrammarChecker) -> None:
    with pytest.raises(BadGrammar, match="No 'root' rule"):
        checker.translate("gbnf", 'other ::= "a"')


def test_control_tokens_and_ids_of_a_real_vocabulary_are_no_obstacle() -> None:
    compile_with_bytes(translated("lark", "start: <[151657]> <|im_start|> <[^100-200000]>\n"))


def test_a_slow_grammar_ends_its_child_and_the_next_grammar_gets_a_new_one() -> None:
    checker = GrammarChecker(wall_s=0.5)
    with pytest.raises(TooExpensive, match=r"longer than 0\.5 s"):
        checker.translate("json_schema", _SLOW)
    assert checker._child is None
    checker._wall_s = 60
    assert checker.translate("regex", "a")
    checker.close()


def test_a_child_that_was_killed_is_replaced(checker: GrammarChecker) -> None:
    checker.translate("regex", "a")
    assert checker._child is not None
    checker._child.kill()
    checker._child.wait()
    assert checker.translate("regex", "b")
