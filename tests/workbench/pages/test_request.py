"""Why a cache missed, in sentences."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from modelyard.telemetry.cache_diagnostics import MissCause
from modelyard.workbench.pages.request import explained


def one(
    prompt: int, cached: int, divergence: int | None, evicted: bool = False, cause: str | None = None
) -> dict[str, Any]:
    usage, reuse = {"prompt": prompt, "cached": cached}, {"cause": cause} if cause else None
    return {"usage": usage, "divergence": divergence, "evicted": evicted, "reuse": reuse}


def test_a_prompt_that_went_on_from_another_says_where() -> None:
    lines = list(explained(one(100, 60, 60)))
    assert lines[0] == "60 of 100 prompt tokens came from the cache (60 %)."
    assert "Up to token 60" in lines[1]


def test_a_prompt_like_no_other_says_so() -> None:
    assert "Nothing in the cache began like this prompt." in list(explained(one(100, 0, 0)))


@pytest.mark.parametrize("cause", get_args(MissCause))
def test_each_cause_is_told_in_a_sentence_of_its_own(cause: str) -> None:
    lines = [list(explained(one(100, 60, 60, cause=each))) for each in ("none", cause)]
    assert lines[1][:2] == lines[0]
    assert len(lines[1]) == 2 + (cause != "none")


def test_what_another_place_had_is_not_called_unknown() -> None:
    lines = list(explained(one(100, 0, 0, cause="not_copied")))
    assert lines[1:] == ["Another place of the cache had more of it, and reading it again was cheaper than copying."]


def test_an_eviction_is_named() -> None:
    assert "thrown out" in list(explained(one(10, 0, 0, evicted=True)))[-1]


def test_a_request_that_was_never_read_missed_nothing() -> None:
    assert list(explained(one(0, 0, None))) == ["Nothing was read: the request ended before."]
