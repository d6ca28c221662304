"""What was generated for a call is put back next turn: for the same key only, within bounds, by any gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.core.errors import Unavailable
from modelyard.core.events import Block, Finished, Reply, Started, Usage
from modelyard.core.request import Message, Reasoning, Request, Text, Thinking, Tool, ToolCall
from modelyard.gateway.gateway import ChoiceStream
from modelyard.gateway.replay_memory import (
    GeneratedCall,
    ReplayMemory,
    as_message,
    call_ids,
    generated_calls,
    generated_reply,
    restored,
    with_line_breaks,
)
from modelyard.prompt.render import Renderer
from modelyard.prompt.template import ChatTemplate
from modelyard.prompt.template_source import builtin
from modelyard.store.memory import MemoryStore
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.gateway.harness import GatewayHarness, read
from tests.prompt.histories import TALKING, TOOL, ask, result, say
from tests.tokenizer import tokenizers_made as made

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
    async with GatewayHarness() as stage:
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


# What a client has re-serialised, reordered or left out is told in the model's own words; what it changed is not.

VOCAB = HuggingFaceTokenizer.from_text(made.byte_level())
OWNStability = '{"timeout":5000.0,  "path": "a.txt"}'


def reply_stability(*parts: Any) -> Reply:
    return Reply(Started("r", "m", 0), tuple(Block(part) for part in parts), Finished("tool_calls", Usage()))


def call(arguments: str, id: str = "call_1") -> ToolCall:
    return ToolCall(id, "read_file", arguments)


SAIDStability = generated_calls(
    reply_stability(Thinking("Look first."), Text("Looking."), call(OWNStability), call("{}", "call_2"))
)


def one(*parts: Any) -> Message:
    (message,) = restored([say("assistant", *parts)], SAIDStability)
    return message


def test_reasoning_is_kept_with_the_first_call_of_its_turn() -> None:
    assert set(SAIDStability) == {"call_1", "call_2"}
    assert (SAIDStability["call_1"], SAIDStability["call_2"]) == (
        GeneratedCall(OWNStability, "Look first."),
        GeneratedCall("{}"),
    )


def test_a_call_that_was_cut_off_is_nothing_to_remember() -> None:
    cut = Reply(Started("r", "m", 0), (Block(call('{"pa'), complete=False),), Finished("max_tokens", Usage()))
    assert generated_calls(cut) == {}


@pytest.mark.parametrize(
    "echo", [OWNStability, '{"path": "a.txt", "timeout": 5000}', '{"path":"a.txt","timeout":5000.0}']
)
def test_arguments_that_mean_the_same_are_in_the_models_own_words(echo: str) -> None:
    found = one(Thinking("Look first.", "sealed"), Text("Looking."), call(echo))
    assert found.parts[2] == ToolCall("call_1", "read_file", OWNStability, verbatim=True)
    assert found.parts[0] == Thinking("Look first.", "sealed")


@pytest.mark.parametrize("echo", ['{"path": "b.txt", "timeout": 5000}', '{"path": "a.t', "{}", "[1]"])
def test_arguments_that_mean_something_else_are_the_clients_word(echo: str) -> None:
    assert one(Thinking("Mine."), call(echo)).parts[1] == call(echo)


def test_reasoning_that_was_left_out_or_redacted_stands_in_front_again() -> None:
    assert one("Looking.", call(OWNStability)).parts[:2] == (Thinking("Look first."), Text("Looking."))
    assert one(Thinking("", "foreign", redacted=True), call(OWNStability)).parts[0] == Thinking("Look first.")
    assert not [part for part in one(call("{}", "call_2")).parts if isinstance(part, Thinking)]


def test_calls_of_others_and_other_roles_stay_as_they_are() -> None:
    talk = (say("user", "hi"), say("assistant", call(OWNStability, "foreign")), say("assistant", "text"))
    assert restored(talk, SAIDStability) == talk
    assert list(call_ids(talk)) == ["foreign"]


@pytest.mark.parametrize(
    ("raw", "separator", "expected"),
    [
        ("Looking.\n<call>", "\n", ""),
        ("Looking.\n\n<call>", "\n", "Looking.\n"),
        ("<think>Looking?</think>Looking.\n\n<call>", "", "Looking.\n\n"),
        ("Looking.<call>", "\n", ""),
        ("Looking. <call>", "\n", ""),
        ("Something else.<call>", "\n", ""),
    ],
)
def test_line_breaks_behind_a_text_are_told_but_for_the_templates_own(raw: str, separator: str, expected: str) -> None:
    assert with_line_breaks(reply_stability(Text("Looking."), call("{}")), raw, separator) == expected


def test_several_texts_or_none_are_told_as_they_are() -> None:
    assert with_line_breaks(reply_stability(Text("a"), call("{}"), Text("b")), "a\n\n<call>b", "\n") == ""
    assert with_line_breaks(reply_stability(call("{}")), "\n\n<call>", "\n") == ""


def test_a_text_is_told_with_its_line_breaks_where_it_is_the_same_text() -> None:
    said = generated_calls(reply_stability(Text("Looking."), call("{}")), "Looking.\n")
    same, other = (restored([say("assistant", text, call("{}"))], said)[0].parts[0] for text in ("Looking.", "No."))
    assert (same, other) == (Text("Looking.\n"), Text("No."))


# --- through real templates -------------------------------------------------------------------------------------------


def prompt(name: str, *echo: Any, known: bool = True) -> str:
    renderer = Renderer(ChatTemplate(builtin(name)), VOCAB)
    history = (say("user", "read it"), say("assistant", *echo), result("call_1"))
    return renderer.apply(ask(*(restored(history, SAIDStability) if known else history), tools=(TOOL,))).text


@pytest.mark.parametrize("name", TALKING)
def test_every_template_tells_a_reordered_call_as_it_tells_the_models_own(name: str) -> None:
    own = prompt(name, Thinking("Look first."), "Looking.", call(OWNStability))
    assert prompt(name, "Looking.", call('{"path": "a.txt", "timeout": 5000}')) == own
    assert prompt(name, "Looking.", call('{"path": "a.txt", "timeout": 5000}'), known=False) != own


@pytest.mark.parametrize("name", ["generic", "qwen3"])
def test_where_calls_are_json_they_are_spelled_as_they_were_generated(name: str) -> None:
    assert f'"arguments": {OWNStability}}}' in prompt(name, "Looking.", call('{"path": "a.txt", "timeout": 5000}'))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=4), VALUES, max_size=4), st.booleans(), st.booleans())
def test_whatever_the_arguments_an_echo_renders_as_what_was_said(
    value: dict[str, Any], compact: bool, escaped: bool
) -> None:
    own = json.dumps(value, separators=(",", ":") if compact else None, ensure_ascii=escaped)
    said = generated_calls(reply_stability(call(own)))
    echo = json.dumps(dict(reversed(value.items())), ensure_ascii=False)
    renderer = Renderer(ChatTemplate(builtin("generic")), VOCAB)

    def told(arguments: str) -> str:
        history = (say("user", "go"), say("assistant", call(arguments)), result("call_1"))
        return renderer.text(ask(*restored(history, said), tools=(TOOL,)))

    assert told(echo) == told(own)
