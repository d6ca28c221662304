"""Every protocol × every way an answer can go, streamed and whole, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.helpers import config
from tests.e2e.protocols import PROTOCOLS, ParsedReply, Protocol, parse_events
from tests.live_server import live_server

ROME = ("get_weather", {"city": "Rome"})
CET = ("get_time", {"zone": "CET"})

# case → (what is asked for besides the text, text, thinking, calls, the stop word of each wire)
CASES: dict[str, tuple[dict[str, Any], str, str, list[Any], tuple[str, str, str]]] = {
    "text": ({}, "Hello there, friend.", "", [], ("end_turn", "stop", "completed")),
    "thinking": ({}, "Forty-two.", "Let me see.", [], ("end_turn", "stop", "completed")),
    "one tool": ({"tools": True}, "I look.", "", [ROME], ("tool_use", "tool_calls", "completed")),
    "parallel tools": ({"tools": True}, "", "", [ROME, CET], ("tool_use", "tool_calls", "completed")),
    "length": (
        {"limit": 5},
        " the and for file return",
        "",
        [],
        ("max_tokens", "length", "incomplete max_output_tokens"),
    ),
    "stop string": ({"stop": "STOP"}, "one two ", "", [], ("stop_sequence STOP", "stop", "completed")),
    "nothing": ({}, "", "", [], ("end_turn", "stop", "completed")),
}
WORD = {name: place for place, name in enumerate(PROTOCOLS)}


def ask(client: httpx.Client, wire: Protocol, stream: bool, text: str, **asked: Any) -> ParsedReply:
    reply = client.post(wire.path, json=wire.body(text, stream=stream, **asked))
    assert reply.status_code == 200, reply.text
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    if not stream:
        assert reply.headers["content-type"] == "application/json"
        return wire.whole(reply.json())
    assert reply.headers["content-type"].startswith("text/event-stream")
    return wire.streamed(parse_events(reply.text))


@pytest.fixture(scope="module", params=["text", "chat"])
def either(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """The two kinds of engine must not be told apart by what a client sees."""
    settings = config()
    settings["models"]["demo"]["kind"] = request.param
    with live_server(settings) as served, httpx.Client(base_url=served.url) as client:
        yield client


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PROTOCOLS)
def test_an_answer_arrives_as_the_model_gave_it(either: httpx.Client, name: str, case: str, stream: bool) -> None:
    asked, text, thinking, calls, stops = CASES[case]
    seen = ask(either, PROTOCOLS[name], stream, case, **asked)
    assert (seen.text, seen.thinking, seen.calls, seen.stop) == (text, thinking, calls, stops[WORD[name]])


@pytest.mark.parametrize("case", CASES)
def test_every_protocol_counts_the_same_tokens(client: httpx.Client, case: str) -> None:
    seen = [ask(client, w, s, case, **CASES[case][0]).usage for w in PROTOCOLS.values() for s in (False, True)]
    assert len({(usage.prompt, usage.output, usage.reasoning) for usage in seen}) == 1


def test_usage_counts_what_was_really_asked_and_said(client: httpx.Client, wire: Protocol, stream: bool) -> None:
    said = client.post("/tokenize", json={"content": "Hello there, friend."}).json()["count"]
    asked = client.post("/v1/messages/count_tokens", json=PROTOCOLS["messages"].body("text")).json()["input_tokens"]
    usage = ask(client, wire, stream, "text").usage
    assert (usage.prompt, usage.output, usage.reasoning) == (asked, said, 0)


def test_reasoning_is_counted_within_the_output(client: httpx.Client, wire: Protocol, stream: bool) -> None:
    usage = ask(client, wire, stream, "thinking").usage
    assert 0 < usage.reasoning < usage.output


def test_a_prompt_that_was_just_sent_is_read_from_the_cache(client: httpx.Client, wire: Protocol, stream: bool) -> None:
    first = ask(client, wire, stream, "text that comes twice").usage
    again = ask(client, wire, stream, "text that comes twice").usage
    assert again.prompt == first.prompt
    assert again.cached == first.prompt - 1  # the last token is always evaluated


def test_an_answer_longer_than_the_window_is_cut_where_it_is_full(client: httpx.Client, stream: bool) -> None:
    """Agents ask for 32k tokens by default: that is clamped, not refused."""
    words = {"messages": "model_context_window_exceeded", "chat": "length", "responses": "incomplete max_output_tokens"}
    text = "length " + "a b " * 2020
    for name, wire in PROTOCOLS.items():
        seen = ask(client, wire, stream, text, limit=32_000)
        assert seen.stop == words[name]
        assert seen.usage.prompt + seen.usage.output == 4096


LIMITS = ("max_tokens", "length", "incomplete max_output_tokens")


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_call_that_was_whole_when_the_limit_came_counts(client: httpx.Client, name: str, stream: bool) -> None:
    seen = ask(client, PROTOCOLS[name], stream, "one tool", tools=True, limit=23)
    assert (seen.calls, seen.stop) == ([ROME], LIMITS[WORD[name]])


def test_a_call_cut_off_by_the_limit_is_no_call(client: httpx.Client) -> None:
    """Left out where the wire has no word for it; Responses has one."""
    bodies = [client.post(w.path, json=w.body("one tool", tools=True, limit=18)).json() for w in PROTOCOLS.values()]
    message, chat, response = bodies
    assert [block["type"] for block in message["content"]] == ["text"]
    assert "tool_calls" not in chat["choices"][0]["message"]
    assert [(item["type"], item["status"]) for item in response["output"]][1:] == [("function_call", "incomplete")]
    stops = message["stop_reason"], chat["choices"][0]["finish_reason"], response["status"]
    assert stops == ("max_tokens", "length", "incomplete")


def test_a_streamed_call_that_is_cut_off_cannot_be_parsed(client: httpx.Client) -> None:
    whole = '{"city": "Rome"}'
    for wire in PROTOCOLS.values():
        reply = client.post(wire.path, json=wire.body("one tool", tools=True, limit=18, stream=True))
        arguments = "".join(_arguments(data) for _, data in parse_events(reply.text) if isinstance(data, dict))
        assert whole.startswith(arguments)
        assert 0 < len(arguments) < len(whole)
        assert "function_call_arguments.done" not in reply.text


def _arguments(data: dict[str, Any]) -> str:
    """The piece of a call's arguments in this event of any wire."""
    if data.get("type") == "content_block_delta":
        return str(data["delta"].get("partial_json", ""))
    if data.get("type") == "response.function_call_arguments.delta":
        return str(data["delta"])
    calls = [c for choice in data.get("choices", ()) for c in choice["delta"].get("tool_calls", ())]
    return "".join(call["function"]["arguments"] for call in calls)
