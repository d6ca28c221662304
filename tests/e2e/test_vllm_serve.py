"""An imitated `vllm serve`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.helpers import stream_events, wait_until, wait_until_idle
from tests.e2e.protocols import CHAT, MESSAGES, RESPONSES, Protocol, parse_events, send
from tests.e2e.test_llama_server import count_tokens, is_content, kill_engine, managed_server
from tests.engines.vllm_serve.helpers import behaviour, fake_vllm, recorded
from tests.live_server import LiveServer

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
def fake_vllm_server() -> Iterator[LiveServer]:
    with managed_server(fake_vllm_config()) as running:
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
