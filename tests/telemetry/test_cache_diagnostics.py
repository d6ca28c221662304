"""Each cause is told where it is one, with the message at fault; and a prompt that goes on well has none."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.request import Image, Message, Text, Thinking, Tool, ToolCall, ToolResult
from modelyard.telemetry.cache_diagnostics import (
    PromptHistory,
    PromptRecord,
    SystemPromptChange,
    SystemPromptTracker,
    common_prefix_length,
    conversation_opening,
    diagnose,
    fingerprint,
    leading_system,
    message_at,
)

RULES, BILL = "You are an agent who works with files. ", "x-anthropic-billing-header: cc_version=1; cch={};"
READ, WRITE = Tool("read"), Tool("write")


def say(role: Any, *parts: Any) -> Message:
    return Message(role, tuple(Text(part) if isinstance(part, str) else part for part in parts))


def call(arguments: str = '{"path": "a", "why": "b"}') -> ToolCall:
    return ToolCall("call_1", "read", arguments)


OPENING = (say("system", RULES * 10), say("user", "Look into the file. " * 10))
REPLY = say("assistant", Thinking("I should look."), "Looking.", call())
RESULT = say("tool", ToolResult("call_1", (Text("It is empty. " * 10),)))


def rendered(messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> str:
    """A character a token: what was reused is the text that two prompts share."""
    return "".join(f"[{tool.name}]" for tool in tools) + "".join(f"<{m.role}>{_told(m)}" for m in messages)


def _told(message: Message) -> str:
    return "".join(
        part.text
        if isinstance(part, Text | Thinking)
        else part.arguments
        if isinstance(part, ToolCall)
        else "".join(inner.text for inner in part.content if isinstance(inner, Text))
        if isinstance(part, ToolResult)
        else ""
        for part in message.parts
    )


def asked(*messages: Message, tools: tuple[Tool, ...] = (READ,), text: str | None = None, **more: Any) -> PromptRecord:
    text = rendered(messages, tools) if text is None else text
    return PromptRecord("t", text, len(text), messages, tools, conversation_opening(messages), **more)


def answered(reply: Message = REPLY, *messages: Message) -> PromptRecord:
    first = asked(*(messages or OPENING))
    first.reply, first.output = reply, len(rendered((reply,), ()))
    return first


def held(last: PromptRecord) -> str:
    return last.text + (rendered((last.reply,), ()) if last.reply is not None else "")


def judged(last: PromptRecord, now: PromptRecord, reused: int | None = None) -> tuple[str, int | None]:
    reused = common_prefix_length(held(last), now.text) if reused is None else reused
    found = diagnose([last], now, reused, lambda tokens: tokens)
    assert (found.reused, found.evaluated) == (reused, now.tokens - reused)
    assert found.token == (reused if reused < now.tokens else None)
    return found.cause, found.message


def test_a_turn_that_goes_on_has_no_cause() -> None:
    assert judged(answered(), asked(*OPENING, REPLY, RESULT)) == ("none", None)


def test_a_signature_that_comes_back_is_no_change() -> None:
    echo = say("assistant", Thinking("I should look.", "sealed"), "Looking.", call())
    assert judged(answered(), asked(*OPENING, echo, RESULT)) == ("none", None)


def test_the_first_prompt_of_a_session_is_new() -> None:
    assert diagnose([], asked(*OPENING), 0, len).cause == "new_session"


def test_the_same_prompt_once_more_has_no_cause_however_little_is_known() -> None:
    now = asked(*OPENING)
    assert diagnose([], now, now.tokens - 1, lambda _: pytest.fail("nothing is amiss")).cause == "none"


CHANGES: dict[str, tuple[tuple[Message, ...], tuple[Tool, ...], tuple[str, int | None]]] = {
    "the system prompt": (
        (say("system", RULES * 9 + "It is Monday."), OPENING[1], REPLY, RESULT),
        (READ,),
        ("system_changed", 0),
    ),
    "a tool more": ((*OPENING, REPLY, RESULT), (READ, WRITE), ("tools_changed", None)),
    "no reasoning": ((*OPENING, say("assistant", "Looking.", call()), RESULT), (READ,), ("reasoning_dropped", 2)),
    "keys in another order": (
        (
            *OPENING,
            say("assistant", Thinking("I should look."), "Looking.", call('{"why": "b", "path": "a"}')),
            RESULT,
        ),
        (READ,),
        ("arguments_reserialised", 2),
    ),
    "another answer": ((*OPENING, say("assistant", "Something else."), RESULT), (READ,), ("reasoning_dropped", 2)),
    "another question": (
        (OPENING[0], OPENING[1], say("assistant", Thinking("I should look."), "Looked."), RESULT),
        (READ,),
        ("message_changed", 2),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named_with_its_message(change: str) -> None:
    messages, tools, expected = CHANGES[change]
    assert judged(answered(), asked(*messages, tools=tools)) == expected


def test_a_billing_line_is_told_from_other_changes_of_the_rules() -> None:
    first, second = (say("system", RULES + BILL.format(n) + RULES * 9) for n in ("a1", "b2"))
    last = answered(REPLY, first, OPENING[1])
    assert judged(last, asked(second, OPENING[1], REPLY, RESULT)) == ("billing_block", 0)


def test_a_shorter_history_is_a_change_of_the_first_message_that_is_gone() -> None:
    long = asked(*OPENING, REPLY, RESULT, say("assistant", "It is."), say("user", "And?"))
    now = asked(*OPENING, REPLY, RESULT, say("user", "Something else entirely, please. " * 4))
    assert judged(long, now) == ("message_changed", 4)


def test_what_the_prompt_shares_and_the_engine_has_not_was_evicted() -> None:
    assert judged(answered(), asked(*OPENING, REPLY, RESULT), reused=0) == ("evicted", None)
    assert judged(answered(), asked(*OPENING, REPLY, RESULT), reused=len(RULES)) == ("evicted", None)


@pytest.mark.parametrize(("elsewhere", "cause"), [(1.0, "not_copied"), (0.5, "evicted"), (0.0, "evicted")])
def test_what_another_sequence_has_and_was_not_copied_is_not_told_as_evicted(elsewhere: float, cause: str) -> None:
    now = asked(*OPENING)
    assert diagnose([answered()], now, 0, lambda tokens: tokens, elsewhere=int(elsewhere * now.tokens)).cause == cause


def test_another_conversation_under_the_same_name_is_none_of_the_last() -> None:
    other = asked(OPENING[0], say("user", "What is the weather like? " * 10))
    assert judged(answered(), other) == ("other_session", None)


def test_reasoning_that_the_template_leaves_out_is_dropped_reasoning() -> None:
    told = (*OPENING, REPLY, RESULT, say("user", "Thank you. " * 10))
    bare = say("assistant", "Looking.", call())
    now = asked(*told, text=rendered((*OPENING, bare, RESULT, told[-1]), (READ,)))
    assert judged(answered(), now) == ("reasoning_dropped", 2)


def test_the_same_messages_in_other_words_are_the_templates_doing() -> None:
    plain = say("assistant", "Looking. " * 10)
    now = asked(*OPENING, plain, RESULT, text=rendered(OPENING, (READ,)) + "<assistant>" + "looking. " * 20)
    assert judged(answered(plain), now) == ("template", None)


def test_of_several_earlier_prompts_the_one_that_is_most_alike_is_meant() -> None:
    title = asked(say("system", "Find a title."), say("user", "Look into the file. " * 10), tools=())
    now = asked(*OPENING, REPLY, RESULT)
    reused = common_prefix_length(held(answered()), now.text)
    assert diagnose([answered(), title], now, reused, lambda tokens: tokens).cause == "none"


@pytest.mark.parametrize(("page", "cause"), [(1, "evicted"), (128, "none"), (0, "not_kept")])
def test_an_engine_that_keeps_whole_pages_or_nothing_is_held_to_that(page: int, cause: str) -> None:
    last, now = answered(), asked(*OPENING, REPLY, RESULT)
    assert diagnose([last], now, last.held - 200, lambda tokens: tokens, page).cause == cause


def test_the_header_and_the_sentence() -> None:
    last, now = answered(), asked(say("system", "Other rules."), *OPENING[1:], REPLY, RESULT)
    found = diagnose([last], now, 10, lambda tokens: tokens)
    assert found.header == f"reused=10; evaluated={now.tokens - 10}; cause=system_changed"
    assert str(found) == (f"system_changed: token 10 of {now.tokens} is the first not cached, in message 0 (system)")


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("", "", 0),
        ("abc", "abd", 2),
        ("abc", "abc", 3),
        ("abc", "abcd", 3),
        ("x", "y", 0),
        ("a" * 99 + "b", "a" * 99, 99),
    ],
)
def test_shared_characters(one: str, other: str, expected: int) -> None:
    assert common_prefix_length(one, other) == common_prefix_length(other, one) == expected


# The memory of prompts knows each session's own, takes an answer in, and stays within its bounds.


def asked_sessions(trace: str, text: str) -> PromptRecord:
    return PromptRecord(trace, text, len(text), (Message("user", (Text(text[:40]),)),), (), text[:40])


def look(seen: PromptHistory, session: str, one: PromptRecord, reused: int = 0) -> str:
    return seen.look(("main", session), one, reused, lambda tokens: tokens).cause


def test_each_session_has_prompts_of_its_own() -> None:
    seen, text = PromptHistory(), "x" * 100
    assert look(seen, "a", asked_sessions("1", text)) == "new_session"
    assert look(seen, "b", asked_sessions("2", text)) == "new_session"
    assert look(seen, "a", asked_sessions("3", text + "y" * 50), 100) == "none"


def test_what_was_answered_is_expected_to_be_there_next_time() -> None:
    seen, text = PromptHistory(), "x" * 100
    first = asked_sessions("1", text)
    look(seen, "a", first)
    first.output = 50
    assert look(seen, "a", asked_sessions("2", text + "y" * 100), 100) == "template"


def test_a_second_try_is_not_compared_with_the_first() -> None:
    seen, text = PromptHistory(), "x" * 100
    look(seen, "a", asked_sessions("1", text))
    assert look(seen, "a", asked_sessions("1", text)) == "new_session"


@pytest.mark.parametrize("bounds", [{"sessions": 3}, {"characters": 300}])
def test_the_oldest_sessions_are_forgotten(bounds: dict[str, int]) -> None:
    seen = PromptHistory(**bounds)
    for name in "abcdef":
        look(seen, name, asked_sessions(name, "x" * 100))
    assert len(seen) == 3
    assert look(seen, "a", asked_sessions("again", "x" * 120), 100) == "new_session"


def test_one_session_may_be_larger_than_the_bound_and_keeps_a_few_prompts() -> None:
    seen = PromptHistory(characters=10)
    for number in range(20):
        look(seen, "a", asked_sessions(str(number), "x" * (100 + number)), 99 + number)
    assert len(seen) == 1


# A changed system prompt is noticed once, and the message that a character lies in is found.


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
