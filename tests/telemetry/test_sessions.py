"""The memory of prompts knows each session's own, takes an answer in, and stays within its bounds."""

from __future__ import annotations

import pytest

from modelyard.core.request import Message, Text
from modelyard.telemetry.cache_diagnostics import PromptHistory, PromptRecord


def asked(trace: str, text: str) -> PromptRecord:
    return PromptRecord(trace, text, len(text), (Message("user", (Text(text[:40]),)),), (), text[:40])


def look(seen: PromptHistory, session: str, one: PromptRecord, reused: int = 0) -> str:
    return seen.look(("main", session), one, reused, lambda tokens: tokens).cause


def test_each_session_has_prompts_of_its_own() -> None:
    seen, text = PromptHistory(), "x" * 100
    assert look(seen, "a", asked("1", text)) == "new_session"
    assert look(seen, "b", asked("2", text)) == "new_session"
    assert look(seen, "a", asked("3", text + "y" * 50), 100) == "none"


def test_what_was_answered_is_expected_to_be_there_next_time() -> None:
    seen, text = PromptHistory(), "x" * 100
    first = asked("1", text)
    look(seen, "a", first)
    first.output = 50
    assert look(seen, "a", asked("2", text + "y" * 100), 100) == "template"


def test_a_second_try_is_not_compared_with_the_first() -> None:
    seen, text = PromptHistory(), "x" * 100
    look(seen, "a", asked("1", text))
    assert look(seen, "a", asked("1", text)) == "new_session"


@pytest.mark.parametrize("bounds", [{"sessions": 3}, {"characters": 300}])
def test_the_oldest_sessions_are_forgotten(bounds: dict[str, int]) -> None:
    seen = PromptHistory(**bounds)
    for name in "abcdef":
        look(seen, name, asked(name, "x" * 100))
    assert len(seen) == 3
    assert look(seen, "a", asked("again", "x" * 120), 100) == "new_session"


def test_one_session_may_be_larger_than_the_bound_and_keeps_a_few_prompts() -> None:
    seen = PromptHistory(characters=10)
    for number in range(20):
        look(seen, "a", asked(str(number), "x" * (100 + number)), 99 + number)
    assert len(seen) == 1
