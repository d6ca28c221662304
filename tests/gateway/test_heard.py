"""What was said is heard whole: with the reasoning that the client was not shown, and only where somebody listens."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from modelyard.core.events import Finished
from modelyard.core.request import Reasoning, Text, Thinking, Tool, ToolCall
from modelyard.gateway.answer import Answer
from modelyard.gateway.heard import as_message, heard
from tests.gateway.stage import Stage, read

LOOK = Tool("look", "Looks.", {"type": "object", "properties": {}})
SAID = '<think>\nWhy not.\n</think>\n\nLooking.\n<tool_call>\n{"name": "look", "arguments": {"b":1}}\n</tool_call>'


async def said(**request: Any) -> tuple[Any, ...] | None:
    async with Stage() as stage:
        answer = await stage.start(**request)
        reading = asyncio.create_task(read(answer))
        (await stage.job()).whole(SAID)
        last = (await reading)[-1]
        answer.close()
        assert isinstance(last, Finished)
        source = answer if isinstance(answer, Answer) else answer._shared.source  # type: ignore[union-attr]
        reply = heard(source, last.usage)
    return None if reply is None else as_message(reply).parts


@pytest.mark.parametrize("visible", [True, False, None])
async def test_reasoning_is_heard_whether_it_was_shown_or_not(visible: bool | None) -> None:
    parts = await said(tools=(LOOK,), reasoning=Reasoning(visible=visible))
    assert parts is not None
    thought, text, call = parts
    assert (thought, text) == (Thinking("Why not."), Text("Looking."))
    assert isinstance(call, ToolCall)
    assert call.arguments == '{"b":1}'


async def test_nobody_listens_to_an_answer_without_tools() -> None:
    assert await said() is None
