"""Why a cache missed, in sentences."""

from __future__ import annotations

from typing import Any

from modelyard.workbench.pages.request import explained


def one(prompt: int, cached: int, divergence: int | None, evicted: bool = False) -> dict[str, Any]:
    return {"usage": {"prompt": prompt, "cached": cached}, "divergence": divergence, "evicted": evicted}


def test_a_prompt_that_went_on_from_another_says_where() -> None:
    lines = list(explained(one(100, 60, 60)))
    assert lines[0] == "60 of 100 prompt tokens came from the cache (60 %)."
    assert "Up to token 60" in lines[1]


def test_a_prompt_like_no_other_says_so() -> None:
    assert "Nothing in the cache began like this prompt." in list(explained(one(100, 0, 0)))


def test_an_eviction_is_named() -> None:
    assert "thrown out" in list(explained(one(10, 0, 0, evicted=True)))[-1]


def test_a_request_that_was_never_read_missed_nothing() -> None:
    assert list(explained(one(0, 0, None))) == ["Nothing was read: the request ended before."]
