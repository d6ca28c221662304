from __future__ import annotations

from math import nan
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from modelyard.core.errors import Incomplete, Overloaded
from modelyard.core.events import Block, Event, Reply, Timings, TokenLogprob, Usage, collect_reply, reply_events
from modelyard.core.protocol import ModelCard
from modelyard.core.request import Reasoning, Request, Text, Thinking, ToolCall
from modelyard.protocols import openai_chat
from tests.protocols.golden import check_golden
from tests.protocols.openai_chat.helpers import expressible, read_stream, stream
from tests.protocols.openai_chat.test_stream import CASES
from tests.strategies import replies

FINISHED_CASES = {name: case for name, case in CASES.items() if name != "error_mid_stream"}


def written(reply: Reply, request: Request = Request(model="tiny")) -> dict[str, Any]:
    out: dict[str, Any] = msgspec.json.decode(openai_chat.write_reply([reply], request))
    return out


@pytest.mark.parametrize("name", FINISHED_CASES)
def test_the_reply_matches_its_golden_file(name: str) -> None:
    events, request = FINISHED_CASES[name]
    check_golden("openai_chat", f"reply_{name}", openai_chat.write_reply([collect_reply(events)], request))


def test_several_replies_are_several_choices() -> None:
    one, two = collect_reply(CASES["text"][0]), collect_reply(CASES["length"][0])
    check_golden("openai_chat", "reply_two_answers", openai_chat.write_reply([one, two], Request(model="tiny", n=2)))


def test_content_is_null_only_beside_calls() -> None:
    assert written(collect_reply(CASES["one_tool"][0]))["choices"][0]["message"]["content"] is None
    assert written(collect_reply(CASES["empty"][0]))["choices"][0]["message"]["content"] == ""


def test_an_incomplete_call_is_left_out() -> None:
    choice = written(collect_reply(CASES["length"][0]))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]


def test_a_probability_of_zero_has_a_finite_logprob() -> None:
    reply = collect_reply(CASES["text"][0])
    impossible = TokenLogprob("x", float("-inf"))
    reply = replace(reply, blocks=(Block(Text("x"), (impossible,)),))
    logprobs = written(reply, Request(model="tiny", logprobs=0))["choices"][0]["logprobs"]
    assert logprobs["content"][0] == {"token": "x", "logprob": -9999.0, "bytes": None, "top_logprobs": []}


def test_an_upstream_reply_is_read_in_many_dialects() -> None:
    message = {
        "role": "assistant",
        "content": None,
        "reasoning": "hmm",
        "refusal": "no",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
        "function_call": {"name": "g", "arguments": "{}"},
    }
    body = {"id": "x", "model": "m", "created": 5.5, "choices": [{"message": message, "finish_reason": "stop"}]}
    reply = openai_chat.read_reply(msgspec.json.encode(body))
    assert [block.part for block in reply.blocks] == [
        Thinking("hmm"),
        Text("no"),
        ToolCall("call_x_0", "f", '{"a":1}'),
        ToolCall("call_x", "g", "{}"),
    ]
    assert (reply.finished.reason, reply.started.created) == ("tool_calls", 5)


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"choices":[]}', b'{"choices":[{"index":0}]}', b"\xff"])
def test_an_unreadable_upstream_reply_is_incomplete(body: bytes) -> None:
    with pytest.raises(Incomplete):
        openai_chat.read_reply(body)


def test_an_error_field_in_a_reply_is_raised() -> None:
    with pytest.raises(Overloaded, match="busy"):
        openai_chat.read_reply(b'{"error":{"message":"busy","code":"server_is_overloaded"}}')


def in_chats_order(reply: Reply) -> Reply:
    """A whole reply has one reasoning, one text and then the complete calls."""
    thinking = "".join(b.part.text for b in reply.blocks if isinstance(b.part, Thinking))
    texts = [b for b in reply.blocks if isinstance(b.part, Text)]
    text = Block(Text(reply.text), tuple(t for b in texts for t in b.logprobs))
    calls = [b for b in reply.blocks if isinstance(b.part, ToolCall) and b.complete]
    blocks = [*([Block(Thinking(thinking))] if thinking else []), *([text] if texts else []), *calls]
    limited = reply.finished.reason == "window"
    finished = replace(reply.finished, reason="max_tokens") if limited else reply.finished
    return Reply(replace(reply.started, usage=Usage()), tuple(blocks), finished)


