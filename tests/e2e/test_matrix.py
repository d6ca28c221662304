"""Every protocol × every way an answer can go, streamed and whole, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.helpers import config
from tests.e2e.protocols import MESSAGES, PROTOCOLS, Protocol, parse_events, send
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
PROTOCOL_INDEX = {name: place for place, name in enumerate(PROTOCOLS)}


@pytest.fixture(scope="module", params=["text", "chat"])
def engine_kind_client(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    """The two kinds of engine must not be told apart by what a client sees."""
    settings = config()
    settings["models"]["demo"]["kind"] = request.param
    with live_server(settings) as server, httpx.Client(base_url=server.url) as client:
        yield client


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PROTOCOLS)
def test_replies_reach_the_client_as_generated(
    engine_kind_client: httpx.Client, name: str, case: str, stream: bool
) -> None:
    fields, text, thinking, calls, stops = CASES[case]
    parsed = send(engine_kind_client, PROTOCOLS[name], stream, case, **fields)
    assert (parsed.text, parsed.thinking, parsed.calls, parsed.stop) == (
        text,
        thinking,
        calls,
        stops[PROTOCOL_INDEX[name]],
    )


@pytest.mark.parametrize("case", CASES)
def test_every_protocol_reports_the_same_usage(client: httpx.Client, case: str) -> None:
    parsed = [send(client, w, s, case, **CASES[case][0]).usage for w in PROTOCOLS.values() for s in (False, True)]
    assert len({(usage.prompt, usage.output, usage.reasoning) for usage in parsed}) == 1


def test_usage_matches_the_tokenizer(client: httpx.Client, protocol: Protocol, stream: bool) -> None:
    output = client.post("/tokenize", json={"content": "Hello there, friend."}).json()["count"]
    fields = client.post("/v1/messages/count_tokens", json=MESSAGES.body("text")).json()["input_tokens"]
    usage = send(client, protocol, stream, "text").usage
    assert (usage.prompt, usage.output, usage.reasoning) == (fields, output, 0)


def test_reasoning_is_part_of_the_output_tokens(client: httpx.Client, protocol: Protocol, stream: bool) -> None:
    usage = send(client, protocol, stream, "thinking").usage
    assert 0 < usage.reasoning < usage.output


def test_a_repeated_prompt_is_read_from_the_cache(
    client: httpx.Client, protocol: Protocol, stream: bool
) -> None:
    first = send(client, protocol, stream, "text that comes twice").usage
    again = send(client, protocol, stream, "text that comes twice").usage
    assert again.prompt == first.prompt
    assert again.cached == first.prompt - 1  # the last token is always evaluated


def test_a_reply_is_cut_at_the_end_of_the_window(client: httpx.Client, stream: bool) -> None:
    """Agents ask for 32k tokens by default: that is clamped, not refused."""
    words = {"messages": "model_context_window_exceeded", "chat": "length", "responses": "incomplete max_output_tokens"}
    text = "length " + "a b " * 2020
    for name, protocol in PROTOCOLS.items():
        parsed = send(client, protocol, stream, text, limit=32_000)
        assert parsed.stop == words[name]
        assert parsed.usage.prompt + parsed.usage.output == 4096


LIMIT_REASONS = ("max_tokens", "length", "incomplete max_output_tokens")


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_call_that_is_complete_at_the_limit_is_kept(client: httpx.Client, name: str, stream: bool) -> None:
    parsed = send(client, PROTOCOLS[name], stream, "one tool", tools=True, limit=23)
    assert (parsed.calls, parsed.stop) == ([ROME], LIMIT_REASONS[PROTOCOL_INDEX[name]])


def test_a_call_cut_off_by_the_limit_is_dropped(client: httpx.Client) -> None:
    """Left out where the wire has no word for it; Responses has one."""
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
    """The piece of a call's arguments in this event of any wire."""
    if data.get("type") == "content_block_delta":
        return str(data["delta"].get("partial_json", ""))
    if data.get("type") == "response.function_call_arguments.delta":
        return str(data["delta"])
    calls = [c for choice in data.get("choices", ()) for c in choice["delta"].get("tool_calls", ())]
    return "".join(call["function"]["arguments"] for call in calls)
