"""A real llama-server behind the gateway: its tokens are ours to count, and its death is nobody's end."""

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
from tests.e2e.protocols import PROTOCOLS, Protocol, ServerSentEvent, parse_events
from tests.e2e.test_matrix import ask
from tests.engines.llama_server import helpers
from tests.live_server import LiveServer, live_server

WINDOW = 256
ENDLESS = {"0": -100, "2": -100}  # the tokens that would end its turn
MESSAGES, CHAT, RESPONSES = PROTOCOLS.values()


def config(window: int = WINDOW, **more: Any) -> dict[str, Any]:
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
def serving_well(settings: dict[str, Any]) -> Iterator[LiveServer]:
    """Stops its engines before the server: one that is dropped is ended by its tether, not by us."""
    with live_server(settings) as running:
        try:
            yield running
        finally:
            asyncio.run_coroutine_threadsafe(running.app.stop(), running.loop).result(60)


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    with serving_well(config()) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def count(url: str, text: str) -> int:
    reply = httpx.post(url + "/v1/messages/count_tokens", json=MESSAGES.body(text))
    assert reply.status_code == 200, reply.text
    counted: int = reply.json()["input_tokens"]
    return counted


def test_it_answers_in_every_protocol_and_counts_as_we_do(
    served: LiveServer, client: httpx.Client, wire: Protocol, stream: bool
) -> None:
    seen = ask(client, wire, stream, "What is the capital of France?", limit=6)
    assert seen.text
    assert seen.usage.prompt == count(served.url, "What is the capital of France?")
    assert 1 <= seen.usage.output <= 6


def test_the_prompt_is_counted_before_it_is_read(client: httpx.Client) -> None:
    got = parse_events(client.post("/v1/messages", json=MESSAGES.body("Hi.", limit=2, stream=True)).text)
    usage = got[0].data["message"]["usage"]
    assert usage["input_tokens"] == ask(client, MESSAGES, False, "Hi.", limit=2).usage.prompt


def test_tokens_are_counted_while_it_is_not_loaded(served: LiveServer) -> None:
    with serving_well(config(enabled=False)) as stopped:
        assert count(stopped.url, "Hello!") == count(served.url, "Hello!")
        assert stopped.status("demo").state == "stopped"


def test_an_overflow_is_told_before_the_first_byte_in_each_dialect(served: LiveServer, client: httpx.Client) -> None:
    long = "word " * 300
    tokens = count(served.url, long)
    told = client.post("/v1/messages", json=MESSAGES.body(long)).json()["error"]["message"]
    assert told == f"prompt is too long: {tokens} tokens > {WINDOW} maximum"
    error = client.post("/v1/chat/completions", json=CHAT.body(long, stream=True)).json()["error"]
    assert (error["code"], error["n_prompt_tokens"]) == ("context_length_exceeded", tokens)
    failed = parse_events(client.post("/v1/responses", json=RESPONSES.body(long, stream=True)).text)[-1]
    assert failed.data["response"]["error"]["code"] == "context_length_exceeded"


def test_an_answer_that_fills_the_window_says_so(client: httpx.Client) -> None:
    seen = ask(client, MESSAGES, True, "count " * 180, limit=32000, logit_bias=ENDLESS)
    assert seen.stop == "model_context_window_exceeded"
    assert seen.usage.prompt + seen.usage.output >= WINDOW - 1


# --- death ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mortal() -> Iterator[LiveServer]:
    with serving_well(config(2048)) as running:
        yield running


def kill(served: LiveServer) -> None:
    engine: Any = served.app.scheduler.engine("demo")
    os.kill(engine.pid, signal.SIGKILL)


def is_content(frame: ServerSentEvent) -> bool:
    choices = frame.data.get("choices")
    return bool(choices[0]["delta"].get("content")) if choices else "delta" in frame.event


def test_a_kill_in_mid_stream_is_an_error_and_the_next_request_is_answered(mortal: LiveServer, wire: Protocol) -> None:
    body = wire.body("Count.", limit=1900, logit_bias=ENDLESS, stream=True)
    with stream_events(mortal, wire.path, body) as arriving:
        seen = [next(frame for frame in arriving if is_content(frame))]
        kill(mortal)
        seen += arriving
    last = seen[-1]
    told = str(last.data)
    assert "was killed by SIGKILL" in told
    if wire is MESSAGES:
        assert (last.event, last.data["error"]["type"]) == ("error", "overloaded_error")
    elif wire is CHAT:
        assert last.data["error"]["code"] == "engine_unavailable"
    else:
        assert (last.event, last.data["response"]["error"]["code"]) == ("response.failed", "server_error")
    with httpx.Client(base_url=mortal.url, timeout=60) as client:
        assert ask(client, wire, False, "Hello!", limit=4).text
    wait_until_idle(mortal)


def test_a_kill_before_the_first_word_is_not_noticed_by_the_client(mortal: LiveServer) -> None:
    kill(mortal)
    with httpx.Client(base_url=mortal.url, timeout=60) as client:
        assert ask(client, CHAT, False, "Hello!", limit=4).text


def test_a_model_that_cannot_be_loaded_fails_alone_with_the_programs_reason() -> None:
    broken = config(llama_server_extra_args=["--nonsense"])
    with serving_well(broken) as served:
        wait_until(lambda: served.status("demo").state == "failed", "the load has failed")
        reply = httpx.post(served.url + "/v1/chat/completions", json=CHAT.body("Hello!"))
        assert reply.status_code == 503
        assert "invalid argument: --nonsense" in reply.json()["error"]["message"]
