"""The order and the fields of every event in a stream, protocol by protocol."""

from __future__ import annotations

from typing import Any

import httpx

from tests.e2e.protocols import CHAT, DONE, MESSAGES, PROTOCOLS, RESPONSES, ServerSentEvent, event_names, parse_events


def stream_of(client: httpx.Client, name: str, text: str, **fields: Any) -> list[ServerSentEvent]:
    protocol = PROTOCOLS[name]
    return parse_events(client.post(protocol.path, json=protocol.body(text, stream_of=True, **fields)).text)


# --- Messages -------------------------------------------------------------------------------------------------------


def block_events(deltas: int = 1) -> list[str]:
    return ["content_block_start", *["content_block_delta"] * deltas, "content_block_stop"]


def test_messages_starts_with_the_message_and_a_ping(client: httpx.Client) -> None:
    start, ping, *_ = stream_of(client, "messages", "text")
    message = start.data["message"]
    assert (start.event, ping) == ("message_start", ServerSentEvent("ping", {"type": "ping"}))
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "demo")
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == ([], None, None)
    assert message["usage"]["output_tokens"] == 0
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] > 0


def test_messages_event_names_equal_their_types(client: httpx.Client) -> None:
    for event in stream_of(client, "messages", "one tool", tools=True):
        assert event.event == event.data["type"]


def test_messages_blocks_are_closed_in_order_and_numbered(client: httpx.Client) -> None:
    events = stream_of(client, "messages", "one tool", tools=True)
    tail = ["message_delta", "message_stop"]
    assert event_names(events) == ["message_start", "ping", *block_events(), *block_events(), *tail]
    assert [event.data["index"] for event in events if "index" in event.data] == [0, 0, 0, 1, 1, 1]
    opened = [event.data["content_block"] for event in events if event.event == "content_block_start"]
    call_id = opened[1].pop("id")
    assert opened == [{"type": "text", "text": ""}, {"type": "tool_use", "name": "get_weather", "input": {}}]
    assert call_id


def test_messages_thinking_ends_with_a_signature(client: httpx.Client) -> None:
    events = stream_of(client, "messages", "thinking")
    assert events[2].data["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    deltas = [event.data["delta"] for event in events if event.event == "content_block_delta"]
    assert [delta["type"] for delta in deltas] == ["thinking_delta", "signature_delta", "text_delta"]
    assert deltas[1]["signature"]


def test_messages_parallel_calls_have_different_ids(client: httpx.Client) -> None:
    events = stream_of(client, "messages", "parallel tools", tools=True)
    opened = [event.data["content_block"] for event in events if event.event == "content_block_start"]
    assert [call["name"] for call in opened] == ["get_weather", "get_time"]
    assert opened[0]["id"] != opened[1]["id"]


def test_messages_ends_with_stop_reason_and_cumulative_usage(client: httpx.Client) -> None:
    delta, stop = stream_of(client, "messages", "stop string", stop="STOP")[-2:]
    assert delta.data["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "STOP"}
    assert delta.data["usage"]["output_tokens"] > 0
    assert stop == ServerSentEvent("message_stop", {"type": "message_stop"})


def test_messages_empty_reply_is_one_empty_text_block(client: httpx.Client) -> None:
    events = stream_of(client, "messages", "nothing")
    assert event_names(events)[2:-2] == block_events(deltas=0)
    reply = client.post(MESSAGES.path, json=MESSAGES.body("nothing")).json()
    assert reply["content"] == [{"type": "text", "text": ""}]


# --- Chat -----------------------------------------------------------------------------------------------------------


def test_chat_chunks_share_id_and_time_and_only_the_first_has_a_role(client: httpx.Client) -> None:
    *chunks, done = stream_of(client, "chat", "thinking")
    assert done.data == DONE
    assert {(c.event, c.data["object"]) for c in chunks} == {("", "chat.completion.chunk")}
    assert len({(c.data["id"], c.data["created"], c.data["model"]) for c in chunks}) == 1
    roles = [choice["delta"].get("role") for c in chunks for choice in c.data["choices"]]
    assert roles == ["assistant", *[None] * (len(roles) - 1)]


def test_chat_finish_reason_has_its_own_chunk_before_the_usage(client: httpx.Client) -> None:
    *chunks, finish, usage, _ = [event.data for event in stream_of(client, "chat", "text")]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert (finish["choices"][0]["delta"], finish["choices"][0]["finish_reason"]) == ({}, "stop")
    assert usage["choices"] == []
    assert all(chunk["usage"] is None for chunk in (*chunks, finish))


def test_chat_sends_usage_only_on_request(client: httpx.Client) -> None:
    body = CHAT.body("text", stream_of=True) | {"stream_options": None}
    events = parse_events(client.post(CHAT.path, json=body).text)
    assert events[-1].data == DONE
    assert all("usage" not in event.data for event in events[:-1])


def test_chat_streams_calls_by_index_with_id_and_name_first(client: httpx.Client) -> None:
    events = stream_of(client, "chat", "parallel tools", tools=True)
    deltas = [d for f in events[:-2] for d in f.data["choices"][0]["delta"].get("tool_calls", ())]
    heads = [(d["index"], d["type"], d["function"]["name"], d["function"]["arguments"]) for d in deltas if "id" in d]
    assert heads == [(0, "function", "get_weather", ""), (1, "function", "get_time", "")]
    assert [d["index"] for d in deltas] == sorted(d["index"] for d in deltas)


def test_chat_content_is_null_if_there_are_only_calls(client: httpx.Client) -> None:
    reply = client.post(CHAT.path, json=CHAT.body("parallel tools", tools=True)).json()
    assert reply["choices"][0]["message"]["content"] is None


# --- Responses ------------------------------------------------------------------------------------------------------

MESSAGE = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
REASONING = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"]
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


def response_events(*inner: str, end: str = "completed") -> list[str]:
    return [f"response.{name}" for name in ("created", "in_progress", *inner, end)]


def test_responses_items_are_opened_and_closed_in_order(client: httpx.Client) -> None:
    assert event_names(stream_of(client, "responses", "text")) == response_events(*MESSAGE, "output_item.done")
    thinking = (*REASONING, "content_part.done", "output_item.done", *MESSAGE, "output_item.done")
    assert event_names(stream_of(client, "responses", "thinking")) == response_events(*thinking)
    assert event_names(stream_of(client, "responses", "parallel tools", tools=True)) == response_events(*CALL, *CALL)
    cut = event_names(stream_of(client, "responses", "length", limit=5))
    assert cut == response_events(*MESSAGE, "output_item.done", end="incomplete")


def test_responses_events_are_numbered_and_named_like_their_types(client: httpx.Client) -> None:
    events = stream_of(client, "responses", "one tool", tools=True)
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))
    assert [event.data["type"] for event in events] == event_names(events)


