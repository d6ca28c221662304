from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings

from modelyard.core.errors import InvalidRequest
from modelyard.core.events import Reply, collect_reply
from modelyard.core.request import Message, Request, Text, Thinking, Tool, ToolCall, ToolResult, ToolServer
from modelyard.protocols import openai_responses
from modelyard.protocols.openai_responses.stored import decode_stored, encode_thread, prepend_stored
from tests.protocols.openai_responses.helpers import CASES
from tests.strategies import replies, requests

USER = Message("user", (Text("hi"),))
FIRST = Request(model="m", messages=(Message("system", (Text("old orders"),)), USER), instructions=True)
REPLY = collect_reply(CASES["reasoning"][1])
ANSWER = Message("assistant", (Thinking("Thinking."), Text("Done.")))
NEXT = Message("user", (Text("and now?"),))


def continued(first: Request, reply: Reply, request: Request) -> Request:
    return openai_responses.prepend_stored(
        openai_responses.decode_stored(openai_responses.encode_stored(first, reply)), request
    )


def test_a_request_continues_the_stored_conversation() -> None:
    request = Request(model="m", messages=(NEXT,), previous="resp_abc123")
    assert continued(FIRST, REPLY, request).messages == (USER, ANSWER, NEXT)


def test_new_instructions_come_first_and_replace_the_old_ones() -> None:
    orders = Message("system", (Text("new orders"),))
    request = Request(model="m", messages=(orders, NEXT), instructions=True)
    assert continued(FIRST, REPLY, request).messages == (orders, USER, ANSWER, NEXT)


def test_a_system_message_in_the_input_is_part_of_the_conversation() -> None:
    lead = Message("system", (Text("always"),))
    first = Request(model="m", messages=(lead, USER))
    assert continued(first, REPLY, Request(model="m", messages=(NEXT,))).messages == (lead, USER, ANSWER, NEXT)


def test_tool_results_follow_the_stored_call() -> None:
    result = Message("tool", (ToolResult("call_1", (Text("a.txt"),)),))
    request = continued(FIRST, collect_reply(CASES["one_tool"][1]), Request(model="m", messages=(result,)))
    call = ToolCall("call_1", "shell", '{"command":"ls"}')
    assert request.messages == (USER, Message("assistant", (call,)), result)


def test_a_result_without_its_call_is_refused() -> None:
    result = Message("tool", (ToolResult("call_2", (Text("a.txt"),)),))
    with pytest.raises(InvalidRequest, match="'call_2'") as refused:
        continued(FIRST, collect_reply(CASES["one_tool"][1]), Request(model="m", messages=(result,)))
    assert (refused.value.code, refused.value.param) == ("tool_call_not_found", "input")
    call = Message("assistant", (ToolCall("call_2", "shell", "{}"),))
    assert continued(FIRST, REPLY, Request(model="m", messages=(call, result))).messages[-2:] == (call, result)


def test_an_incomplete_call_is_not_stored() -> None:
    request = continued(FIRST, collect_reply(CASES["cut_call"][1]), Request(model="m", messages=(NEXT,)))
    assert request.messages == (USER, Message("assistant", ()), NEXT)


def test_the_stored_response_equals_the_reply() -> None:
    assert openai_responses.decode_stored(
        openai_responses.encode_stored(FIRST, REPLY)
    ).response == openai_responses.write_reply([REPLY], FIRST)


@settings(deadline=None, max_examples=50)
@given(requests(custom=True, namespaces=True, redacted=True, broken=True, errors=True, references=True), replies())
def test_every_message_is_stored(request: Request, reply: Reply) -> None:
    stored = openai_responses.decode_stored(openai_responses.encode_stored(request, reply))
    assert stored.messages[:-1] == request.messages
    assert stored.messages[-1].parts == tuple(block.part for block in reply.blocks)


def test_input_items_are_listed_newest_first() -> None:
    first = Request(model="m", messages=(USER, NEXT))
    body = msgspec.json.decode(
        openai_responses.write_input_items(openai_responses.decode_stored(openai_responses.encode_stored(first, REPLY)))
    )
    assert [item["content"][0]["text"] for item in body["data"]] == ["and now?", "hi"]
    assert (body["object"], body["has_more"]) == ("list", False)
    assert (body["first_id"], body["last_id"]) == (body["data"][0]["id"], body["data"][-1]["id"])


def test_deletions_and_token_counts_are_written() -> None:
    assert openai_responses.write_deleted("resp_1") == b'{"id":"resp_1","object":"response","deleted":true}'
    assert openai_responses.write_input_tokens(7) == b'{"object":"response.input_tokens","input_tokens":7}'


def test_a_thread_keeps_its_tools_but_not_what_gives_access_to_their_servers() -> None:
    server = ToolServer(label="wiki", headers={"authorization": "Bearer secret"}, excluded=("delete",))
    tools = (Tool("look"), Tool("wiki", kind="server", type="mcp_toolset", server=server))
    encoded = encode_thread(Request(model="m", messages=(USER,), tools=tools, thread=True), REPLY)
    assert b"secret" not in encoded
    follow = Request(model="m", thread=True, previous="msg_t")
    access = Tool("wiki", kind="server", server=ToolServer(label="wiki", headers={"authorization": "Bearer new"}))
    stored = decode_stored(encoded)
    assert prepend_stored(stored, follow).tools == tools[:1]
    _, wiki = prepend_stored(stored, msgspec.structs.replace(follow, tools=(access,))).tools
    assert wiki.server == msgspec.structs.replace(server, headers={"authorization": "Bearer new"})
