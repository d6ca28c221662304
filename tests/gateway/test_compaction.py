"""What is cleared and cut of a long conversation, as values; tests/e2e/test_long_conversations.py shows the whole."""

from __future__ import annotations

import pytest

from modelyard.core.request import ClearToolUses, Message, Request, Role, Text, Thinking, ToolCall, ToolResult
from modelyard.gateway.compaction import (
    Summaries,
    clear_thinking,
    clear_tool_uses,
    shortened,
    split_head,
    split_tail,
)


def said(role: Role, text: str = "hello") -> Message:
    return Message(role, (Text(text),))


def used(number: int, name: str = "look") -> tuple[Message, Message]:
    call = ToolCall(f"c{number}", name, '{"at": "mat"}')
    return Message("assistant", (Thinking("Hm."), call)), Message("tool", (ToolResult(call.id, (Text("mat " * 100),)),))


AGENT = Request(model="m", messages=(said("system"), said("user"), *used(0), *used(1, "write"), *used(2), *used(3)))


def results(request: Request) -> list[bool]:
    """Whether each result is still there."""
    parts = [part for message in request.messages for part in message.parts if isinstance(part, ToolResult)]
    return [part.content[0].text.startswith("mat") for part in parts if isinstance(part.content[0], Text)]


@pytest.mark.parametrize(
    ("edit", "left"),
    [
        (ClearToolUses(keep=1, above_tokens=100), [False, False, False, True]),
        (ClearToolUses(keep=1, above_tokens=100, exclude=("write",)), [False, True, False, True]),
        (ClearToolUses(keep=0, above_tokens=0, above_uses=3), [False] * 4),
        (ClearToolUses(keep=1, above_tokens=0, above_uses=4), [True] * 4),
        (ClearToolUses(keep=1, above_tokens=1000), [True] * 4),
        (ClearToolUses(keep=1, above_tokens=100, at_least=10_000), [True] * 4),
    ],
)
def test_old_results_are_cleared_beyond_the_trigger(edit: ClearToolUses, left: list[bool]) -> None:
    cleared, made = clear_tool_uses(AGENT, edit, tokens=500)
    assert results(cleared) == left
    assert (made or {}).get("cleared_tool_uses", 0) == left.count(False)
    assert clear_tool_uses(cleared, edit, tokens=500)[1] is None  # what is cleared is not cleared again


def test_arguments_are_cleared_of_the_tools_that_are_named() -> None:
    edit = ClearToolUses(keep=0, above_tokens=0, inputs=("write",))
    calls = [p for m in clear_tool_uses(AGENT, edit, 9)[0].messages for p in m.parts if isinstance(p, ToolCall)]
    assert [call.arguments == "{}" for call in calls] == [False, True, False, False]


def test_the_reasoning_of_the_newest_turns_stays() -> None:
    request, edit = clear_thinking(AGENT, 1)
    kept = [m for m in request.messages if any(isinstance(part, Thinking) for part in m.parts)]
    assert (kept, edit and edit["cleared_thinking_turns"]) == ([AGENT.messages[-2]], 3)
    assert clear_thinking(request, 1) == (request, None)


@pytest.mark.parametrize(("chars", "at"), [(0, 8), (500, 8), (900, 6), (10_000, 0)])
def test_the_newest_turns_never_begin_with_a_result(chars: int, at: int) -> None:
    assert split_tail(AGENT.messages, chars) == at
    assert AGENT.messages[at].role != "tool"
    assert split_head(AGENT.messages) == 1


def test_a_text_that_does_not_fit_keeps_its_two_ends() -> None:
    (part,) = shortened(said("user", "a" * 500 + "b" * 500), 20).parts
    assert part == Text("a" * 10 + "\n[980 characters]\n" + "b" * 10)
    _, result = used(0)
    (cut,) = shortened(result, 20).parts
    assert isinstance(cut, ToolResult)
    assert cut.content == (Text("mat mat ma\n[380 characters]\nt mat mat "),)


def test_the_oldest_summaries_are_forgotten() -> None:
    summaries = Summaries()
    for number in range(600):
        summaries.add(str(number).encode(), "s")
        assert summaries.get(b"0") is not None  # read all the time
    assert (summaries.get(b"1"), summaries.get(b"599")) == (None, "s")
    summaries.add(b"large", "x" * (9 << 20))
    assert summaries.get(b"large") is None