def test_responses_events_have_item_ids_and_indexes(client: httpx.Client) -> None:
    events = [event.data for event in stream_of(client, "responses", "one tool", tools=True)][2:-1]
    assert [data["output_index"] for data in events] == [0] * 6 + [1] * 4
    parts = [data for data in events if "part" in data or "output_text" in data["type"]]
    assert {(data["item_id"], data["content_index"]) for data in parts} == {(events[0]["item"]["id"], 0)}
    calls = [data for data in events if "function_call_arguments" in data["type"]]
    assert {data["item_id"] for data in calls} == {events[-1]["item"]["id"]}


def test_responses_events_carry_the_complete_response_object(client: httpx.Client) -> None:
    events = stream_of(client, "responses", "text", temperature=0.5, metadata={"a": "b"})
    lifecycle = [event.data["response"] for event in events if "response" in event.data]
    assert len({(r["id"], r["created_at"], r["model"]) for r in lifecycle}) == 1
    first = lifecycle[0]
    assert (first["object"], first["status"], first["output"], first["usage"]) == ("response", "in_progress", [], None)
    assert (first["temperature"], first["metadata"], first["error"]) == (0.5, {"a": "b"}, None)
    assert first["created_at"] > 0


def test_responses_items_are_added_empty_and_finished_complete(client: httpx.Client) -> None:
    events = [event.data for event in stream_of(client, "responses", "text")]
    assert (events[2]["item"]["content"], events[2]["item"]["status"]) == ([], "in_progress")
    part = {"type": "output_text", "text": "Hello there, friend.", "annotations": [], "logprobs": []}
    assert (events[-2]["item"]["content"], events[-2]["item"]["status"]) == ([part], "completed")
    assert events[4]["logprobs"] == []


def test_responses_reasoning_has_summary_and_encrypted_content_on_request(client: httpx.Client) -> None:
    fields = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    events = stream_of(client, "responses", "thinking", **fields)
    item = events[-1].data["response"]["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "Let me see."}]
    assert item["encrypted_content"]
    assert "response.reasoning_summary_text.done" in event_names(events)


def test_responses_has_no_done_line(client: httpx.Client) -> None:
    assert DONE not in client.post(RESPONSES.path, json=RESPONSES.body("text", stream_of=True)).text
