"""A changed system prompt is noticed once, and the message that a character lies in is found."""

from __future__ import annotations

import pytest

from modelyard.core.request import Image, Message, Text
from modelyard.telemetry.cache_diagnostics import (
    SystemPromptChange,
    SystemPromptTracker,
    fingerprint,
    leading_system,
    message_at,
)


def system(*texts: str) -> Message:
    return Message("system", tuple(Text(text) for text in texts))


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def test_the_first_prompt_and_one_that_stays_are_no_change():
    seen = SystemPromptTracker()
    assert [seen.look("main", system("Be kind.")) for _ in range(3)] == [None] * 3


def test_a_change_tells_both_fingerprints_and_is_told_once():
    seen = SystemPromptTracker()
    seen.look("main", system("Be kind."))
    assert seen.look("main", system("Be brief.")) == SystemPromptChange(
        fingerprint(system("Be kind.")), fingerprint(system("Be brief."))
    )
    assert seen.look("main", system("Be brief.")) is None


def test_each_cache_has_a_prompt_of_its_own():
    seen = SystemPromptTracker()
    seen.look("main", system("Be kind."))
    assert seen.look("fast", system("Find a title.")) is None
    assert seen.look("main", system("Be kind.")) is None


def test_fingerprints_are_short_stable_and_tell_parts_apart():
    assert fingerprint(system("Be kind.")) == "5499befb38db"
    assert fingerprint(system("a", "b")) != fingerprint(system("ab"))
    assert len(fingerprint(system("\ud800"))) == 12


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((), None),
        ((user("hi"),), None),
        ((system("x"), user("hi")), system("x")),
        ((Message("developer", (Text("x"),)),), Message("developer", (Text("x"),))),
    ],
)
def test_only_the_leading_message_is_a_system_prompt(messages: tuple[Message, ...], expected: Message | None):
    assert leading_system(messages) == expected


@pytest.mark.parametrize(("position", "message"), [(0, 0), (5, 0), (12, 0), (18, 1), (22, 1), (30, 2), (99, 2)])
def test_a_character_lies_in_the_last_message_that_began_before_it(position: int, message: int):
    prompt = "<s>Be kind.</s><u>Hello</u><a>Hello</a>"
    talk = (system("Be kind."), user("Hello"), Message("assistant", (Text("Hello"),)))
    assert message_at(prompt, position, talk) == message


def test_messages_that_the_template_left_out_are_passed_over():
    talk = (system("gone"), Message("user", (Image("data:,"),)), user("Hello"))
    assert message_at("<u>Hello", 4, talk) == 2
    assert message_at("nothing of it", 4, talk) == 0
