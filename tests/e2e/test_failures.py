"""Errors as clients see them: failures before and during a reply, long prompts, deadlines, crashed engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelyard.config.load import load_config
from modelyard.server.model_check import check_models
from modelyard.telemetry.system import read_memory
from tests.e2e.helpers import (
    config,
    raw_request,
    single_slot_config,
    wait_for_queued,
    wait_for_running,
    wait_until,
    wait_until_idle,
)
from tests.e2e.protocols import CHAT, MESSAGES, PROTOCOLS, RESPONSES, VALID_BODIES, Protocol, event_names, parse_events
from tests.engines.llama_cpp.test_file_check import with_two_equal_tokens
from tests.engines.llama_cpp.tiny_models import coder
from tests.live_server import LiveServer, demo_config, live_server


def openai_error(message: str, code: str, type: str = "server_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": None, "code": code}}


def anthropic_error(message: str, type: str, code: str, reply: httpx.Response) -> dict[str, Any]:
    error = {"type": type, "message": message, "code": code}
    return {"type": "error", "error": error, "request_id": reply.headers["request-id"]}


def post(client: httpx.Client, protocol: Protocol, text: str, **fields: Any) -> httpx.Response:
    return client.post(protocol.path, json=protocol.body(text, **fields))


# --- before the first byte ------------------------------------------------------------------------------------------


def test_a_failure_before_the_first_byte_is_an_http_error(
    client: httpx.Client, protocol: Protocol, stream: bool
) -> None:
    reply = post(client, protocol, "error before", stream=stream)
    assert (reply.status_code, reply.headers["content-type"]) == (500, "application/json")
    expected = openai_error("out of memory", "internal_error")
    if protocol is MESSAGES:
        expected = anthropic_error("out of memory", "api_error", "internal_error", reply)
    assert reply.json() == expected


def test_a_lost_engine_sends_retry_after(client: httpx.Client, protocol: Protocol, stream: bool) -> None:
    reply = post(client, protocol, "busy before", stream=stream)
    assert reply.status_code == (529 if protocol is MESSAGES else 503)
    assert int(reply.headers["retry-after"]) >= 1
    expected = openai_error("the worker is gone", "engine_unavailable")
    if protocol is MESSAGES:
        expected = anthropic_error("the worker is gone", "overloaded_error", "engine_unavailable", reply)
    assert reply.json() == expected


def test_an_unstreamed_reply_that_fails_midway_is_an_http_error(client: httpx.Client, protocol: Protocol) -> None:
    reply = post(client, protocol, "error during")
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "out of memory"


# --- in the middle of a stream --------------------------------------------------------------------------------------


def test_messages_streams_end_with_an_error_event(client: httpx.Client) -> None:
    reply = post(client, MESSAGES, "error during", stream=True)
    events = parse_events(reply.text)
    assert event_names(events) == ["message_start", "ping", "content_block_start", "content_block_delta", "error"]
    assert events[-1].data == anthropic_error("out of memory", "api_error", "internal_error", reply)


def test_chat_streams_end_with_an_error_chunk_without_done(client: httpx.Client) -> None:
    events = parse_events(post(client, CHAT, "error during", stream=True).text)
    assert events[1].data["choices"][0]["delta"] == {"content": "Half an"}
    assert [event.data for event in events[2:]] == [openai_error("out of memory", "internal_error")]


def test_responses_streams_end_with_response_failed(client: httpx.Client) -> None:
    events = parse_events(post(client, RESPONSES, "error during", stream=True).text)
    assert event_names(events)[-2:] == ["response.output_text.delta", "response.failed"]
    failed = events[-1].data["response"]
    assert (failed["status"], failed["id"]) == ("failed", events[0].data["response"]["id"])
    assert failed["error"] == {"code": "server_error", "message": "out of memory"}
    assert [event.data["sequence_number"] for event in events] == list(range(len(events)))


# --- overflow ---------------------------------------------------------------------------------------------------------

LONG_TEXT = "text " + "word " * 5000


@pytest.fixture(scope="module")
def prompt_tokens(client: httpx.Client) -> int:
    count: int = client.post("/v1/messages/count_tokens", json=MESSAGES.body(LONG_TEXT)).json()["input_tokens"]
    assert count > 4096
    return count


def test_messages_overflow_has_the_text_that_claude_code_parses(
    client: httpx.Client, prompt_tokens: int, stream: bool
) -> None:
    reply = post(client, MESSAGES, LONG_TEXT, stream=stream)
    assert (reply.status_code, reply.headers["content-type"]) == (400, "application/json")
    body = reply.json()
    assert (body["type"], body["request_id"]) == ("error", reply.headers["request-id"])
    assert body["request_id"].startswith("req_")
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"] == f"prompt is too long: {prompt_tokens} tokens > 4096 maximum"


def overflow_error(prompt_tokens: int, param: str) -> dict[str, Any]:
    message = (
        f"This model's maximum context length is 4096 tokens. However, your messages resulted in "
        f"{prompt_tokens} tokens. Please reduce the length of the messages."
    )
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": "context_length_exceeded"}
    return {"error": error | {"n_prompt_tokens": prompt_tokens, "n_ctx": 4096}}


def test_chat_overflow_has_a_code_and_both_token_counts(client: httpx.Client, prompt_tokens: int, stream: bool) -> None:
    reply = post(client, CHAT, LONG_TEXT, stream=stream)
    assert (reply.status_code, reply.json()) == (400, overflow_error(prompt_tokens, "messages"))


def test_unstreamed_responses_overflow_like_chat(client: httpx.Client, prompt_tokens: int) -> None:
    reply = post(client, RESPONSES, LONG_TEXT)
    assert (reply.status_code, reply.json()) == (400, overflow_error(prompt_tokens, "input"))


def test_streamed_responses_overflow_with_response_failed(client: httpx.Client) -> None:
    reply = post(client, RESPONSES, LONG_TEXT, stream=True)
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/event-stream")
    created, failed = parse_events(reply.text)
    assert (created.event, failed.event) == ("response.created", "response.failed")
    assert created.data["response"]["id"] == failed.data["response"]["id"]
    assert failed.data["response"]["error"] == {
        "code": "context_length_exceeded",
        "message": "Your input exceeds the context window of this model. Please adjust your input and try again.",
    }


def test_the_longest_prompt_is_one_token_shorter_than_the_window(client: httpx.Client) -> None:
    base = client.post("/v1/messages/count_tokens", json=MESSAGES.body("text")).json()["input_tokens"]
    for missing, status in ((0, 400), (1, 200)):
        text = "text" + " word" * (4096 - base - missing)
        assert client.post("/v1/messages/count_tokens", json=MESSAGES.body(text)).json() == {
            "input_tokens": 4096 - missing
        }
        assert post(client, MESSAGES, text).status_code == status


def test_a_strict_cache_refuses_max_tokens_that_do_not_fit() -> None:
    strict = {"model": "demo", "n_ctx": 4096, "parallel": 4, "overflow": "strict"}
    with (
        live_server(config(caches={"main": strict, "fast": strict})) as server,
        httpx.Client(base_url=server.url) as client,
    ):
        prompt_tokens = client.post("/v1/messages/count_tokens", json=MESSAGES.body("text")).json()["input_tokens"]
        replies = [post(client, protocol, "text", limit=4096) for protocol in PROTOCOLS.values()]
        assert [reply.status_code for reply in replies] == [400, 400, 400]
        assert replies[0].json()["error"]["message"] == (
            f"input length and `max_tokens` exceed context limit: {prompt_tokens} + 4096 > 4096, decrease input length "
            "or `max_tokens` and try again"
        )
        assert [reply.json()["error"]["code"] for reply in replies[1:]] == ["context_length_exceeded"] * 2
        assert post(client, MESSAGES, "text", limit=4096 - prompt_tokens).status_code == 200


def test_the_server_works_after_a_failed_request(client: httpx.Client, protocol: Protocol) -> None:
    post(client, protocol, "error before")
    assert protocol.parse_reply(post(client, protocol, "text").json()).text == "Hello there, friend."


# --- a client that sets a deadline ------------------------------------------------------------------------------------


def test_a_request_ends_at_its_deadline(protocol: Protocol) -> None:
    with live_server(demo_config([{"steps": [{"hang": True}]}])) as server:
        headers = {"x-modelyard-timeout": "0.05"}
        reply = httpx.post(server.url + protocol.path, json=VALID_BODIES[protocol.path], headers=headers)
        assert reply.status_code == 504
        wait_until(lambda: server.status("demo").running == 0, "the slot is free")


def test_a_jump_of_the_wall_clock_ends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    body, headers, now = CHAT.body("slow prefill"), {"x-modelyard-timeout": "60"}, time.time
    with live_server(single_slot_config()) as server, ThreadPoolExecutor() as executor:
        with raw_request(server, CHAT.path, CHAT.body("endless stream", stream=True)) as holder:
            holder.read_until(b"so far")
            waiting = executor.submit(httpx.post, server.url + CHAT.path, json=body, headers=headers, timeout=60)
            wait_for_queued(server, 1)
            monkeypatch.setattr(time, "time", lambda: now() + 7200)
        assert waiting.result(60).status_code == 200


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "1e9"])
def test_an_invalid_deadline_is_refused(client: httpx.Client, value: str) -> None:
    reply = client.post(CHAT.path, json=VALID_BODIES[CHAT.path], headers={"x-modelyard-timeout": value})
    assert reply.status_code == 400
    assert "x-modelyard-timeout" in reply.json()["error"]["message"]


# --- crashed engines --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crashing_server() -> Iterator[LiveServer]:
    with live_server(config()) as running:
        yield running


def crash_engine(server: LiveServer, protocol: Protocol = CHAT) -> httpx.Response:
    return httpx.post(server.url + protocol.path, json=protocol.body("death during", stream=True))


def test_a_crash_ends_streams_with_the_error_of_the_protocol(crashing_server: LiveServer) -> None:
    error = {"type": "overloaded_error", "message": "segmentation fault", "code": "engine_unavailable"}
    reply = crash_engine(crashing_server, MESSAGES)
    last = parse_events(reply.text)[-1]
    assert last.event == "error"
    assert last.data == {"type": "error", "error": error, "request_id": reply.headers["request-id"]}

    error = {"message": "segmentation fault", "type": "server_error", "param": None, "code": "engine_unavailable"}
    assert parse_events(crash_engine(crashing_server, CHAT).text)[-1].data == {"error": error}

    failed = parse_events(crash_engine(crashing_server, RESPONSES).text)[-1]
    assert failed.event == "response.failed"
    assert failed.data["response"]["error"] == {"code": "server_error", "message": "segmentation fault"}


def test_a_crash_fails_unstreamed_replies_with_retry_after(crashing_server: LiveServer, protocol: Protocol) -> None:
    reply = httpx.post(crashing_server.url + protocol.path, json=protocol.body("death during"))
    assert reply.status_code == (529 if protocol is MESSAGES else 503)
    assert int(reply.headers["retry-after"]) >= 1
    assert reply.json()["error"]["message"] == "segmentation fault"


def test_the_engine_is_reloaded_for_the_next_request(
    crashing_server: LiveServer, protocol: Protocol, stream: bool
) -> None:
    crash_engine(crashing_server)
    reply = httpx.post(crashing_server.url + protocol.path, json=protocol.body("text", stream=stream))
    parsed = protocol.parse_stream(parse_events(reply.text)) if stream else protocol.parse_reply(reply.json())
    assert parsed.text == "Hello there, friend."
    wait_until_idle(crashing_server)


def test_a_request_without_output_is_retried_after_a_crash(
    crashing_server: LiveServer, protocol: Protocol, stream: bool
) -> None:
    with ThreadPoolExecutor(1) as executor:
        body = protocol.body("slow prefill", stream=stream)
        pending = executor.submit(httpx.post, crashing_server.url + protocol.path, json=body, timeout=60)
        wait_for_running(crashing_server, 1)
        crash_engine(crashing_server)
        reply = pending.result()
    assert reply.status_code == 200
    if stream:
        events = parse_events(reply.text)
        assert protocol.parse_stream(events).text == "done"
        assert len([name for name in event_names(events) if name in ("message_start", "response.created")]) == (
            protocol is not CHAT
        )
    else:
        assert protocol.parse_reply(reply.json()).text == "done"
    wait_until_idle(crashing_server)


# --- files that llama.cpp does not survive ----------------------------------------------------------------------------


def test_a_file_with_two_equal_tokens_is_refused_everywhere_and_other_models_keep_running(tmp_path: Path) -> None:
    file = tmp_path / "twins.gguf"
    file.write_bytes(with_two_equal_tokens(coder(False).read_bytes()))
    twins = {"path": str(file), "n_threads": 1}
    models = {"demo": {"backend": "fake"}, "twins": twins, "idle": twins | {"enabled": False, "autoload": True}}
    sentence = (
        "twins.gguf has no readable vocabulary: two tokens of its vocabulary are equal, which llama.cpp does not read"
    )
    checked = check_models(load_config(env={}, overrides={"models": models}), (), read_memory())
    assert {problem.path for problem in checked if sentence in problem.message} >= {
        "models.twins.path",
        "models.idle.path",
    }
    with live_server({"models": models}, ready=False) as running, httpx.Client(base_url=running.url) as client:
        for name in ("twins", "idle"):
            reply = client.post(CHAT.path, json=CHAT.body("Hello!", model=name))
            assert sentence in reply.json()["error"]["message"], reply.text
            loaded = client.post(f"/v1/admin/models/{name}/load")
            assert loaded.status_code >= 400
            assert sentence in loaded.text
        assert client.post(CHAT.path, json=CHAT.body("Hello!", model="demo")).status_code == 200
