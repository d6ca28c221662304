from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from modelyard.core.errors import RateLimited
from modelyard.core.events import Block, Finished, Reply, Started, StopReason, Usage, collect_reply
from modelyard.core.request import Message, Request, Text, Thinking, ToolCall
from modelyard.protocols import openai_responses
from modelyard.protocols.openai_responses.reply import ResponseObject, write_item
from tests.protocols.golden import check_golden
from tests.protocols.openai_responses.helpers import CASES, CODEX, REQUEST, STARTED
from tests.strategies import replies

WITH_LOGPROBS = replace(REQUEST, logprobs=2)


def expressible(reply: Reply) -> Reply:
    """The protocol has no early usage, no stop string and one name for both limits."""
    started, finished = reply.started, reply.finished
    reason: StopReason = "tool_calls" if reply.calls else "end"
    if finished.reason in ("max_tokens", "window"):
        reason = "max_tokens"
    blocks = tuple(reply.blocks) or (Block(Text("")),)
    return Reply(Started(started.id, started.model, started.created), blocks, Finished(reason, finished.usage))


EVERYTHING = replies(custom=True, namespaces=True, logprobs=True, incomplete=True, empty=True)
EXPRESSIBLE = replies(custom=True, namespaces=True, logprobs=True, incomplete=True, empty=True, signatures=False)


@settings(deadline=None, max_examples=100)
@given(EXPRESSIBLE.map(expressible))
def test_a_reply_reads_back_equal(reply: Reply) -> None:
    assert openai_responses.read_reply(openai_responses.write_reply([reply], WITH_LOGPROBS)) == reply


@settings(deadline=None, max_examples=100)
@given(EVERYTHING)
def test_a_second_round_trip_changes_nothing(reply: Reply) -> None:
    written = openai_responses.write_reply([reply], replace(WITH_LOGPROBS, model=reply.started.model))
    assert (
        openai_responses.write_reply(
            [openai_responses.read_reply(written)], replace(WITH_LOGPROBS, model=reply.started.model)
        )
        == written
    )


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"failed"}))
def test_the_reply_matches_its_golden_file(name: str) -> None:
    request, events = CASES[name]
    check_golden("openai_responses", f"{name}.json", openai_responses.write_reply([collect_reply(events)], request))


def test_a_failed_reply_raises_its_error() -> None:
    failed = {"id": "resp_1", "status": "failed", "error": {"code": "rate_limit_exceeded", "message": "slow"}}
    with pytest.raises(RateLimited, match="slow"):
        openai_responses.read_reply(msgspec.json.encode(failed))


def test_a_bare_reply_is_read() -> None:
    bare = {"id": "resp_1", "output": [{"type": "message", "content": [{"type": "output_text", "text": "hi"}]}]}
    reply = openai_responses.read_reply(msgspec.json.encode(bare))
    assert (reply.text, reply.finished.reason) == ("hi", "end")


def test_the_request_is_echoed() -> None:
    request = Request(model="m", tools=CASES["one_tool"][0].tools, max_tokens=5, metadata={"a": "b"})
    body = msgspec.json.decode(openai_responses.write_reply([collect_reply(CASES["text"][1])], request))
    assert (body["max_output_tokens"], body["metadata"], len(body["tools"])) == (5, {"a": "b"}, 3)
    assert (body["object"], body["status"], body["output_text"]) == ("response", "completed", "Hello.")


def test_every_stop_reason_has_its_status() -> None:
    reasons: list[StopReason] = ["end", "tool_calls", "stop_string", "max_tokens", "window", "content_filter"]
    replies = [Reply(STARTED, (), Finished(reason, Usage())) for reason in reasons]
    bodies = [msgspec.json.decode(openai_responses.write_reply([reply], REQUEST)) for reply in replies]
    details = [body["incomplete_details"] and body["incomplete_details"]["reason"] for body in bodies]
    assert details == [None, None, None, "max_output_tokens", "max_output_tokens", "content_filter"]
    assert [body["status"] for body in bodies] == ["completed"] * 3 + ["incomplete"] * 3


def test_item_ids_have_a_prefix_for_the_kind_and_the_index() -> None:
    parts: list[Text | Thinking | ToolCall] = [
        Text("a"),
        Thinking("b"),
        ToolCall("c", "f", "{}"),
        ToolCall("d", "g", "x", custom=True),
    ]
    ids = [write_item(Block(part), "key", index, REQUEST)["id"] for index, part in enumerate(parts)]
    assert ids == ["msg_key_0", "rs_key_1", "fc_key_2", "ctc_key_3"]


def test_an_upstreams_signature_is_written_instead_of_ours() -> None:
    assert write_item(Block(Thinking("b", "theirs")), "key", 0, CODEX)["encrypted_content"] == "theirs"
    assert "encrypted_content" not in write_item(Block(Thinking("b", "theirs")), "key", 0, REQUEST)


def in_progress(request: Request) -> Any:
    return msgspec.json.decode(ResponseObject(request, "k").at("in_progress", STARTED))


def test_instructions_are_echoed_only_if_the_request_has_them() -> None:
    request = replace(REQUEST, messages=(Message("system", (Text("orders"),)), *REQUEST.messages))
    assert in_progress(request)["instructions"] is None
    request = replace(request, instructions=True)
    assert in_progress(request)["instructions"] == "orders"
