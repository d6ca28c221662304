from __future__ import annotations

from msgspec.structs import replace

from modelyard.core.events import Block, Finished, StopReason, Usage
from modelyard.core.request import Message, Text, Thinking, ToolCall
from modelyard.protocols.openai_responses.response import ResponseObject, incomplete_reason, write_item
from tests.protocols.openai_responses.cases import ASKED, CODEX


def test_every_stop_reason_has_its_status() -> None:
    reasons: list[StopReason] = ["end", "tool_calls", "stop_string", "max_tokens", "window", "content_filter"]
    told = [incomplete_reason(Finished(reason, Usage())) for reason in reasons]
    assert told == [None, None, None, "max_output_tokens", "max_output_tokens", "content_filter"]


def test_item_ids_say_their_kind_and_place() -> None:
    parts: list[Text | Thinking | ToolCall] = [
        Text("a"),
        Thinking("b"),
        ToolCall("c", "f", "{}"),
        ToolCall("d", "g", "x", custom=True),
    ]
    ids = [write_item(Block(part), "key", index, ASKED)["id"] for index, part in enumerate(parts)]
    assert ids == ["msg_key_0", "rs_key_1", "fc_key_2", "ctc_key_3"]


def test_an_upstreams_own_seal_goes_out_instead_of_ours() -> None:
    assert write_item(Block(Thinking("b", "theirs")), "key", 0, CODEX)["encrypted_content"] == "theirs"
    assert "encrypted_content" not in write_item(Block(Thinking("b", "theirs")), "key", 0, ASKED)


def test_instructions_are_echoed_only_where_they_were_given() -> None:
    asked = replace(ASKED, messages=(Message("system", (Text("orders"),)), *ASKED.messages))
    assert ResponseObject(asked, "k").at("in_progress", 0)["instructions"] is None
    given = replace(asked, instructions=True)
    assert ResponseObject(given, "k").at("in_progress", 0)["instructions"] == "orders"
