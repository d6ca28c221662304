"""A changed system prompt that was not cached is logged as a warning with its position and counted; nothing else is."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest

from modelyard.core.engine import Accepted
from modelyard.core.request import Caller, Image, Message, Text, Thinking, Tool, ToolCall, ToolResult
from modelyard.gateway.cache_diagnostics import (
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
from tests.gateway.harness import CALLER, GatewayHarness, ids, make_request, read_events
from tests.telemetry.prometheus_text import sample_values

LONG = "You are a careful helper who answers in short sentences. "


def conversation(system: str | None, *more: str) -> tuple[Message, ...]:
    head = (Message("system", (Text(system),)),) if system is not None else ()
    return (*head, *(Message("user", (Text(text),)) for text in more))


async def run(
    harness: GatewayHarness, messages: tuple[Message, ...], divergence: int | None, elsewhere: int = 0
) -> list[int]:
    """Returns the ids of the prompt."""
    index = len(harness.engine.generations)
    caller = Caller(trace=f"t{index}", endpoint="/v1/chat/completions")
    stream = harness.gateway.start(await harness.gateway.prepare(make_request(messages=messages), caller))
    reading = asyncio.create_task(read_events(stream))
    generation = await harness.generation(index)
    generation.put(Accepted(divergence or 0, divergence, elsewhere=elsewhere))
    generation.write("Hello.")
    generation.end()
    await reading
    stream.close()
    return generation.prompt.ids


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_a_changed_system_prompt_is_a_warning_with_token_and_message(caplog: pytest.LogCaptureFixture) -> None:
    one, two = conversation(LONG + "It is Monday.", "hi"), conversation(LONG + "It is Tuesday.", "hi")
    async with GatewayHarness() as harness:
        before = await run(harness, one, 0)
        after = (await harness.gateway.prepare(make_request(messages=two), CALLER)).prompts[0].ids
        shared = next(position for position, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
        await run(harness, two, shared)
        counted = harness.gateway.metrics.render().decode()
    (warning,) = warnings(caplog)
    assert f"changed from {fingerprint(one[0])} to {fingerprint(two[0])}" in warning
    assert f"token {shared} of {len(after)} at character" in warning
    assert "in message 0 (system), is the first that was not cached" in warning
    assert re.search(r'system_prompt_changes_total\{cache="\w+"\} 1\.0', counted)


async def test_a_prefix_of_another_sequence_that_was_not_copied_is_counted() -> None:
    async with GatewayHarness() as harness:
        ids = await run(harness, conversation(LONG * 4, "hi"), 0)
        await run(harness, conversation(LONG * 4, "hi"), 0, elsewhere=len(ids) - 1)
        await run(harness, conversation(LONG * 4, "hi"), 0)
        counted = sample_values(harness.gateway.metrics.render(), "cache_requests_total")
    assert {cause: count for (_, cause), count in counted.items()} == {"new_session": 1, "not_copied": 1, "evicted": 1}


async def test_an_unchanged_system_prompt_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with GatewayHarness() as harness:
        await run(harness, conversation(LONG, "hi"), 0)
        await run(harness, conversation(LONG, "hi", "and now?"), 3)
        await run(harness, conversation(None, "no system prompt"), 0)
    assert warnings(caplog) == []


async def test_a_changed_prompt_that_another_sequence_has_cached_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with GatewayHarness() as harness:
        await run(harness, conversation("Be kind.", "hi"), 0)
        ids = (
            (await harness.gateway.prepare(make_request(messages=conversation("Be brief.", "hi there")), CALLER))
            .prompts[0]
            .ids
        )
        await run(harness, conversation("Be brief.", "hi there"), len(ids) - 1)
        await run(harness, conversation("Be kind.", "hi"), None)
    assert warnings(caplog) == []


async def test_the_output_tokens_are_recorded_with_the_prompt() -> None:
    async with GatewayHarness() as harness:
        await run(harness, conversation(LONG, "hi"), 0)
        await run(harness, conversation(LONG, "again"), 0)
        (prompts,) = harness.gateway._services.diagnostics._sessions._prompts.values()
    assert [one.output for one in prompts] == [len(ids("Hello."))] * 2


async def test_key_and_session_are_separate_parts_of_the_session_id() -> None:
    async with GatewayHarness() as harness:
        for index, (key, session) in enumerate((("ann", "b/c"), ("ann/b", "c"))):
            caller = Caller(trace=f"t{index}", endpoint="/v1/chat/completions", key=key)
            stream = harness.gateway.start(await harness.gateway.prepare(make_request(session=session), caller))
            reading = asyncio.create_task(read_events(stream))
            (await harness.generation(index)).finish()
            await reading
            stream.close()
        assert len(harness.gateway._services.diagnostics._sessions) == 2


RULES, BILLING = "You are an agent who works with files. ", "x-anthropic-billing-header: cc_version=1; cch={};"
READ, WRITE = Tool("read"), Tool("write")


def say(role: Any, *parts: Any) -> Message:
    return Message(role, tuple(Text(part) if isinstance(part, str) else part for part in parts))


def call(arguments: str = '{"path": "a", "why": "b"}') -> ToolCall:
    return ToolCall("call_1", "read", arguments)


OPENING = (say("system", RULES * 10), say("user", "Look into the file. " * 10))
REPLY = say("assistant", Thinking("I should look."), "Looking.", call())
RESULT = say("tool", ToolResult("call_1", (Text("It is empty. " * 10),)))


def render(messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> str:
    """One character is one token: the reused tokens are the common prefix of two prompts."""
    return "".join(f"[{tool.name}]" for tool in tools) + "".join(f"<{m.role}>{_message_text(m)}" for m in messages)


def _message_text(message: Message) -> str:
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


def prompt(*messages: Message, tools: tuple[Tool, ...] = (READ,), text: str | None = None, **more: Any) -> PromptRecord:
    text = render(messages, tools) if text is None else text
    return PromptRecord("t", text, len(text), messages, tools, conversation_opening(messages), **more)


def replied(reply: Message = REPLY, *messages: Message) -> PromptRecord:
    first = prompt(*(messages or OPENING))
    first.reply, first.output = reply, len(render((reply,), ()))
    return first


def cached_text(last: PromptRecord) -> str:
    return last.text + (render((last.reply,), ()) if last.reply is not None else "")


def diagnosis(last: PromptRecord, now: PromptRecord, reused: int | None = None) -> tuple[str, int | None]:
    reused = common_prefix_length(cached_text(last), now.text) if reused is None else reused
    found = diagnose([last], now, reused, lambda tokens: tokens)
    assert (found.reused, found.evaluated) == (reused, now.tokens - reused)
    assert found.token == (reused if reused < now.tokens else None)
    return found.cause, found.message


def test_a_continued_conversation_has_no_cause() -> None:
    assert diagnosis(replied(), prompt(*OPENING, REPLY, RESULT)) == ("none", None)


def test_a_returned_signature_is_not_a_change() -> None:
    echo = say("assistant", Thinking("I should look.", "sealed"), "Looking.", call())
    assert diagnosis(replied(), prompt(*OPENING, echo, RESULT)) == ("none", None)


def test_the_first_prompt_of_a_session_is_a_new_session() -> None:
    assert diagnose([], prompt(*OPENING), 0, len).cause == "new_session"


def test_a_fully_cached_prompt_has_no_cause_and_needs_no_text_lengths() -> None:
    now = prompt(*OPENING)
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
def test_each_change_is_reported_with_its_message(change: str) -> None:
    messages, tools, expected = CHANGES[change]
    assert diagnosis(replied(), prompt(*messages, tools=tools)) == expected


def test_a_changed_billing_line_differs_from_other_system_changes() -> None:
    first, second = (say("system", RULES + BILLING.format(n) + RULES * 9) for n in ("a1", "b2"))
    last = replied(REPLY, first, OPENING[1])
    assert diagnosis(last, prompt(second, OPENING[1], REPLY, RESULT)) == ("billing_block", 0)


def test_a_shorter_conversation_is_a_change_of_the_first_missing_message() -> None:
    long = prompt(*OPENING, REPLY, RESULT, say("assistant", "It is."), say("user", "And?"))
    now = prompt(*OPENING, REPLY, RESULT, say("user", "Something else entirely, please. " * 4))
    assert diagnosis(long, now) == ("message_changed", 4)


def test_a_shared_prefix_that_the_engine_lost_was_evicted() -> None:
    assert diagnosis(replied(), prompt(*OPENING, REPLY, RESULT), reused=0) == ("evicted", None)
    assert diagnosis(replied(), prompt(*OPENING, REPLY, RESULT), reused=len(RULES)) == ("evicted", None)


def test_a_short_prompt_that_is_sent_again_and_not_found_was_evicted() -> None:
    first, again = prompt(say("user", "Say something."), tools=()), prompt(say("user", "Say something."), tools=())
    first.output = 100
    assert diagnose([first], again, 0, lambda tokens: tokens).cause == "evicted"


@pytest.mark.parametrize(("elsewhere", "cause"), [(1.0, "not_copied"), (0.5, "evicted"), (0.0, "evicted")])
def test_a_prefix_that_another_sequence_holds_was_not_copied(elsewhere: float, cause: str) -> None:
    now = prompt(*OPENING)
    assert diagnose([replied()], now, 0, lambda tokens: tokens, elsewhere=int(elsewhere * now.tokens)).cause == cause


def test_another_conversation_under_the_same_session_is_another_session() -> None:
    other = prompt(OPENING[0], say("user", "What is the weather like? " * 10))
    assert diagnosis(replied(), other) == ("other_session", None)


def test_reasoning_that_the_template_drops_is_dropped_reasoning() -> None:
    turns = (*OPENING, REPLY, RESULT, say("user", "Thank you. " * 10))
    bare = say("assistant", "Looking.", call())
    now = prompt(*turns, text=render((*OPENING, bare, RESULT, turns[-1]), (READ,)))
    assert diagnosis(replied(), now) == ("reasoning_dropped", 2)


def test_equal_messages_rendered_differently_are_caused_by_the_template() -> None:
    plain = say("assistant", "Looking. " * 10)
    now = prompt(*OPENING, plain, RESULT, text=render(OPENING, (READ,)) + "<assistant>" + "looking. " * 20)
    assert diagnosis(replied(plain), now) == ("template", None)


def test_the_most_similar_earlier_prompt_is_compared() -> None:
    title = prompt(say("system", "Find a title."), say("user", "Look into the file. " * 10), tools=())
    now = prompt(*OPENING, REPLY, RESULT)
    reused = common_prefix_length(cached_text(replied()), now.text)
    assert diagnose([replied(), title], now, reused, lambda tokens: tokens).cause == "none"


@pytest.mark.parametrize(("page", "cause"), [(1, "evicted"), (128, "none"), (0, "not_kept")])
def test_the_page_size_of_the_engine_is_allowed_for(page: int, cause: str) -> None:
    last, now = replied(), prompt(*OPENING, REPLY, RESULT)
    assert diagnose([last], now, last.cached_tokens - 200, lambda tokens: tokens, page).cause == cause


def test_the_header_and_the_message() -> None:
    last, now = replied(), prompt(say("system", "Other rules."), *OPENING[1:], REPLY, RESULT)
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
def test_common_prefix_length(one: str, other: str, expected: int) -> None:
    assert common_prefix_length(one, other) == common_prefix_length(other, one) == expected


# --- earlier prompts ------------------------------------------------------------------------------------------------


def short_prompt(trace: str, text: str) -> PromptRecord:
    return PromptRecord(trace, text, len(text), (Message("user", (Text(text[:40]),)),), (), text[:40])


def cause_of(seen: PromptHistory, session: str, one: PromptRecord, reused: int = 0) -> str:
    return seen.diagnose(("main", session), one, reused, lambda tokens: tokens).cause


def test_sessions_are_compared_separately() -> None:
    seen, text = PromptHistory(), "x" * 100
    assert cause_of(seen, "a", short_prompt("1", text)) == "new_session"
    assert cause_of(seen, "b", short_prompt("2", text)) == "new_session"
    assert cause_of(seen, "a", short_prompt("3", text + "y" * 50), 100) == "none"


def test_the_reply_is_expected_in_the_next_prompt() -> None:
    seen, text = PromptHistory(), "x" * 100
    first = short_prompt("1", text)
    cause_of(seen, "a", first)
    first.output = 50
    assert cause_of(seen, "a", short_prompt("2", text + "y" * 100), 100) == "template"


def test_a_retry_is_not_compared_with_its_first_attempt() -> None:
    seen, text = PromptHistory(), "x" * 100
    cause_of(seen, "a", short_prompt("1", text))
    assert cause_of(seen, "a", short_prompt("1", text)) == "new_session"


@pytest.mark.parametrize("bounds", [{"sessions": 3}, {"characters": 300}])
def test_the_oldest_sessions_are_dropped(bounds: dict[str, int]) -> None:
    seen = PromptHistory(**bounds)
    for name in "abcdef":
        cause_of(seen, name, short_prompt(name, "x" * 100))
    assert len(seen) == 3
    assert cause_of(seen, "a", short_prompt("again", "x" * 120), 100) == "new_session"


def test_a_single_session_may_exceed_the_bound() -> None:
    seen = PromptHistory(characters=10)
    for number in range(20):
        cause_of(seen, "a", short_prompt(str(number), "x" * (100 + number)), 99 + number)
    assert len(seen) == 1


# --- system prompts -------------------------------------------------------------------------------------------------


def system(*texts: str) -> Message:
    return Message("system", tuple(Text(text) for text in texts))


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def test_a_first_and_an_unchanged_system_prompt_are_no_change():
    seen = SystemPromptTracker()
    assert [seen.update("main", system("Be kind.")) for _ in range(3)] == [None] * 3


def test_a_change_has_both_fingerprints_and_is_reported_once():
    seen = SystemPromptTracker()
    seen.update("main", system("Be kind."))
    assert seen.update("main", system("Be brief.")) == SystemPromptChange(
        fingerprint(system("Be kind.")), fingerprint(system("Be brief."))
    )
    assert seen.update("main", system("Be brief.")) is None


def test_each_cache_is_tracked_separately():
    seen = SystemPromptTracker()
    seen.update("main", system("Be kind."))
    assert seen.update("fast", system("Find a title.")) is None
    assert seen.update("main", system("Be kind.")) is None


def test_fingerprints_are_short_and_stable_and_depend_on_part_boundaries():
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
def test_only_the_first_message_is_a_system_prompt(messages: tuple[Message, ...], expected: Message | None):
    assert leading_system(messages) == expected


@pytest.mark.parametrize(("position", "message"), [(0, 0), (5, 0), (12, 0), (18, 1), (22, 1), (30, 2), (99, 2)])
def test_a_character_belongs_to_the_last_message_that_begins_before_it(position: int, message: int):
    prompt = "<s>Be kind.</s><u>Hello</u><a>Hello</a>"
    talk = (system("Be kind."), user("Hello"), Message("assistant", (Text("Hello"),)))
    assert message_at(prompt, position, talk) == message


def test_messages_that_the_template_dropped_are_skipped():
    talk = (system("gone"), Message("user", (Image("data:,"),)), user("Hello"))
    assert message_at("<u>Hello", 4, talk) == 2
    assert message_at("nothing of it", 4, talk) == 0