@settings(max_examples=100, deadline=None)
@given(replies(custom=True, logprobs=True, incomplete=True, signatures=False, empty=True))
def test_a_reply_reads_back_equal(reply: Reply) -> None:
    request = Request(model="m", logprobs=2)
    once = openai_chat.write_reply([reply], request)
    found = openai_chat.read_reply(once)
    assert found == in_chats_order(reply)
    assert openai_chat.write_reply([found], request) == once


@settings(max_examples=60, deadline=None)
@given(replies(custom=True, incomplete=True, signatures=False, empty=True))
def test_a_stream_and_the_whole_reply_agree(reply: Reply) -> None:
    events: list[Event] = read_stream(stream(reply_events(reply), Request(model="m", stream=True, include_usage=True)))
    whole = openai_chat.read_reply(openai_chat.write_reply([expressible(reply)], Request(model="m")))
    assert in_chats_order(collect_reply(events)) == whole


CARD = ModelCard("tiny", 17, 4096, state="loading", aliases=("gpt-small",))


def test_a_model_has_its_window_and_state() -> None:
    body = msgspec.json.decode(openai_chat.write_model(CARD))
    assert body["object"] == "model"
    assert (body["id"], body["name"], body["created"], body["owned_by"]) == ("tiny", "tiny", 17, "modelyard")
    assert (body["context_length"], body["max_model_len"], body["state"]) == (4096, 4096, "loading")
    assert body["aliases"] == ["gpt-small"]


def test_the_list_has_every_model_in_order() -> None:
    body = msgspec.json.decode(openai_chat.write_models([CARD, ModelCard("other", 1, None)]))
    assert body["object"] == "list"
    assert [model["id"] for model in body["data"]] == ["tiny", "other"]


PROMPT = (
    TokenLogprob("<s>", nan, id=1),
    TokenLogprob("the", -2.0, id=7, top=(TokenLogprob("a", -1.0, id=9), TokenLogprob("the", -2.0, id=7)), rank=2),
    TokenLogprob("cat", -5.0, id=8, top=(TokenLogprob("dog", -1.0, id=3), TokenLogprob("fox", -2.0, id=4)), rank=17),
)


def test_log_probabilities_of_the_prompt_have_the_form_of_vllm() -> None:
    reply = collect_reply(CASES["text"][0])
    reply = replace(reply, started=replace(reply.started, prompt_logprobs=PROMPT))
    whole = written(reply, Request(model="tiny", prompt_logprobs=2))
    assert whole["prompt_logprobs"] == [
        None,
        {
            "7": {"logprob": -2.0, "rank": 2, "decoded_token": "the"},
            "9": {"logprob": -1.0, "rank": 1, "decoded_token": "a"},
        },
        {
            "8": {"logprob": -5.0, "rank": 17, "decoded_token": "cat"},
            "3": {"logprob": -1.0, "rank": 1, "decoded_token": "dog"},
            "4": {"logprob": -2.0, "rank": 2, "decoded_token": "fox"},
        },
    ]
    back = openai_chat.read_reply(msgspec.json.encode(whole))
    again = written(back, Request(model="tiny", prompt_logprobs=2))
    assert again["prompt_logprobs"] == whole["prompt_logprobs"]


def test_reasoning_has_both_names_on_request() -> None:
    reply = collect_reply(CASES["thinking_and_text"][0])
    both = written(reply, Request(model="tiny", reasoning=Reasoning(both_names=True)))["choices"][0]["message"]
    assert both["reasoning"] == both["reasoning_content"] == "Let me see"
    assert "reasoning" not in written(reply)["choices"][0]["message"]


def test_times_are_those_of_llama_server() -> None:
    reply = collect_reply(CASES["text"][0])
    finished = replace(reply.finished, usage=Usage(9, 4, 6), timings=Timings(first_token=0.5, decode=2.0))
    timings = written(replace(reply, finished=finished), Request(model="tiny", timings="last"))["timings"]
    assert (timings["cache_n"], timings["prompt_n"], timings["prompt_ms"], timings["predicted_n"]) == (4, 5, 500, 6)
    assert timings["predicted_per_second"] == 3.0
    assert "timings" not in written(reply)
