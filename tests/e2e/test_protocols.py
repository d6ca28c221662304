"""Every protocol over a socket: every kind of reply, streamed or not, the order of events, and keepalives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from tests.e2e.helpers import config, raw_request, single_slot_config, stream_events, wait_for_queued, wait_until_idle
from tests.e2e.protocols import (
    CHAT,
    DONE,
    MESSAGES,
    PROTOCOLS,
    RESPONSES,
    Protocol,
    ServerSentEvent,
    event_names,
    parse_events,
    send,
)
from tests.live_server import LiveServer, live_server

ROME = ("get_weather", {"city": "Rome"})
CET = ("get_time", {"zone": "CET"})


class Case(NamedTuple):
    fields: dict[str, Any]
    text: str
    thinking: str
    calls: list[Any]
    stops: tuple[str, str, str]

    def stop(self, protocol: Protocol) -> str:
        """The stop reason in the words of the protocol."""
        return self.stops[[*PROTOCOLS.values()].index(protocol)]


CASES = {
    "text": Case({}, "Hello there, friend.", "", [], ("end_turn", "stop", "completed")),
    "thinking": Case({}, "Forty-two.", "Let me see.", [], ("end_turn", "stop", "completed")),
    "one tool": Case({"tools": True}, "I look.", "", [ROME], ("tool_use", "tool_calls", "completed")),
    "parallel tools": Case({"tools": True}, "", "", [ROME, CET], ("tool_use", "tool_calls", "completed")),
    "length": Case(
        {"limit": 5},
        " the and for file return",
        "",
        [],
        ("max_tokens", "length", "incomplete max_output_tokens"),
    ),
    "stop string": Case({"stop": "STOP"}, "one two ", "", [], ("stop_sequence STOP", "stop", "completed")),
    "nothing": Case({}, "", "", [], ("end_turn", "stop", "completed")),
}


@pytest.fixture(scope="module", params=["text", "chat"])
def engine_kind_client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """A client must not see a difference between the two kinds of engine."""
    settings = config()
    settings["models"]["demo"]["kind"] = request.param
    with live_server(settings) as server, httpx.Client(base_url=server.url) as client:
        yield client


def test_replies_reach_the_client_as_generated(
    engine_kind_client: httpx.Client, protocol: Protocol, stream: bool
) -> None:
    for name, case in CASES.items():
        parsed = send(engine_kind_client, protocol, stream, name, **case.fields)
        assert (parsed.text, parsed.thinking, parsed.calls) == (case.text, case.thinking, case.calls), name
        assert parsed.stop == case.stop(protocol), name


def test_every_protocol_reports_the_same_usage(client: httpx.Client) -> None:
    for name, case in CASES.items():
        usages = [
            send(client, p, stream, name, **case.fields).usage for p in PROTOCOLS.values() for stream in (False, True)
        ]
        assert len({(usage.prompt, usage.output, usage.reasoning) for usage in usages}) == 1, name


def test_usage_matches_the_tokenizer(client: httpx.Client, protocol: Protocol, stream: bool) -> None:
    output = client.post("/tokenize", json={"content": "Hello there, friend."}).json()["count"]
    fields = client.post("/v1/messages/count_tokens", json=MESSAGES.body("text")).json()["input_tokens"]
    usage = send(client, protocol, stream, "text").usage
    assert (usage.prompt, usage.output, usage.reasoning) == (fields, output, 0)


def test_reasoning_is_part_of_the_output_tokens(client: httpx.Client, protocol: Protocol, stream: bool) -> None:
    usage = send(client, protocol, stream, "thinking").usage
    assert 0 < usage.reasoning < usage.output


def test_a_repeated_prompt_is_read_from_the_cache(client: httpx.Client, protocol: Protocol, stream: bool) -> None:
    first = send(client, protocol, stream, "text that comes twice").usage
    again = send(client, protocol, stream, "text that comes twice").usage
    assert again.prompt == first.prompt
    assert again.cached == first.prompt - 1  # the last token is always evaluated


def test_a_reply_is_cut_at_the_end_of_the_window(client: httpx.Client, stream: bool) -> None:
    """Agents request 32k tokens by default; that is clamped, not refused."""
    words = {"messages": "model_context_window_exceeded", "chat": "length", "responses": "incomplete max_output_tokens"}
    text = "length " + "a b " * 2020
    for name, protocol in PROTOCOLS.items():
        parsed = send(client, protocol, stream, text, limit=32_000)
        assert parsed.stop == words[name]
        assert parsed.usage.prompt + parsed.usage.output == 4096


def test_a_call_that_is_complete_at_the_limit_is_kept(client: httpx.Client, protocol: Protocol, stream: bool) -> None:
    parsed = send(client, protocol, stream, "one tool", tools=True, limit=23)
    assert (parsed.calls, parsed.stop) == ([ROME], CASES["length"].stop(protocol))


def test_a_call_cut_off_by_the_limit_is_dropped(client: httpx.Client) -> None:
    """Dropped if the protocol cannot express it; Responses can."""
    bodies = [client.post(w.path, json=w.body("one tool", tools=True, limit=18)).json() for w in PROTOCOLS.values()]
    message, chat, response = bodies
    assert [block["type"] for block in message["content"]] == ["text"]
    assert "tool_calls" not in chat["choices"][0]["message"]
    assert [(item["type"], item["status"]) for item in response["output"]][1:] == [("function_call", "incomplete")]
    stops = message["stop_reason"], chat["choices"][0]["finish_reason"], response["status"]
    assert stops == ("max_tokens", "length", "incomplete")


def test_a_streamed_call_cut_off_by_the_limit_has_incomplete_arguments(client: httpx.Client) -> None:
    complete = '{"city": "Rome"}'
    for protocol in PROTOCOLS.values():
        reply = client.post(protocol.path, json=protocol.body("one tool", tools=True, limit=18, stream=True))
        arguments = "".join(_argument_delta(data) for _, data in parse_events(reply.text) if isinstance(data, dict))
        assert complete.startswith(arguments)
        assert 0 < len(arguments) < len(complete)
        assert "function_call_arguments.done" not in reply.text


def _argument_delta(data: dict[str, Any]) -> str:
    """The delta of arguments in an event of any protocol."""
    if data.get("type") == "content_block_delta":
        return str(data["delta"].get("partial_json", ""))
    if data.get("type") == "response.function_call_arguments.delta":
        return str(data["delta"])
    calls = [c for choice in data.get("choices", ()) for c in choice["delta"].get("tool_calls", ())]
    return "".join(call["function"]["arguments"] for call in calls)


# --- order and fields of events ---------------------------------------------------------------------------------------


def stream_of(client: httpx.Client, name: str, text: str, **fields: Any) -> list[ServerSentEvent]:
    protocol = PROTOCOLS[name]
    return parse_events(client.post(protocol.path, json=protocol.body(text, stream=True, **fields)).text)


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
    body = CHAT.body("text", stream=True) | {"stream_options": None}
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
    assert DONE not in client.post(RESPONSES.path, json=RESPONSES.body("text", stream=True)).text


# --- keepalives in the queue and in prefill ---------------------------------------------------------------------------

KEEPALIVE_EVENTS = {"messages": "ping", "chat": ":", "responses": "response.in_progress"}


@pytest.fixture(scope="module")
def keepalive_server() -> Iterator[LiveServer]:
    with live_server(single_slot_config(http={"keepalive_s": 0.05})) as running:
        yield running
        wait_until_idle(running)


def events_after_queueing(keepalive_server: LiveServer, protocol: Protocol, keepalive: str) -> list[ServerSentEvent]:
    """The events of a stream that got its slot after three keepalives."""
    events: list[ServerSentEvent] = []
    with raw_request(keepalive_server, CHAT.path, CHAT.body("endless stream", stream=True)) as holder:
        holder.read_until(b"so far")
        with stream_events(keepalive_server, protocol.path, protocol.body("text", stream=True)) as stream:
            wait_for_queued(keepalive_server, 1)
            for event in stream:
                events.append(event)
                if event_names(events).count(keepalive) == 3:
                    holder.close()
    return events


def test_messages_sends_pings_before_message_start(keepalive_server: LiveServer) -> None:
    events = events_after_queueing(keepalive_server, MESSAGES, "ping")
    assert event_names(events)[:3] == ["ping", "ping", "ping"]
    assert {str(event.data) for event in events if event.event == "ping"} == {"{'type': 'ping'}"}
    rest = [event for event in events if event.event != "ping"]
    assert rest[0].event == "message_start"
    assert MESSAGES.parse_stream(rest).text == "Hello there, friend."


def test_chat_sends_comments_before_its_first_chunk(keepalive_server: LiveServer) -> None:
    events = events_after_queueing(keepalive_server, CHAT, ":")
    assert event_names(events)[:3] == [":", ":", ":"]
    assert CHAT.parse_stream([event for event in events if event.event != ":"]).text == "Hello there, friend."


def test_responses_repeats_in_progress(keepalive_server: LiveServer) -> None:
    events = events_after_queueing(keepalive_server, RESPONSES, "response.in_progress")
    assert event_names(events)[:4] == ["response.created", *["response.in_progress"] * 3]
    assert event_names(events).count("response.created") == 1
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))
    assert len({event.data["response"]["id"] for event in events if "response" in event.data}) == 1
    assert RESPONSES.parse_stream(events).text == "Hello there, friend."


@pytest.mark.parametrize("name", PROTOCOLS)
def test_keepalives_are_sent_during_prefill(keepalive_server: LiveServer, name: str) -> None:
    """After the first event of the reply there are only keepalives; before it, only on a slow machine."""
    protocol, events, keepalive = PROTOCOLS[name], list[ServerSentEvent](), KEEPALIVE_EVENTS[name]
    with stream_events(keepalive_server, protocol.path, protocol.body("endless prefill", stream=True)) as stream:
        for event in stream:
            events.append(event)
            if len(_after_the_first(events, keepalive)) == 4:
                break
    assert _after_the_first(events, keepalive) == [keepalive] * 4


def _after_the_first(events: list[ServerSentEvent], keepalive: str) -> list[str]:
    first = next((number for number, name in enumerate(event_names(events), 1) if name != keepalive), len(events))
    return event_names(events)[first:]


def test_an_error_after_the_first_keepalive_is_sent_in_the_stream(
    keepalive_server: LiveServer, protocol: Protocol
) -> None:
    """The status is already sent."""
    with raw_request(keepalive_server, CHAT.path, CHAT.body("endless stream", stream=True)) as holder:
        holder.read_until(b"so far")
        with raw_request(keepalive_server, protocol.path, protocol.body("error before", stream=True)) as caller:
            caller.read_until(
                b"ping" if protocol is MESSAGES else b"in_progress" if protocol is RESPONSES else b": keep-alive"
            )
            holder.close()
            caller.read_until(b"out of memory")
