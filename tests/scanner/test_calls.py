from __future__ import annotations

import pytest

from modelyard.core.request import Tool
from modelyard.scanner.calls import free_text, offered, takes


def test_a_tool_is_found_by_every_name_a_model_may_use() -> None:
    read, now, cloud = Tool("read", namespace="fs"), Tool("now"), Tool("web", kind="server")
    assert offered([read, now, cloud]) == {"read": read, "fs.read": read, "fs__read": read, "now": now}


def test_the_first_of_two_tools_with_one_name_wins() -> None:
    one, two = Tool("read", namespace="a"), Tool("read", namespace="b")
    found = offered([one, two])
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
def test_free_text_is_the_one_string_inside(arguments: str, text: str) -> None:
    assert free_text(arguments) == text


ADD = Tool("add", parameters={"properties": {"a": {}, "b": {}}, "required": ["a"]})


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"a": 1}, True),
        ({"a": 1, "b": 2}, True),
        ({"b": 2}, False),
        ({"a": 1, "c": 3}, False),
        ([1], False),
        ({}, False),
    ],
)
def test_arguments_fit_a_tool_that_knows_them_all_and_misses_none(arguments: object, fits: bool) -> None:
    assert takes(ADD, arguments) is fits
