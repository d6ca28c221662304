"""Constraints in vLLM's words; grammars are compiled as its guidance backend does it, on a vocabulary of bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from

from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.request import Constraint
from modelyard.engines.vllm.request import ControlTokens, structured_output_arguments

CALL = 'start: "{" r0 "}"\nr0: NUMBER\nNUMBER: /[0-9]+/\n'
BYTES = LLTokenizer("byte")


def fits(lark: str, text: str) -> bool:
    """Whether an answer may be this text, and end there."""
    matcher = LLMatcher(BYTES, grammar_from("grammar", lark), log_level=0)
    assert not matcher.get_error()
    ids = BYTES.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_schema_is_written_in_one_way() -> None:
    told = json.loads(structured_output_arguments(Constraint("json_schema", '{"type": "object"}'))["json"])
    assert told["type"] == "object"
    assert told["x-guidance"] == {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def test_any_object_is_an_object() -> None:
    assert json.loads(structured_output_arguments(Constraint("json_object"))["json"])["type"] == "object"


def test_schema_that_allows_everything_stays_as_it_is() -> None:
    assert structured_output_arguments(Constraint("json_schema", "true")) == {"json": "true"}


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        (Constraint("regex", "[a-c]+"), {"regex": "[a-c]+"}),
        (Constraint("lark", 'start: "a"'), {"grammar": 'start: "a"'}),
        (Constraint("gbnf", 'root ::= "a"'), {"grammar": 'root ::= "a"'}),
        (Constraint("tools", 'start: "a"', tools=("t",)), {"grammar": 'start: "a"'}),
    ],
)
def test_other_forms_are_told_as_they_are(constraint: Constraint, told: dict[str, Any]) -> None:
    assert structured_output_arguments(constraint) == told


def test_call_that_has_no_grammar_cannot_be_required() -> None:
    with pytest.raises(Unsupported, match="no grammar"):
        structured_output_arguments(Constraint("tools", tools=("t",)))


def test_schema_that_is_no_json_is_refused_with_its_field() -> None:
    with pytest.raises(InvalidRequest) as caught:
        structured_output_arguments(Constraint("json_schema", "{"))
    assert (caught.value.code, caught.value.param) == ("bad_grammar", "response_format")


def test_grammar_that_could_break_the_compiler_is_refused() -> None:
    rules = "\n".join(f"r{n}: r{n + 1}" for n in range(4000))
    with pytest.raises(InvalidRequest, match="longer than"):
        structured_output_arguments(Constraint("lark", f"start: r0\n{rules}"))


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("just words", True),
        ("", True),
        ("a <tool>{12} and on", True),
        ("a <tool>{12}<tool>{3}", True),
        ("half a <too", True),
        ("a <tool>{x}", False),
        ("a <tool>", False),
        ("a <tool>{12", False),
    ],
)
def test_answer_is_free_until_the_trigger_and_after_what_follows_it(text: str, allowed: bool) -> None:
    lark = structured_output_arguments(Constraint("lark", CALL, trigger="<tool>", tools=("t",)))["grammar"]
    assert fits(lark, text) is allowed


def test_marker_of_the_vocabulary_triggers_by_its_number() -> None:
    mark = BYTES.tokenize_str("~")[0]
    lark = structured_output_arguments(
        Constraint("lark", CALL, trigger="<call>", tools=("t",)), ControlTokens({"<call>": mark})
    )["grammar"]
    assert fits(lark, "a ~{12} b")
    assert fits(lark, "no call")
    assert not fits(lark, "a ~{x}")
    assert not fits(lark, "a ~")


def test_markers_may_stand_in_free_text() -> None:
    """Reasoning, say, which some families put between markers."""
    lark = structured_output_arguments(
        Constraint("lark", CALL, trigger="<tool>", tools=("t",)), ControlTokens({"<a>": 256, "<b>": 9})
    )["grammar"]
    assert "<[9,256]>" in lark
    assert ControlTokens({"a": 3, "b": 4, "c": 5, "d": 9}).others() == "3-5,9"


def test_only_the_rule_start_is_renamed() -> None:
    lark = structured_output_arguments(Constraint("lark", 'start: starter\nstarter: "start: no"', trigger="!"))[
        "grammar"
    ]
    assert 'starter: "start: no"' in lark
    assert fits(lark, "go!start: no")
