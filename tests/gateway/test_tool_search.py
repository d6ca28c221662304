from __future__ import annotations

import time

import pytest

from modelyard.core.request import Tool, ToolReference
from modelyard.gateway.tool_search import ToolSearch, match, rank

TEXTS = ["getWeather the weather of a city", "send_mail send a mail to a person", "add adds numbers"]


@pytest.mark.parametrize(
    ("query", "found"),
    [("weather", [0]), ("Mail a person", [1, 0]), ("get", [0]), ("nothing", []), ("a city", [0, 1])],
)
def test_words_rank_the_texts_that_have_them(query: str, found: list[int]) -> None:
    assert rank(query, TEXTS) == found


@pytest.mark.parametrize(
    ("pattern", "found"),
    [("WEATHER|add", [0, 2]), ("^send_.*", [1]), ("numbers$", [2]), ("(?i)City$", [0]), ("x{3}", []), ("^add$", [])],
)
def test_a_pattern_is_found_anywhere_unless_it_is_anchored(pattern: str, found: list[int]) -> None:
    assert match(pattern, TEXTS) == found


def test_a_pattern_that_would_run_for_ever_ends_at_once() -> None:
    began = time.process_time()
    assert match("(a+)+c", ["a" * 30_000 + "b"]) == []
    with pytest.raises(ValueError, match="invalid regex"):
        match("(?=a)b", TEXTS)
    assert time.process_time() - began < 5


async def test_only_deferred_tools_are_found_and_at_most_five() -> None:
    tools = [Tool(f"weather_{number}", deferred=number != 0) for number in range(9)]
    search = ToolSearch(Tool("s", kind="server", type="tool_search_tool_bm25"), tools)
    result = await search.call("s", {"query": "weather"})
    assert result.content == tuple(ToolReference(f"weather_{number}") for number in range(1, 6))
    for wrong in ({}, {"query": 7}, {"query": " "}):
        assert (await search.call("s", wrong)).status == "error"
