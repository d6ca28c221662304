"""Which tool a call means, and the input of custom tools."""

from __future__ import annotations

import json

import pytest

from modelyard.core.request import Tool
from modelyard.scanner.calls import accepts, custom_input, cut_input, tools_by_name

ADD = Tool("add", parameters={"properties": {"a": {}, "b": {}}, "required": ["a"]})


def test_a_tool_is_found_by_every_name_a_model_may_use() -> None:
    read, now, cloud = (Tool("read", namespace="fs"), Tool("now"), Tool("web", kind="server"))
    assert tools_by_name([read, now, cloud]) == {"read": read, "fs.read": read, "fs__read": read, "now": now}


def test_the_first_of_two_tools_with_the_same_name_wins() -> None:
    one, two = Tool("read", namespace="a"), Tool("read", namespace="b")
    found = tools_by_name([one, two])
    assert (found["read"], found["b.read"]) == (one, two)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"patch": "x"}', "x"),
        ('"just text"', "just text"),
        ("*** Begin Patch", "*** Begin Patch"),
        ('{"a": 1}', '{"a": 1}'),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
    ],
)
def test_the_input_of_a_custom_tool_is_the_only_string_inside(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin', "*** Begin"),
        ('{"input": "a\\n b\\', "a\n b"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a\\ud83d', "a"),
        ('{"inp', ""),
        ("", ""),
        ('"abc', "abc"),
        ('{"input": "done"', "done"),
    ],
)
def test_the_input_of_a_custom_tool_that_is_cut_is_its_beginning(arguments: str, text: str) -> None:
    assert cut_input(arguments) == text


def test_every_cut_of_a_custom_tools_input_is_a_beginning_of_it() -> None:
    text = 'say "hi"\n\\ \u00e9 \U0001f600 end'
    whole = json.dumps({"input": text})
    assert all(text.startswith(cut_input(whole[:end])) for end in range(len(whole)))


@pytest.mark.parametrize(
    ("arguments", "is_accepted"),
    [
        ({"a": 1}, True),
        ({"a": 1, "b": 2}, True),
        ({"b": 2}, False),
        ({"a": 1, "c": 3}, False),
        ([1], False),
        ({}, False),
    ],
)
def test_a_tool_accepts_arguments_if_it_knows_all_and_none_is_missing(arguments: object, is_accepted: bool) -> None:
    assert accepts(ADD, arguments) is is_accepted
