"""A grammar's text becomes rules, each a list of tokens; what is not understood is said."""

from __future__ import annotations

import pytest

from modelyard.scanner.lark import Irregular, read_rules


def test_rules_are_told_apart_by_their_names() -> None:
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
def test_what_is_imported_is_known(line: str, names: list[str]) -> None:
    assert list(read_rules(f"{line}\n")[1]) == names


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("%ignore WS", "%ignore WS"),
        ("%import python.NAME", "not supported"),
        ("%import common.NOTHING", "common.NOTHING is not known"),
        ('"x"', "before any rule"),
        ("start: ;", "';' is not understood"),
        ('start: "x', "not understood"),
    ],
)
def test_what_is_not_understood_is_said(text: str, words: str) -> None:
    with pytest.raises(Irregular, match=words):
        read_rules(text)
