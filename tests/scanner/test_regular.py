"""A grammar without recursion is the same language as the expression that it is written out as."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelyard.core.request import Tool
from modelyard.scanner.regular import Form, Irregular, form, regular
from tests.scanner.patches import APPLY_PATCH, GRAMMAR, PATCH, is_patch

PATTERN = re.compile(regular(GRAMMAR))


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
def test_the_expression_takes_what_the_grammar_takes(grammar: str, right: list[str], wrong: list[str]) -> None:
    pattern = regular(grammar)
    assert [bool(re.fullmatch(pattern, text)) for text in right] == [True] * len(right)
    assert [bool(re.fullmatch(pattern, text)) for text in wrong] == [False] * len(wrong)


DOUBLING = "\n".join(f"r{n}: r{n + 1} r{n + 1}" for n in range(45))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('start: "(" start ")" | "x"', "'start' refers to itself"),
        ('start: a\na: b?\nb: a "x"', "'a' refers to itself"),
        ('other: "x"', "'start' is not defined"),
        ("start: missing", "'missing' is not defined"),
        ('start: ("a"', "not closed"),
        ('start: "a")', "not understood"),
        ('start: "a"~x', "no number"),
        ('start: "ab".."c"', "not between two characters"),
        ("start: /a/m", "flags"),
        ('start: "\\N"', "is no string"),
        (f'start: r0\n{DOUBLING}\nr45: "x"', "longer than"),
        ("start: " + "(" * 60 + '"x"' + ")" * 60, "nested too deeply"),
        ("\n".join(f"{a}: {b}" for a, b in zip(["start", *"abcdefghij"], "abcdefghijk", strict=True)), "not defined"),
        ("start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(60)), "too deeply"),
        ("start: " + "x" * 20_001, "longer than"),
        ("start: +", "not understood"),
    ],
)
def test_what_cannot_be_written_out_is_said(grammar: str, words: str) -> None:
    with pytest.raises(Irregular, match=words):
        regular(grammar)


def test_rules_that_double_and_say_nothing_cost_nothing() -> None:
    assert re.fullmatch(regular(f'start: r0\n{DOUBLING}\nr45: ""'), "")


@given(st.text(alphabet='abr01"/():|?*+~.[]->%\n \\', max_size=60))
def test_any_text_is_a_grammar_or_said_not_to_be(text: str) -> None:
    with suppress(Irregular):
        re.compile(regular(text))


@given(st.lists(st.sampled_from(PATCH.split("\n")), max_size=8))
def test_patches_are_what_the_grammar_says(lines: list[str]) -> None:
    text = "\n".join(lines)
    if PATTERN.fullmatch(text):
        assert is_patch(text)


def test_a_patch_is_one() -> None:
    assert PATTERN.fullmatch(PATCH)
    assert PATTERN.fullmatch(PATCH + "\n")
    assert not PATTERN.fullmatch(PATCH.replace("Begin", "begin"))
    assert not PATTERN.fullmatch(PATCH.replace("+x", "x"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Form()),
        ({"grammar": {"syntax": "regex", "definition": "[ab]+"}}, Form("[ab]+")),
        ({"grammar": {"syntax": "lark", "definition": 'start: "a"'}}, Form("a")),
        (
            {"grammar": {"syntax": "lark", "definition": "start: start"}},
            Form(fault="the rule 'start' refers to itself"),
        ),
        (
            {"grammar": {"syntax": "gbnf", "definition": "x"}},
            Form(fault="its syntax is 'gbnf', and only lark and regex are known"),
        ),
        ({"grammar": {"syntax": "lark", "definition": 'start: "a"'}, "kind": "function"}, Form()),
    ],
)
def test_a_tools_grammar_is_its_form(fields: dict[str, Any], expected: Form) -> None:
    assert form(Tool(**{"name": "t", "kind": "custom"} | fields)) == expected
    assert form(APPLY_PATCH).pattern == PATTERN.pattern
