"""Whole replies, written for clients and read from upstreams; token counts and the list of models."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from modelyard.core.errors import Incomplete, InvalidRequest
from modelyard.core.events import Block, Finished, Reply, Started, StopReason, Usage
from modelyard.core.protocol import ModelCard
from modelyard.core.request import Reasoning, Request, Text, Thinking, ToolCall
from modelyard.protocols.anthropic_messages import read_reply, write_count, write_model, write_models, write_reply
from modelyard.protocols.common.reasoning_signature import pack_reasoning
from tests import strategies

REQUEST = Request(model="m")


def reply(*blocks: Block, reason: StopReason = "end", usage: Usage = Usage(), stop: str | None = None) -> Reply:
    return Reply(Started("1", "m", 7), blocks, Finished(reason, usage, stop))


def written(of: Reply, request: Request = REQUEST) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(write_reply([of], request))
    return body


def readable(reply: Reply) -> Reply:
    """What reads back: no creation time, a signature on all thinking, no incomplete call."""
    blocks = tuple(
        replace(block, part=replace(block.part, signature=block.part.signature or pack_reasoning(block.part.text)))
        if isinstance(block.part, Thinking)
        else block
        for block in reply.blocks
        if block.complete
    )
    return Reply(replace(reply.started, created=0), blocks or (Block(Text("")),), reply.finished)


@settings(deadline=None, max_examples=100)
@given(strategies.replies(incomplete=True, empty=True))
def test_a_reply_reads_back_equal(reply: Reply) -> None:
    assert read_reply(write_reply([reply], REQUEST)) == readable(reply)


@settings(deadline=None, max_examples=50)
@given(strategies.replies(incomplete=True, empty=True, custom=True, namespaces=True, logprobs=True))
def test_writing_a_reply_that_was_read_back_changes_nothing(reply: Reply) -> None:
    once = write_reply([reply], REQUEST)
    assert write_reply([read_reply(once)], REQUEST) == once


def test_input_tokens_count_only_uncached_tokens() -> None:
    usage = written(reply(usage=Usage(100, 60, 20, 5)))["usage"]
    assert usage == {
        "input_tokens": 40,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 60,
        "output_tokens": 20,
        "output_tokens_details": {"thinking_tokens": 5},
    }


def test_every_stop_reason_has_its_name() -> None:
    names: dict[StopReason, str] = {
        "end": "end_turn",
        "tool_calls": "tool_use",
        "stop_string": "stop_sequence",
        "max_tokens": "max_tokens",
        "window": "model_context_window_exceeded",
        "content_filter": "refusal",
    }
    for reason, name in names.items():
        body = written(reply(reason=reason))
        assert body["stop_reason"] == name
        assert read_reply(msgspec.json.encode(body)).finished.reason == reason


def test_the_stop_string_is_written() -> None:
    assert written(reply(reason="stop_string", stop="END"))["stop_sequence"] == "END"
    assert written(reply())["stop_sequence"] is None


def test_an_empty_reply_is_one_empty_text() -> None:
    assert written(reply())["content"] == [{"type": "text", "text": ""}]


def test_an_incomplete_call_is_left_out() -> None:
    cut = Block(ToolCall("c", "f", '{"a'), (), complete=False)
    body = written(reply(Block(Text("so")), cut, reason="max_tokens"))
    assert body["content"] == [{"type": "text", "text": "so"}]
    assert body["stop_reason"] == "max_tokens"


def test_omitted_thinking_travels_in_its_signature() -> None:
    request = Request(model="m", reasoning=Reasoning(enabled=True, summary="omitted"))
    body = written(reply(Block(Thinking("secret"))), request)
    assert body["content"] == [{"type": "thinking", "thinking": "", "signature": pack_reasoning("secret")}]
    assert read_reply(msgspec.json.encode(body)).thinking == "secret"


def test_custom_calls_are_wrapped_in_an_object() -> None:
    body = written(reply(Block(ToolCall("c", "patch", 'a "b"', custom=True)), reason="tool_calls"))
    assert body["content"][0]["input"] == {"input": 'a "b"'}


def test_an_upstream_reply_with_unknown_values_is_read() -> None:
    body = {"id": "x", "stop_reason": "bored", "content": [{"type": "smell"}, {"type": "text", "text": "a"}]}
    assert read_reply(msgspec.json.encode(body)) == Reply(
        Started("x", "", 0), (Block(Text("a")),), Finished("end", Usage())
    )


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"content":5}'])
def test_an_unreadable_upstream_reply_is_incomplete(body: bytes) -> None:
    with pytest.raises(Incomplete, match="the upstream's reply cannot be read"):
        read_reply(body)


# --- token counts and models ----------------------------------------------------------------------------------------

CARDS = [ModelCard(name, 0, 4096) for name in "abcde"]


def page(**query: Any) -> tuple[list[str], bool]:
    body = msgspec.json.decode(write_models(CARDS, **query))
    ids = [model["id"] for model in body["data"]]
    assert (body["first_id"], body["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
    return ids, body["has_more"]


def test_a_token_count_is_one_number() -> None:
    assert write_count(42) == b'{"input_tokens":42}'


def test_a_model_has_its_window_state_and_creation_time() -> None:
    card = ModelCard("org/m", 1_700_000_000, 32768, 4096, "loading", "M", aliases=("x",))
    model = msgspec.json.decode(write_model(card))
    assert (model["type"], model["id"], model["display_name"]) == ("model", "org/m", "M")
    assert model["created_at"] == "2023-11-14T22:13:20Z"
    assert (model["max_input_tokens"], model["max_tokens"], model["state"]) == (32768, 4096, "loading")


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ({}, "abcde", False),
        ({"limit": 1000}, "abcde", False),
        ({"limit": 2}, "ab", True),
        ({"limit": 2, "after_id": "b"}, "cd", True),
        ({"limit": 2, "after_id": "c"}, "de", False),
        ({"after_id": "e"}, "", False),
        ({"limit": 2, "before_id": "d"}, "bc", True),
        ({"limit": 5, "before_id": "c"}, "ab", False),
    ],
)
def test_models_are_paged_by_id(query: dict[str, Any], ids: str, has_more: bool) -> None:
    assert page(**query) == (list(ids), has_more)


@pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 1001}, {"after_id": "z"}, {"before_id": "z"}])
def test_an_invalid_page_is_refused(query: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(query))):
        page(**query)
