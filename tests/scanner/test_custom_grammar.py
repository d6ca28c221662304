"""A Lark grammar without recursion and its regular expression describe the same language."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.core.request import Tool
from modelyard.scanner.custom_grammar import InputPattern, NotRegular, input_pattern, lark_to_regex, read_rules
from tests.scanner.patches import APPLY_PATCH, GRAMMAR, PATCH, is_patch

PATTERN = re.compile(lark_to_regex(GRAMMAR))


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('start: "a" "b"', ["ab"], ["a", "ba"]),
        ('start: "a" | "b" c\nc: "d"*', ["a", "b", "bdd"], ["ad", ""]),
        ('start: ["a"] "b"?', ["", "a", "b", "ab"], ["ba"]),
        ('start: ("a" | "bc")+', ["a", "bca"], ["", "b"]),
        ('start: "a"~2', ["aa"], ["a", "aaa"]),
        ('start: ("a" "b")~1..2', ["ab", "abab"], ["", "ababab"]),
        ('start: "a".."c" "+"', ["b+"], ["d+", "b"]),
        ('start: "."  "(" /[a-z]+/i "\\n"', [".(aB\n"], ["x(a\n"]),
        ('start: "Yes"i', ["yes", "YES"], ["no"]),
        ("start: /a.b/s /c.d/", ["a\nbcxd"], ["a\nbc\nd"]),
        ('?start: WORD\nWORD: LETTER+ -> word\nLETTER: "x" | "y"', ["xyx"], [""]),
        ('start: INT "/" INT\n%import common.INT', ["1/22"], ["1", "a/b"]),
        ('start: ("a")?b\nb: "c"', ["c", "ac"], ["a"]),
        ('start: a a\na: "" | "x"', ["", "x", "xx"], ["xxx"]),
    ],
)
def test_the_expression_matches_what_the_grammar_accepts(grammar: str, right: list[str], wrong: list[str]) -> None:
    pattern = lark_to_regex(grammar)
    assert [bool(re.fullmatch(pattern, text)) for text in right] == [True] * len(right)
    assert [bool(re.fullmatch(pattern, text)) for text in wrong] == [False] * len(wrong)


DOUBLING = "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(45))


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start: "(" start ")" | "x"', "'start' refers to itself"),
        ('start: a\na: b?\nb: a "x"', "'a' refers to itself"),
        ('other: "x"', "'start' is not defined"),
        ("start: missing", "'missing' is not defined"),
        ('start: ("a"', "not closed"),
        ('start: "a")', "not understood"),
        ('start: "a"~x', "not a number"),
        ('start: "ab".."c"', "not between two characters"),
        ("start: /a/m", "flags"),
        ('start: "\\N"', "is not a string"),
        (f'start: r0\n{DOUBLING}\nr45: "x"', "longer than"),
        ("start: " + "(" * 60 + '"x"' + ")" * 60, "nested too deeply"),
        ("\n".join(f"{a}: {b}" for a, b in zip(["start", *"abcdefghij"], "abcdefghijk", strict=True)), "not defined"),
        ("start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(60)), "too deeply"),
        ("start: " + "x" * 20_001, "longer than"),
        ("start: +", "not understood"),
    ],
)
def test_the_error_says_why_a_grammar_is_not_regular(grammar: str, message: str) -> None:
    with pytest.raises(NotRegular, match=message):
        lark_to_regex(grammar)


def test_empty_rules_that_double_are_cheap() -> None:
    assert re.fullmatch(lark_to_regex(f'start: r0\n{DOUBLING}\nr45: ""'), "")


@given(st.text(alphabet='abr01"/():|?*+~.[]->%\n \\', max_size=60))
def test_every_text_is_a_grammar_or_an_error(text: str) -> None:
    with suppress(NotRegular):
        re.compile(lark_to_regex(text))


@given(st.lists(st.sampled_from(PATCH.split("\n")), max_size=8))
def test_texts_that_match_the_grammar_are_patches(lines: list[str]) -> None:
    text = "\n".join(lines)
    if PATTERN.fullmatch(text):
        assert is_patch(text)


def test_a_patch_matches_the_grammar() -> None:
    assert PATTERN.fullmatch(PATCH)
    assert PATTERN.fullmatch(PATCH + "\n")
    assert not PATTERN.fullmatch(PATCH.replace("Begin", "begin"))
    assert not PATTERN.fullmatch(PATCH.replace("+x", "x"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, InputPattern()),
        ({"grammar": {"syntax": "regex", "definition": "[ab]+"}}, InputPattern("[ab]+")),
        ({"grammar": {"syntax": "lark", "definition": 'start: "a"'}}, InputPattern("a")),
        (
            {"grammar": {"syntax": "lark", "definition": "start: start"}},
            InputPattern(error="the rule 'start' refers to itself"),
        ),
        (
            {"grammar": {"syntax": "gbnf", "definition": "x"}},
            InputPattern(error="the syntax 'gbnf' is not supported, only lark and regex are"),
        ),
        ({"grammar": {"syntax": "lark", "definition": 'start: "a"'}, "kind": "function"}, InputPattern()),
    ],
)
def test_the_input_pattern_of_a_tool_comes_from_its_grammar(fields: dict[str, Any], expected: InputPattern) -> None:
    assert input_pattern(Tool(**{"name": "t", "kind": "custom"} | fields)) == expected
    assert input_pattern(APPLY_PATCH).pattern == PATTERN.pattern


def test_choices_of_long_rules_are_too_long() -> None:
    """Every choice is short enough, and all together would be 100 MB."""
    grammar = "start: " + "|".join(["long"] * 3000) + '\nlong: "' + "x" * 6000 + '"\n'
    with pytest.raises(NotRegular, match="longer than 20000"):
        lark_to_regex(grammar)


def test_a_regular_expression_has_a_limit() -> None:
    tool = Tool("t", kind="custom", grammar={"syntax": "regex", "definition": "x" * 20_001})
    assert input_pattern(tool) == InputPattern(error="the expression is longer than 20000 characters")


def test_rules_are_read_by_their_names() -> None:
    rules, imported = read_rules('start: a | "x" // a comment\n  | /y+/i\n?a.2: "b"~2..3 -> named\n%import common.LF\n')
    assert rules == {
        "start": [("name", "a"), ("sign", "|"), ("string", '"x"'), ("sign", "|"), ("regex", "/y+/i")],
        "a": [("string", '"b"'), *(("sign", sign) for sign in ("~", "2", "..", "3", "->")), ("name", "named")],
    }
    assert imported == {"LF": r"\n"}


def test_a_question_mark_between_two_names_belongs_to_the_first() -> None:
    rules, _ = read_rules('start: ("a")?b\nb: "c"')
    assert rules["start"] == [("sign", "("), ("string", '"a"'), ("sign", ")"), ("sign", "?"), ("name", "b")]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("%import common.INT", ["INT"]),
        ("%import common.INT -> NUMBER", ["NUMBER"]),
        ("%import common (INT, WS)  // two", ["INT", "WS"]),
    ],
)
def test_imports_define_terminals(line: str, names: list[str]) -> None:
    assert list(read_rules(f"{line}\n")[1]) == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("%ignore WS", "%ignore WS"),
        ("%import python.NAME", "not supported"),
        ("%import common.NOTHING", "common.NOTHING is not known"),
        ('"x"', "before the first rule"),
        ("start: ;", "';' is not understood"),
        ('start: "x', "not understood"),
    ],
)
def test_the_error_says_what_is_not_understood(text: str, message: str) -> None:
    with pytest.raises(NotRegular, match=message):
        read_rules(text)
