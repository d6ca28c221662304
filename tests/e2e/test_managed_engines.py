"""Managed engines behind the gateway: a real llama-server, and a program that imitates `vllm serve`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.helpers import stream_events, wait_until, wait_until_idle
from tests.e2e.protocols import CHAT, MESSAGES, RESPONSES, Protocol, ServerSentEvent, parse_events, send
from tests.engines.llama_server import helpers
from tests.engines.vllm_serve.helpers import behaviour, fake_vllm, recorded
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
def debug_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("debug")


@pytest.fixture(scope="module")
def server(debug_dir: Path) -> Iterator[LiveServer]:
    with managed_server(llama_server_config() | {"log": {"debug_dir": str(debug_dir)}}) as running:
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


def test_an_overflow_is_refused_before_the_first_byte_in_each_protocol(
    server: LiveServer, client: httpx.Client
) -> None:
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
    if not isinstance(event.data, dict):  # a keep-alive comment
        return False
    choices = event.data.get("choices")
    return bool(choices[0]["delta"].get("content")) if choices else "delta" in event.event


def test_a_killed_llama_server_ends_the_stream_and_is_reloaded(long_server: LiveServer, protocol: Protocol) -> None:
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
        assert last.data["error"]["code"] == "engine_died"
    else:
        assert (last.event, last.data["response"]["error"]["code"]) == ("response.failed", "server_error")
    with httpx.Client(base_url=long_server.url, timeout=60) as client:
        assert send(client, protocol, False, "Hello!", limit=4).text
    wait_until_idle(long_server)


def test_requests_wait_for_the_replacement_of_a_killed_llama_server(long_server: LiveServer) -> None:
    """A request that reaches the dying server may have killed it and is not retried."""
    kill_engine(long_server)
    with httpx.Client(base_url=long_server.url, timeout=60) as client:
        first = client.post("/v1/chat/completions", json=CHAT.body("Hello!"))
        assert first.status_code == 200 or first.json()["error"]["code"] == "engine_died"
        assert send(client, CHAT, False, "Hello!", limit=4).text


def test_a_failed_load_reports_the_reason_of_llama_server() -> None:
    broken = llama_server_config(llama_server_extra_args=["--nonsense"])
    with managed_server(broken) as server:
        wait_until(lambda: server.status("demo").state == "failed", "the load has failed")
        reply = httpx.post(server.url + "/v1/chat/completions", json=CHAT.body("Hello!"))
        assert reply.status_code == 503
        assert "invalid argument: --nonsense" in reply.json()["error"]["message"]


# --- an imitated `vllm serve` -----------------------------------------------------------------------------------------

FAKE_WINDOW = 64


def fake_vllm_config(**more: Any) -> dict[str, Any]:
    model = {
        "backend": "vllm_serve",
        "vllm_model": "tests/echo",
        "vllm_serve_binary": fake_vllm(),
        "vllm_max_model_len": FAKE_WINDOW,
        "parallel": 2,
    }
    return {"models": {"demo": model | more}}


@pytest.fixture(scope="module")
def fake_vllm_server(debug_dir: Path) -> Iterator[LiveServer]:
    with managed_server(fake_vllm_config() | {"log": {"debug_dir": str(debug_dir)}}) as running:
        yield running


@pytest.fixture(scope="module")
def fake_vllm_client(fake_vllm_server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fake_vllm_server.url, timeout=60) as fake_vllm_client:
        yield fake_vllm_client


def test_fake_vllm_works_in_every_protocol_and_reports_its_usage(
    fake_vllm_server: LiveServer, fake_vllm_client: httpx.Client, protocol: Protocol, stream: bool
) -> None:
    parsed = send(fake_vllm_client, protocol, stream, "What is up?", limit=4)
    assert parsed.text.split() == ["What", "is", "up?", "one"]
    assert parsed.usage.prompt == count_tokens(fake_vllm_server.url, "What is up?")
    assert (parsed.usage.cached, parsed.usage.output) == (3, 4)


def test_an_overflow_error_of_vllm_is_translated_for_each_protocol(
    fake_vllm_server: LiveServer, fake_vllm_client: httpx.Client
) -> None:
    long = "word " * 100
    tokens = count_tokens(fake_vllm_server.url, long)
    expected = fake_vllm_client.post("/v1/messages", json=MESSAGES.body(long)).json()["error"]["message"]
    assert expected == f"prompt is too long: {tokens} tokens > {FAKE_WINDOW} maximum"
    error = fake_vllm_client.post("/v1/chat/completions", json=CHAT.body(long, stream=True)).json()["error"]
    assert (error["code"], error["n_prompt_tokens"]) == ("context_length_exceeded", tokens)
    failed = parse_events(fake_vllm_client.post("/v1/responses", json=RESPONSES.body(long, stream=True)).text)[-1]
    assert failed.data["response"]["error"]["code"] == "context_length_exceeded"


def test_tools_are_refused_without_a_tool_parser(fake_vllm_client: httpx.Client) -> None:
    reply = fake_vllm_client.post("/v1/chat/completions", json=CHAT.body("What is up?", tools=True))
    assert reply.status_code == 400
    assert "tools" in reply.json()["error"]["message"]


def test_a_killed_vllm_ends_the_stream_and_is_reloaded(protocol: Protocol) -> None:
    with managed_server(fake_vllm_config()) as long_server:
        with stream_events(long_server, protocol.path, protocol.body("Endless words", stream=True)) as incoming:
            parsed = [next(event for event in incoming if is_content(event))]
            kill_engine(long_server)
            parsed += incoming
        assert "was killed by SIGKILL" in str(parsed[-1].data)
        with httpx.Client(base_url=long_server.url, timeout=60) as fake_vllm_client:
            assert send(fake_vllm_client, protocol, False, "Hello!", limit=4).text
        wait_until_idle(long_server)


def test_a_killed_vllm_replica_does_not_affect_the_other() -> None:
    with managed_server(fake_vllm_config(replicas=2, parallel=1)) as fake_vllm_server:
        wait_until(
            lambda: _pids(fake_vllm_server).count(None) == 0 and len(_pids(fake_vllm_server)) == 2,
            "both replicas are loaded",
        )
        bodies = [CHAT.body(text, stream=True) for text in ("Endless words", "Endless rain")]
        with (
            stream_events(fake_vllm_server, CHAT.path, bodies[0]) as first_stream,
            stream_events(fake_vllm_server, CHAT.path, bodies[1]) as second_stream,
        ):
            for stream in (first_stream, second_stream):
                next(event for event in stream if is_content(event))
            first, second = fake_vllm_server.app.scheduler.engines("demo")
            assert [each.stats().running for each in (first, second)] == [1, 1]
            os.kill(_pids(fake_vllm_server)[0], signal.SIGKILL)
            wait_until(first.lost.done, "the crash is noticed")
            assert (second.stats().running, second.lost.done()) == (1, False)


def _pids(fake_vllm_server: LiveServer) -> list[Any]:
    return [getattr(each, "pid", None) for each in fake_vllm_server.app.scheduler.engines("demo")]


def test_a_load_can_override_settings(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with managed_server(fake_vllm_config(vllm_serve_env=behaviour("", notes), enabled=False)) as fake_vllm_server:
        wrong = httpx.post(fake_vllm_server.url + "/v1/admin/models/demo/load", json={"vllm_serve_binary": "/bin/sh"})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["code"] == "override_not_allowed"
        overrides = {"vllm_max_model_len": 48, "vllm_kv_cache_dtype": "fp8", "vllm_speculative_method": "mtp"}
        reply = httpx.post(fake_vllm_server.url + "/v1/admin/models/demo/load", json=overrides, timeout=60)
        assert reply.status_code < 300, reply.text
        wait_until(lambda: fake_vllm_server.status("demo").state == "ready", "the model is loaded")
        (argv,) = recorded(notes, "argv")
        expected = {"--max-model-len": "48", "--kv-cache-dtype": "fp8", "--speculative-config": '{"method":"mtp"}'}
        assert {flag: argv[argv.index(flag) + 1] for flag in expected} == expected


def test_a_failed_load_reports_the_reason_of_vllm() -> None:
    with managed_server(fake_vllm_config(vllm_serve_env=behaviour("fails_to_start"))) as fake_vllm_server:
        wait_until(lambda: fake_vllm_server.status("demo").state == "failed", "the load has failed")
        reply = httpx.post(fake_vllm_server.url + "/v1/chat/completions", json=CHAT.body("Hello!"))
        assert reply.status_code == 503
        assert "ValueError: this machine has no such instruction" in reply.json()["error"]["message"]


# --- debug files ------------------------------------------------------------------------------------------------------


def captured(debug_dir: Path, reply: httpx.Response) -> dict[str, str]:
    """The four files of a request, which are written after its reply: a file exists for a moment before it has text."""
    trace = reply.headers["request-id"].removeprefix("req_")
    wait_until(lambda: any(path.stat().st_size for path in debug_dir.glob(f"*-{trace}.4-*")), "all is written")
    return {path.name.partition(trace + ".")[2][:1]: path.read_text() for path in debug_dir.glob(f"*-{trace}.*")}


@pytest.mark.parametrize("fixture", ["client", "fake_vllm_client"])
def test_the_debug_files_have_what_the_server_was_sent_and_what_it_streamed(
    request: pytest.FixtureRequest, debug_dir: Path, fixture: str, stream: bool
) -> None:
    client: httpx.Client = request.getfixturevalue(fixture)
    body = MESSAGES.body("What is up?", limit=4, stream=stream)
    reply = client.post("/v1/messages", json=body)
    files = captured(debug_dir, reply)
    assert sorted(files) == ["1", "2", "3", "4"]
    sent = json.loads(files["2"])
    assert (sent["messages"][-1]["content"], sent["stream"]) == ("What is up?", True)
    assert files["3"].startswith("data: {")
    assert "data: [DONE]" in files["3"] or "usage" in files["3"]
    assert files["4"] == reply.text


@pytest.mark.parametrize("fixture", ["client", "fake_vllm_client"])
def test_a_refusal_writes_the_debug_files_too(request: pytest.FixtureRequest, debug_dir: Path, fixture: str) -> None:
    client: httpx.Client = request.getfixturevalue(fixture)
    reply = client.post("/v1/chat/completions", json=CHAT.body("word " * 300))
    assert reply.status_code == 400
    files = captured(debug_dir, reply)
    assert "word word" in files["1"]
    assert files["4"] == reply.text
