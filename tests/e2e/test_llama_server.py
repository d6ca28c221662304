"""Managed engines behind the gateway: a real llama-server, and a program that imitates `vllm serve`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.helpers import stream_events, wait_until, wait_until_idle
from tests.e2e.protocols import CHAT, MESSAGES, RESPONSES, Protocol, ServerSentEvent, parse_events, send
from tests.engines.llama_server import helpers
from tests.live_server import LiveServer, live_server

WINDOW = 256
NO_END_TOKENS = {"0": -100, "2": -100}  # end tokens


def llama_server_config(window: int = WINDOW, **more: Any) -> dict[str, Any]:
    options = helpers.options()
    model = {
        "backend": "llama_server",
        "path": options.path,
        "llama_server_binary": options.llama_server_binary,
        "llama_server_n_threads": 1,
        "llama_server_n_ctx": window,
        "parallel": 2,
        "decoding": {"temperature": 0},
    }
    return {"models": {"demo": model | more}}


@contextmanager
def managed_server(settings: dict[str, Any]) -> Iterator[LiveServer]:
    """Stops the engines before the server, so that they end regularly and not by the death of their parent."""
    with live_server(settings) as running:
        try:
            yield running
        finally:
            asyncio.run_coroutine_threadsafe(running.app.stop(), running.loop).result(60)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with managed_server(llama_server_config()) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def count_tokens(url: str, text: str) -> int:
    reply = httpx.post(url + "/v1/messages/count_tokens", json=MESSAGES.body(text))
    assert reply.status_code == 200, reply.text
    counted: int = reply.json()["input_tokens"]
    return counted


def test_every_protocol_works_and_prompt_tokens_match_our_count(
    server: LiveServer, client: httpx.Client, protocol: Protocol, stream: bool
) -> None:
    parsed = send(client, protocol, stream, "What is the capital of France?", limit=6)
    assert parsed.text
    assert parsed.usage.prompt == count_tokens(server.url, "What is the capital of France?")
    assert 1 <= parsed.usage.output <= 6


def test_message_start_has_the_prompt_tokens(client: httpx.Client) -> None:
    events = parse_events(client.post("/v1/messages", json=MESSAGES.body("Hi.", limit=2, stream=True)).text)
    usage = events[0].data["message"]["usage"]
    assert usage["input_tokens"] == send(client, MESSAGES, False, "Hi.", limit=2).usage.prompt


def test_tokens_are_counted_without_a_loaded_engine(server: LiveServer) -> None:
    with managed_server(llama_server_config(enabled=False)) as stopped:
        assert count_tokens(stopped.url, "Hello!") == count_tokens(server.url, "Hello!")
        assert stopped.status("demo").state == "stopped"


def test_an_overflow_is_refused_before_the_first_byte_in_each_protocol(server: LiveServer, client: httpx.Client) -> None:
    long = "word " * 300
    tokens = count_tokens(server.url, long)
    message = client.post("/v1/messages", json=MESSAGES.body(long)).json()["error"]["message"]
    assert message == f"prompt is too long: {tokens} tokens > {WINDOW} maximum"
    error = client.post("/v1/chat/completions", json=CHAT.body(long, stream=True)).json()["error"]
    assert (error["code"], error["n_prompt_tokens"]) == ("context_length_exceeded", tokens)
    failed = parse_events(client.post("/v1/responses", json=RESPONSES.body(long, stream=True)).text)[-1]
    assert failed.data["response"]["error"]["code"] == "context_length_exceeded"


def test_a_reply_that_fills_the_window_has_that_stop_reason(client: httpx.Client) -> None:
    parsed = send(client, MESSAGES, True, "count " * 180, limit=32000, logit_bias=NO_END_TOKENS)
    assert parsed.stop == "model_context_window_exceeded"
    assert parsed.usage.prompt + parsed.usage.output >= WINDOW - 1


# --- crashes ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_server() -> Iterator[LiveServer]:
    with managed_server(llama_server_config(2048)) as running:
        yield running


def kill_engine(server: LiveServer) -> None:
    engine: Any = server.app.scheduler.engine("demo")
    os.kill(engine.pid, signal.SIGKILL)


def is_content(event: ServerSentEvent) -> bool:
    choices = event.data.get("choices")
    return bool(choices[0]["delta"].get("content")) if choices else "delta" in event.event


def test_a_killed_llama_server_ends_the_stream_and_is_reloaded(
    long_server: LiveServer, protocol: Protocol
) -> None:
    body = protocol.body("Count.", limit=1900, logit_bias=NO_END_TOKENS, stream=True)
    with stream_events(long_server, protocol.path, body) as incoming:
        parsed = [next(event for event in incoming if is_content(event))]
        kill_engine(long_server)
        parsed += incoming
    last = parsed[-1]
    message = str(last.data)
    assert "was killed by SIGKILL" in message
    if protocol is MESSAGES:
        assert (last.event, last.data["error"]["type"]) == ("error", "overloaded_error")
    elif protocol is CHAT:
        assert last.data["error"]["code"] == "engine_unavailable"
    else:
        assert (last.event, last.data["response"]["error"]["code"]) == ("response.failed", "server_error")
    with httpx.Client(base_url=long_server.url, timeout=60) as client:
        assert send(client, protocol, False, "Hello!", limit=4).text
    wait_until_idle(long_server)


def test_a_request_is_retried_if_llama_server_was_killed_before_output(long_server: LiveServer) -> None:
    kill_engine(long_server)
    with httpx.Client(base_url=long_server.url, timeout=60) as client:
        assert send(client, CHAT, False, "Hello!", limit=4).text


def test_a_failed_load_reports_the_reason_of_llama_server() -> None:
    broken = llama_server_config(llama_server_extra_args=["--nonsense"])
    with managed_server(broken) as server:
        wait_until(lambda: server.status("demo").state == "failed", "the load has failed")
        reply = httpx.post(server.url + "/v1/chat/completions", json=CHAT.body("Hello!"))
        assert reply.status_code == 503
        assert "invalid argument: --nonsense" in reply.json()["error"]["message"]
