"""Replay memory restores generated text in the next turn: for the same key only, within bounds, across gateways."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from modelyard.core.errors import Unavailable
from modelyard.core.events import Block, Finished, Reply, Started, Usage, collect_reply
from modelyard.core.request import Message, Reasoning, Request, Text, Thinking, Tool, ToolCall
from modelyard.gateway.replay_memory import (
    GeneratedCall,
    ReplayMemory,
    call_ids,
    generated_calls,
    restored,
    with_line_breaks,
)
from modelyard.prompt.render import Renderer
from modelyard.prompt.template import ChatTemplate
from modelyard.prompt.template_source import builtin
from modelyard.store import MemoryStore
from modelyard.tokenizer.huggingface import HuggingFaceTokenizer
from tests.gateway.harness import CALLER, GatewayHarness, read_events
from tests.prompt.histories import CHAT_TEMPLATES, TOOL, make_message, make_request, tool_result
from tests.tokenizer import sample_tokenizers

GENERATED, ECHOED = '{"b":1,"a":2}', '{"a": 2, "b": 1}'


def reply(id: str = "call_1", arguments: str = GENERATED) -> Reply:
    parts = (Thinking("Why not."), ToolCall(id, "t", arguments))
    return Reply(Started("r", "m", 0), tuple(map(Block, parts)), Finished("tool_calls", Usage()))


def echo_request(id: str = "call_1", arguments: str = ECHOED) -> Request:
    return Request(model="m", messages=(Message("assistant", (ToolCall(id, "t", arguments),)),))


async def restored_parts(memory: ReplayMemory, key: str = "me", **call: str) -> tuple[str, ...]:
    message = (await memory.restore(echo_request(**call), key)).messages[0]
    return tuple(part.text if isinstance(part, Thinking) else part.arguments for part in message.parts)  # type: ignore[union-attr]


async def test_generated_text_is_restored_for_the_same_key_only() -> None:
    memory = ReplayMemory()
    memory.keep(reply(), "me")
    assert await restored_parts(memory) == ("Why not.", GENERATED)
    assert await restored_parts(memory, key="you") == (ECHOED,)
    assert await restored_parts(memory, id="call_9") == (ECHOED,)


async def test_a_request_with_unknown_calls_is_returned_unchanged() -> None:
    memory, request = ReplayMemory(), echo_request()
    assert await memory.restore(request, "me") is request
    memory.keep(reply("other"), "me")
    assert await memory.restore(request, "me") is request


async def test_the_least_recently_used_entries_are_evicted_first() -> None:
    memory = ReplayMemory(max_chars=1500)
    for number in range(5):
        memory.keep(reply(f"call_{number}", f'{{"a": "{"x" * 100}"}}'), "me")
        await restored_parts(memory, id="call_0", arguments=f'{{"a":"{"x" * 100}"}}')
    kept = [
        id
        for id in map("call_{}".format, range(5))
        if len(await restored_parts(memory, id=id, arguments=f'{{"a":"{"x" * 100}"}}')) == 2
    ]
    assert kept == ["call_0", "call_2", "call_3", "call_4"]


async def test_an_entry_larger_than_the_limit_is_not_kept() -> None:
    memory = ReplayMemory(max_chars=100)
    memory.keep(reply(), "me")
    assert await restored_parts(memory) == (ECHOED,)


@pytest.mark.parametrize("field", ["arguments", "thinking", "text"])
async def test_the_memory_holds_as_many_characters_as_it_may(field: str) -> None:
    """Whatever they belong to; 200 more count for each entry."""
    memory = ReplayMemory(max_chars=3600)
    for number in range(9):
        generated = {"arguments": "{}", "thinking": "", "text": ""}
        long = generated | {field: '"' + "x" * 998 + '"'}
        parts = (Thinking(long["thinking"]), ToolCall(f"call_{number}", "t", long["arguments"]))
        kept = Reply(Started("r", "m", 0), tuple(map(Block, parts)), Finished("tool_calls", Usage()))
        memory.keep(kept, "me", long["text"])
    found = await memory.restore(
        Request(
            model="m",
            messages=tuple(Message("assistant", (ToolCall(f"call_{n}", "t", long["arguments"]),)) for n in range(9)),
        ),
        "me",
    )
    restored_calls = [call for message in found.messages for call in message.parts if isinstance(call, ToolCall)]
    # 1,200 characters each with a long argument; its two characters of arguments come to the other long fields
    expected = 3 if field == "arguments" else 2
    assert [call.verbatim for call in restored_calls] == [False] * (9 - expected) + [True] * expected


async def test_an_entry_that_is_kept_again_takes_its_size_once() -> None:
    memory = ReplayMemory(max_chars=1000)
    memory.keep(reply("call_0"), "me")
    for _ in range(20):
        memory.keep(reply("call_1"), "me")
    assert await restored_parts(memory, id="call_0") == ("Why not.", GENERATED)


async def test_entries_that_were_evicted_take_no_size() -> None:
    memory = ReplayMemory(max_chars=1000)
    for number in range(50):
        memory.keep(reply(f"call_{number}"), "me")
    kept = [n for n in range(50) if len(await restored_parts(memory, id=f"call_{n}")) == 2]
    assert kept == [46, 47, 48, 49]


async def test_another_gateway_finds_entries_in_the_shared_store() -> None:
    store = MemoryStore(10, 1 << 20, 60)
    first, other = ReplayMemory(store), ReplayMemory(store)
    await first.share(first.keep(reply(), "me"), "me")
    assert await restored_parts(other) == ("Why not.", GENERATED)
    assert await restored_parts(other, key="you") == (ECHOED,)


class CountingStore(MemoryStore):
    reads = 0

    async def get(self, scope: str, key: str) -> bytes | None:
        self.reads += 1
        return await super().get(scope, key)


async def test_the_store_is_read_at_most_twice_for_an_unknown_call() -> None:
    store, now = CountingStore(10, 1 << 20, 60), [0.0]
    memory = ReplayMemory(store, clock=lambda: now[0])
    for time, reads in ((0.0, 1), (0.1, 1), (60.0, 2), (600.0, 2)):
        now[0] = time
        assert await restored_parts(memory) == (ECHOED,)
        assert store.reads == reads


async def test_an_entry_that_reaches_the_store_late_is_found_one_turn_later() -> None:
    store, now = CountingStore(10, 1 << 20, 60), [0.0]
    first, other = ReplayMemory(store), ReplayMemory(store, clock=lambda: now[0])
    generated = first.keep(reply(), "me")
    assert await restored_parts(other) == (ECHOED,)
    await first.share(generated, "me")
    now[0] = 60.0
    assert await restored_parts(other) == ("Why not.", GENERATED)
    assert await restored_parts(other) == ("Why not.", GENERATED)
    assert store.reads == 2


class UnavailableStore(MemoryStore):
    async def get(self, scope: str, key: str) -> Any:
        raise Unavailable("the scheduler is unavailable")


async def test_an_unavailable_store_does_not_fail_the_request(caplog: pytest.LogCaptureFixture) -> None:
    memory = ReplayMemory(UnavailableStore(10, 1 << 20, 60))
    assert await restored_parts(memory) == (ECHOED,)
    assert "the scheduler is unavailable" in caplog.text


async def test_a_memory_is_empty_until_it_has_an_entry_or_a_shared_store() -> None:
    memory = ReplayMemory()
    assert memory.is_empty
    memory.keep(reply(), "me")
    assert not memory.is_empty
    assert not ReplayMemory(MemoryStore(10, 1 << 20, 60)).is_empty


# --- recording a reply: complete, with hidden reasoning, and only for requests with tools -----------------------------

LOOK = Tool("look", "Looks.", {"type": "object", "properties": {}})
GENERATED_TEXT = (
    '<think>\nWhy not.\n</think>\n\nLooking.\n<tool_call>\n{"name": "look", "arguments": {"b":1}}\n</tool_call>'
)


async def next_turn(**request: Any) -> tuple[Any, ...]:
    """The parts of a reply as the next prompt has them, after the client has returned the text and the calls."""
    async with GatewayHarness() as harness:
        stream = await harness.start(**request)
        reading = asyncio.create_task(read_events(stream))
        (await harness.generation()).finish(GENERATED_TEXT)
        reply = collect_reply(await reading)
        stream.close()
        returned = tuple(replace(call, arguments=" " + call.arguments) for call in reply.calls)
        messages = (Message("assistant", (Text("Looking."), *returned)), Message("user", (Text("Go on."),)))
        prepared = await harness.gateway.prepare(Request(model="demo", messages=messages), CALLER)
        return prepared.request.messages[0].parts


@pytest.mark.parametrize("visible", [True, False, None])
async def test_reasoning_is_recorded_even_if_hidden(visible: bool | None) -> None:
    thought, text, call = await next_turn(tools=(LOOK,), reasoning=Reasoning(visible=visible))
    assert (thought, text) == (Thinking("Why not."), Text("Looking."))
    assert isinstance(call, ToolCall)
    assert call.arguments == '{"b":1}'


async def test_a_reply_without_tools_is_not_recorded() -> None:
    assert await next_turn() == (Text("Looking."),)


# --- restoring: reserialised, reordered or omitted parts become the generated text; changed parts stay ----------------

VOCAB = HuggingFaceTokenizer.from_text(sample_tokenizers.byte_level())
GENERATED_ARGUMENTS = '{"timeout":5000.0,  "path": "a.txt"}'


def make_reply(*parts: Any) -> Reply:
    return Reply(Started("r", "m", 0), tuple(Block(part) for part in parts), Finished("tool_calls", Usage()))


def call(arguments: str, id: str = "call_1") -> ToolCall:
    return ToolCall(id, "read_file", arguments)


GENERATED_CALLS = generated_calls(
    make_reply(Thinking("Look first."), Text("Looking."), call(GENERATED_ARGUMENTS), call("{}", "call_2"))
)


def restore_turn(*parts: Any) -> Message:
    (message,) = restored([make_message("assistant", *parts)], GENERATED_CALLS)
    return message


def test_reasoning_is_kept_with_the_first_call_of_its_turn() -> None:
    assert set(GENERATED_CALLS) == {"call_1", "call_2"}
    assert (GENERATED_CALLS["call_1"], GENERATED_CALLS["call_2"]) == (
        GeneratedCall(GENERATED_ARGUMENTS, "Look first."),
        GeneratedCall("{}"),
    )


def test_an_incomplete_call_is_not_recorded() -> None:
    cut = Reply(Started("r", "m", 0), (Block(call('{"pa'), complete=False),), Finished("max_tokens", Usage()))
    assert generated_calls(cut) == {}


@pytest.mark.parametrize(
    "echo", [GENERATED_ARGUMENTS, '{"path": "a.txt", "timeout": 5000}', '{"path":"a.txt","timeout":5000.0}']
)
def test_equal_arguments_become_the_generated_text(echo: str) -> None:
    found = restore_turn(Thinking("Look first.", "sealed"), Text("Looking."), call(echo))
    assert found.parts[2] == ToolCall("call_1", "read_file", GENERATED_ARGUMENTS, verbatim=True)
    assert found.parts[0] == Thinking("Look first.", "sealed")


@pytest.mark.parametrize("echo", ['{"path": "b.txt", "timeout": 5000}', '{"path": "a.t', "{}", "[1]"])
def test_changed_arguments_stay_as_the_client_sent_them(echo: str) -> None:
    assert restore_turn(Thinking("Mine."), call(echo)).parts[1] == call(echo)


def test_omitted_or_redacted_reasoning_is_restored() -> None:
    assert restore_turn("Looking.", call(GENERATED_ARGUMENTS)).parts[:2] == (Thinking("Look first."), Text("Looking."))
    assert restore_turn(Thinking("", "foreign", redacted=True), call(GENERATED_ARGUMENTS)).parts[0] == Thinking(
        "Look first."
    )
    assert not [part for part in restore_turn(call("{}", "call_2")).parts if isinstance(part, Thinking)]


def test_unknown_calls_and_other_roles_are_unchanged() -> None:
    talk = (
        make_message("user", "hi"),
        make_message("assistant", call(GENERATED_ARGUMENTS, "foreign")),
        make_message("assistant", "text"),
    )
    assert restored(talk, GENERATED_CALLS) == talk
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
def test_line_breaks_after_a_text_are_kept_except_those_of_the_template(
    raw: str, separator: str, expected: str
) -> None:
    assert with_line_breaks(make_reply(Text("Looking."), call("{}")), raw, separator) == expected


def test_line_breaks_are_kept_only_for_a_single_text() -> None:
    assert with_line_breaks(make_reply(Text("a"), call("{}"), Text("b")), "a\n\n<call>b", "\n") == ""
    assert with_line_breaks(make_reply(call("{}")), "\n\n<call>", "\n") == ""


def test_line_breaks_are_restored_only_if_the_text_is_equal() -> None:
    generated = generated_calls(make_reply(Text("Looking."), call("{}")), "Looking.\n")
    same, other = (
        restored([make_message("assistant", text, call("{}"))], generated)[0].parts[0] for text in ("Looking.", "No.")
    )
    assert (same, other) == (Text("Looking.\n"), Text("No."))


# --- through real templates -------------------------------------------------------------------------------------------


def prompt(name: str, *echo: Any, kept: bool = True) -> str:
    renderer = Renderer(ChatTemplate(builtin(name)), VOCAB)
    history = (make_message("user", "read it"), make_message("assistant", *echo), tool_result("call_1"))
    return renderer.apply(make_request(*(restored(history, GENERATED_CALLS) if kept else history), tools=(TOOL,))).text


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_every_template_renders_a_reordered_call_like_the_generated_one(name: str) -> None:
    own = prompt(name, Thinking("Look first."), "Looking.", call(GENERATED_ARGUMENTS))
    assert prompt(name, "Looking.", call('{"path": "a.txt", "timeout": 5000}')) == own
    assert prompt(name, "Looking.", call('{"path": "a.txt", "timeout": 5000}'), kept=False) != own


@pytest.mark.parametrize("name", ["generic", "qwen3"])
def test_templates_with_json_calls_render_the_generated_text(name: str) -> None:
    assert f'"arguments": {GENERATED_ARGUMENTS}}}' in prompt(
        name, "Looking.", call('{"path": "a.txt", "timeout": 5000}')
    )


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=4), VALUES, max_size=4), st.booleans(), st.booleans())
def test_an_echoed_call_renders_like_the_generated_one(value: dict[str, Any], compact: bool, escaped: bool) -> None:
    own = json.dumps(value, separators=(",", ":") if compact else None, ensure_ascii=escaped)
    generated = generated_calls(make_reply(call(own)))
    echo = json.dumps(dict(reversed(value.items())), ensure_ascii=False)
    renderer = Renderer(ChatTemplate(builtin("generic")), VOCAB)

    def restored_parts(arguments: str) -> str:
        history = (make_message("user", "go"), make_message("assistant", call(arguments)), tool_result("call_1"))
        return renderer.text(make_request(*restored(history, generated), tools=(TOOL,)))

    assert restored_parts(echo) == restored_parts(own)
