"""Each cause is told where it is one, with the message at fault; and a prompt that goes on well has none."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.request import Message, Text, Thinking, Tool, ToolCall, ToolResult
from modelyard.telemetry.cache_diagnostics import PromptRecord, common_prefix_length, conversation_opening, diagnose

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
