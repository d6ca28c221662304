"""The fake chat engine."""

import asyncio
from typing import Any

import pytest

from modelyard.core.engine import ChatEngine, Generation
from modelyard.core.errors import Cancelled, InvalidRequest, ModelyardError, Unavailable
from modelyard.core.events import BlockDelta, BlockEnd, BlockStart, Event, Failed, Finished, Started, collect_reply
from modelyard.core.request import Constraint, Message, Request, Text, Tool, ToolChoice
from tests.engines.fake.helpers import chat_engine

WEATHER = Tool("get_weather", parameters={"type": "object", "properties": {}, "required": ["city"]})


def request(text: str = "hello", **fields: Any) -> Request:
    return Request(model="m", messages=(Message("user", (Text(text),)),), **fields)


async def read(generation: Generation[Event]) -> list[Event]:
    return [event async for batch in generation for event in batch]


async def play(*steps: dict[str, Any], request_: Request | None = None, **options: Any) -> list[Event]:
    engine = await chat_engine(script=[{"when": "", "steps": steps}], **options)
    return await read(engine.chat(request_ or request()))


def check_order(events: list[Event]) -> None:
    """One open block at a time, indices from 0, one final event."""
    index, is_open = -1, False
    for event in events:
        if isinstance(event, BlockStart):
            assert not is_open
            assert event.index == index + 1
            index, is_open = event.index, True
        elif isinstance(event, BlockDelta | BlockEnd):
            assert is_open
            assert event.index == index
            is_open = not isinstance(event, BlockEnd)
    assert not is_open
    assert sum(isinstance(e, Finished | Failed) for e in events) == 1
    assert isinstance(events[-1], Finished | Failed)


async def test_steps_become_blocks() -> None:
    calls = [{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]
    events = await play({"think": "hm"}, {"text": "one "}, {"text": "two"}, {"call": calls}, {"text": "end"})
    check_order(events)
    reply = collect_reply(events)
    assert (reply.thinking, reply.text) == ("hm", "one twoend")
    assert [(c.name, c.arguments) for c in reply.calls] == [("f", '{"a": 1}'), ("g", "{}")]
    assert [type(b.part).__name__ for b in reply.blocks] == ["Thinking", "Text", "ToolCall", "ToolCall", "Text"]
    assert reply.finished.reason == "tool_calls"
    assert 0 < reply.finished.usage.reasoning < reply.finished.usage.output


async def test_engine_satisfies_the_protocol_and_counts() -> None:
    engine = await chat_engine()
    assert isinstance(engine, ChatEngine)
    short, long = await engine.count(request("hi")), await engine.count(request("hi " * 50, tools=(WEATHER,)))
    assert short is not None
    assert long is not None
    assert 0 < short < long


async def test_started_names_the_model_and_the_prompt() -> None:
    started = (await play({"text": "x"}))[0]
    assert isinstance(started, Started)
    assert started.model == "m"
    assert started.usage.prompt > 0


async def test_deltas_come_token_by_token_with_a_delay() -> None:
    events = await play({"text": "one two three"}, token_delay=0.001)
    deltas = [event.text for event in events if isinstance(event, BlockDelta)]
    assert len(deltas) > 2
    assert "".join(deltas) == "one two three"


async def test_multi_byte_characters_are_never_split() -> None:
    events = await play({"text": "你好 🎉"}, token_delay=0.0001)
    assert [event.text for event in events if isinstance(event, BlockDelta)] == ["你", "好", " ", "🎉"]


async def test_max_tokens_ends_the_answer() -> None:
    events = await play({"tokens": 10}, {"text": "never"}, request_=request(max_tokens=4))
    check_order(events)
    finished = collect_reply(events).finished
    assert (finished.reason, finished.usage.output) == ("max_tokens", 4)


async def test_call_cut_by_the_limit_is_not_a_call() -> None:
    reply = collect_reply(
        await play({"call": {"name": "f", "arguments": {"long": "x" * 99}}}, request_=request(max_tokens=3))
    )
    assert reply.calls == ()
    assert reply.finished.reason == "max_tokens"


async def test_stop_string_cuts_visible_text_only() -> None:
    steps = ({"think": "STOP here"}, {"text": "go on STOP now"})
    reply = collect_reply(await play(*steps, request_=request(stop=("now", "STOP"))))
    assert (reply.thinking, reply.text) == ("STOP here", "go on ")
    assert (reply.finished.reason, reply.finished.stop_string) == ("stop_string", "STOP")


async def test_failure_as_the_first_step_is_the_only_event() -> None:
    (failed,) = await play({"fail": "no", "kind": "invalid"})
    assert failed == Failed(InvalidRequest("no"))


async def test_failure_during_a_block_closes_it_first() -> None:
    events = await play({"text": "so far"}, {"fail": "broken", "kind": "unavailable"})
    check_order(events)
    assert events[-2:] == [BlockEnd(0, complete=False), Failed(Unavailable("broken"))]


async def test_death_ends_all_jobs_and_resolves_lost() -> None:
    script = [{"when": "die", "steps": [{"delay": 0}, {"die": "gone"}]}, {"when": "", "steps": [{"hang": True}]}]
    engine = await chat_engine(script=script)
    other = engine.chat(request("live"))
    assert (await read(engine.chat(request("die"))))[-1] == Failed(Unavailable("gone"))
    assert (await read(other))[-1] == Failed(Unavailable("gone"))
    assert await engine.lost == Unavailable("gone")
    assert await read(engine.chat(request())) == [Failed(Unavailable("gone"))]


@pytest.mark.parametrize("steps", [[{"prefill": 60}], [{"text": "a"}, {"delay": 60}], [{"think": "a"}, {"hang": True}]])
async def test_cancel_ends_the_job_at_once(steps: list[dict[str, Any]]) -> None:
    engine = await chat_engine(script=[{"steps": steps}])
    generation = engine.chat(request())
    await asyncio.sleep(0)
    generation.cancel()
    assert engine.stats().running == 0
    events = await read(generation)
    check_order(events)
    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error, Cancelled)


async def test_constraint_and_forced_tools_are_obeyed() -> None:
    engine = await chat_engine()
    made = collect_reply(await read(engine.chat(request(constraint=Constraint("json_object")))))
    assert made.text == "{}"
    for choice in (ToolChoice("required"), ToolChoice("named", "get_weather")):
        called = collect_reply(await read(engine.chat(request(tools=(WEATHER,), tool_choice=choice))))
        assert [(c.name, c.arguments) for c in called.calls] == [("get_weather", '{"city": "text"}')]


async def test_crash_inside_the_engine_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await chat_engine()

    def broken(_: Request) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(engine, "count_tokens", broken)
    (failed,) = await read(engine.chat(request()))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, ModelyardError)
    assert failed.error.kind == "internal"


async def test_repeats_are_played() -> None:
    assert collect_reply(await play({"repeat": 3, "steps": [{"raw": "a"}, {"hang": False}]})).text == "aaa"
