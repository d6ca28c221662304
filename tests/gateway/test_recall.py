"""What was generated for a call is put back next turn: for the same key only, within bounds, by any gateway."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.errors import Unavailable
from modelyard.core.events import Block, Finished, Reply, Started, Usage
from modelyard.core.request import Message, Request, Thinking, ToolCall
from modelyard.gateway.recall import Recall
from modelyard.store.memory import MemoryStore

OWN, ECHO = '{"b":1,"a":2}', '{"a": 2, "b": 1}'


def reply(id: str = "call_1", arguments: str = OWN) -> Reply:
    parts = (Thinking("Why not."), ToolCall(id, "t", arguments))
    return Reply(Started("r", "m", 0), tuple(map(Block, parts)), Finished("tool_calls", Usage()))


def asked(id: str = "call_1", arguments: str = ECHO) -> Request:
    return Request(model="m", messages=(Message("assistant", (ToolCall(id, "t", arguments),)),))


async def told(recall: Recall, key: str = "me", **call: str) -> tuple[str, ...]:
    message = (await recall.restored(asked(**call), key)).messages[0]
    return tuple(part.text if isinstance(part, Thinking) else part.arguments for part in message.parts)  # type: ignore[union-attr]


async def test_the_models_words_come_back_for_the_same_key_only() -> None:
    recall = Recall()
    recall.keep(reply(), "me")
    assert await told(recall) == ("Why not.", OWN)
    assert await told(recall, key="you") == (ECHO,)
    assert await told(recall, id="call_9") == (ECHO,)


async def test_a_request_that_nothing_is_known_of_is_the_same_object() -> None:
    recall, request = Recall(), asked()
    assert await recall.restored(request, "me") is request
    recall.keep(reply("other"), "me")
    assert await recall.restored(request, "me") is request


async def test_the_least_recently_used_words_leave_first() -> None:
    recall = Recall(characters=1500)
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
    recall = Recall(characters=100)
    recall.keep(reply(), "me")
    assert await told(recall) == (ECHO,)


async def test_another_gateway_finds_it_in_the_store_that_they_share() -> None:
    store = MemoryStore(10, 1 << 20, 60)
    one, other = Recall(store), Recall(store)
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
    recall = Recall(store, clock=lambda: now[0])
    for at, asked in ((0.0, 1), (0.1, 1), (60.0, 2), (600.0, 2)):
        now[0] = at
        assert await told(recall) == (ECHO,)
        assert store.asked == asked


async def test_words_that_reach_the_store_after_the_next_turn_are_found_by_the_one_after_it() -> None:
    store, now = Counting(10, 1 << 20, 60), [0.0]
    one, other = Recall(store), Recall(store, clock=lambda: now[0])
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
    recall = Recall(Away(10, 1 << 20, 60))
    assert await told(recall) == (ECHO,)
    assert "the scheduler is away" in caplog.text


async def test_it_is_blank_until_something_was_said_or_others_could_have() -> None:
    recall = Recall()
    assert recall.is_blank
    recall.keep(reply(), "me")
    assert not recall.is_blank
    assert not Recall(MemoryStore(10, 1 << 20, 60)).is_blank
