from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from modelyard.core.errors import RateLimited
from modelyard.core.events import Block, Finished, Reply, Started, StopReason, Usage, collect_reply
from modelyard.core.request import Message, Request, Text, Thinking, ToolCall
from modelyard.protocols import openai_responses as wire
from modelyard.protocols.openai_responses.reply import ResponseObject, write_item
from tests.protocols.golden import check_golden
from tests.protocols.openai_responses.helpers import ASKED, CASES, CODEX
from tests.strategies import replies

SCORED = replace(ASKED, logprobs=2)


def expressible(reply: Reply) -> Reply:
    """What the wire does not say left out: early usage, the stop string, which of the two limits it was."""
    started, finished = reply.started, reply.finished
    reason: StopReason = "tool_calls" if reply.calls else "end"
    if finished.reason in ("max_tokens", "window"):
        reason = "max_tokens"
    blocks = tuple(reply.blocks) or (Block(Text("")),)
    return Reply(Started(started.id, started.model, started.created), blocks, Finished(reason, finished.usage))


EVERYTHING = replies(custom=True, namespaces=True, logprobs=True, incomplete=True, empty=True)
CARRIED = replies(custom=True, namespaces=True, logprobs=True, incomplete=True, empty=True, signatures=False)


@settings(deadline=None, max_examples=100)
@given(CARRIED.map(expressible))
def test_a_reply_reads_back_equal(reply: Reply) -> None:
    assert wire.read_reply(wire.write_reply([reply], SCORED)) == reply


@settings(deadline=None, max_examples=100)
@given(EVERYTHING)
def test_a_second_round_trip_changes_nothing(reply: Reply) -> None:
    written = wire.write_reply([reply], replace(SCORED, model=reply.started.model))
    assert wire.write_reply([wire.read_reply(written)], replace(SCORED, model=reply.started.model)) == written


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"failed"}))
def test_the_reply_matches_its_golden_file(name: str) -> None:
    request, told = CASES[name]
    check_golden("openai_responses", f"{name}.json", wire.write_reply([collect_reply(told)], request))


def test_a_failed_reply_raises_its_error() -> None:
    failed = {"id": "resp_1", "status": "failed", "error": {"code": "rate_limit_exceeded", "message": "slow"}}
    with pytest.raises(RateLimited, match="slow"):
        wire.read_reply(msgspec.json.encode(failed))


def test_a_bare_reply_is_read() -> None:
    bare = {"id": "resp_1", "output": [{"type": "message", "content": [{"type": "output_text", "text": "hi"}]}]}
    reply = wire.read_reply(msgspec.json.encode(bare))
    assert (reply.text, reply.finished.reason) == ("hi", "end")


def test_the_request_is_echoed() -> None:
    request = Request(model="m", tools=CASES["one_tool"][0].tools, max_tokens=5, metadata={"a": "b"})
    told = msgspec.json.decode(wire.write_reply([collect_reply(CASES["text"][1])], request))
    assert (told["max_output_tokens"], told["metadata"], len(told["tools"])) == (5, {"a": "b"}, 3)
    assert (told["object"], told["status"], told["output_text"]) == ("response", "completed", "Hello.")


def test_every_stop_reason_has_its_status() -> None:
    reasons: list[StopReason] = ["end", "tool_calls", "stop_string", "max_tokens", "window", "content_filter"]
    told = [incomplete_reason(Finished(reason, Usage())) for reason in reasons]
    assert told == [None, None, None, "max_output_tokens", "max_output_tokens", "content_filter"]


def test_item_ids_have_a_prefix_for_the_kind_and_the_index() -> None:
    parts: list[Text | Thinking | ToolCall] = [
        Text("a"),
        Thinking("b"),
        ToolCall("c", "f", "{}"),
        ToolCall("d", "g", "x", custom=True),
    ]
    ids = [write_item(Block(part), "key", index, ASKED)["id"] for index, part in enumerate(parts)]
    assert ids == ["msg_key_0", "rs_key_1", "fc_key_2", "ctc_key_3"]


def test_an_upstreams_signature_is_written_instead_of_ours() -> None:
    assert write_item(Block(Thinking("b", "theirs")), "key", 0, CODEX)["encrypted_content"] == "theirs"
    assert "encrypted_content" not in write_item(Block(Thinking("b", "theirs")), "key", 0, ASKED)


def test_instructions_are_echoed_only_if_the_request_has_them() -> None:
    asked = replace(ASKED, messages=(Message("system", (Text("orders"),)), *ASKED.messages))
    assert ResponseObject(asked, "k").at("in_progress", 0)["instructions"] is None
    given = replace(asked, instructions=True)
    assert ResponseObject(given, "k").at("in_progress", 0)["instructions"] == "orders"
