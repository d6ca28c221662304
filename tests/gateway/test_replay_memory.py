"""What was generated for a call is put back next turn: for the same key only, within bounds, by any gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from modelyard.core.errors import Unavailable
from modelyard.core.events import Block, Finished, Reply, Started, Usage
from modelyard.core.request import Message, Reasoning, Request, Text, Thinking, Tool, ToolCall
from modelyard.gateway.gateway import ChoiceStream
from modelyard.gateway.replay_memory import ReplayMemory, as_message, generated_reply
from modelyard.store.memory import MemoryStore
from tests.gateway.stage import Stage, read

OWN, ECHO = '{"b":1,"a":2}', '{"a": 2, "b": 1}'


def reply(id: str = "call_1", arguments: str = OWN) -> Reply:
    parts = (Thinking("Why not."), ToolCall(id, "t", arguments))
    return Reply(Started("r", "m", 0), tuple(map(Block, parts)), Finished("tool_calls", Usage()))


def asked(id: str = "call_1", arguments: str = ECHO) -> Request:
    return Request(model="m", messages=(Message("assistant", (ToolCall(id, "t", arguments),)),))


async def told(recall: ReplayMemory, key: str = "me", **call: str) -> tuple[str, ...]:
    message = (await recall.restore(asked(**call), key)).messages[0]
    return tuple(part.text if isinstance(part, Thinking) else part.arguments for part in message.parts)  # type: ignore[union-attr]


async def test_the_models_words_come_back_for_the_same_key_only() -> None:
    recall = ReplayMemory()
    recall.keep(reply(), "me")
    assert await told(recall) == ("Why not.", OWN)
    assert await told(recall, key="you") == (ECHO,)
    assert await told(recall, id="call_9") == (ECHO,)


async def test_a_request_that_nothing_is_known_of_is_the_same_object() -> None:
    recall, request = ReplayMemory(), asked()
    assert await recall.restore(request, "me") is request
    recall.keep(reply("other"), "me")
    assert await recall.restore(request, "me") is request


async def test_the_least_recently_used_words_leave_first() -> None:
    recall = ReplayMemory(max_chars=1500)
    for number in range(5):
        recall.keep(reply(f"call_{number}", f'{{"a": "{"x" * 100}"}}'), "me")
        await told(recall, id="call_0", arguments=f'{{"a":"{"x" * 100}"}}')
    known = [
        id
        for id in map("call_{}".format, range(5))
        if len(await told(recall, id=id, arguments=f'{{"a":"{"x" * 100}"}}')) == 2
    ]
    assert known == ["call_0", "call_2", "call_3", "call_4"]


async def test_what_is_larger_than_the_bound_is_not_kept() -> None:
    recall = ReplayMemory(max_chars=100)
    recall.keep(reply(), "me")
    assert await told(recall) == (ECHO,)


async def test_another_gateway_finds_it_in_the_store_that_they_share() -> None:
    store = MemoryStore(10, 1 << 20, 60)
    one, other = ReplayMemory(store), ReplayMemory(store)
    await one.share(one.keep(reply(), "me"), "me")
    assert await told(other) == ("Why not.", OWN)
    assert await told(other, key="you") == (ECHO,)


class Counting(MemoryStore):
    asked = 0

    async def get(self, scope: str, key: str) -> bytes | None:
        self.asked += 1
        return await super().get(scope, key)


async def test_the_store_is_asked_twice_for_a_call_that_nobody_knows_and_then_no_more() -> None:
    store, now = Counting(10, 1 << 20, 60), [0.0]
    recall = ReplayMemory(store, clock=lambda: now[0])
    for at, asked in ((0.0, 1), (0.1, 1), (60.0, 2), (600.0, 2)):
        now[0] = at
        assert await told(recall) == (ECHO,)
        assert store.asked == asked


async def test_words_that_reach_the_store_after_the_next_turn_are_found_by_the_one_after_it() -> None:
    store, now = Counting(10, 1 << 20, 60), [0.0]
    one, other = ReplayMemory(store), ReplayMemory(store, clock=lambda: now[0])
    said = one.keep(reply(), "me")
    assert await told(other) == (ECHO,)
    await one.share(said, "me")
    now[0] = 60.0
    assert await told(other) == ("Why not.", OWN)
    assert await told(other) == ("Why not.", OWN)
    assert store.asked == 2


class Away(MemoryStore):
    async def get(self, scope: str, key: str) -> Any:
        raise Unavailable("the scheduler is away")


async def test_a_store_that_cannot_be_asked_costs_words_and_not_the_answer(caplog: pytest.LogCaptureFixture) -> None:
    recall = ReplayMemory(Away(10, 1 << 20, 60))
    assert await told(recall) == (ECHO,)
    assert "the scheduler is away" in caplog.text


async def test_it_is_blank_until_something_was_said_or_others_could_have() -> None:
    recall = ReplayMemory()
    assert recall.is_empty
    recall.keep(reply(), "me")
    assert not recall.is_empty
    assert not ReplayMemory(MemoryStore(10, 1 << 20, 60)).is_empty


# What was said is heard whole: with the reasoning that the client was not shown, and only where somebody listens.

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
        source = answer if isinstance(answer, ChoiceStream) else answer._shared.source  # type: ignore[union-attr]
        reply = generated_reply(source.prepared, source.events, source.output.ids, last.usage)
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
