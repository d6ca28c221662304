"""A `vllm serve` behind the gateway, by a program that stands in for it: overflow, death, and settings of one load."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.helpers import stream_events, wait_until, wait_until_idle
from tests.e2e.protocols import PROTOCOLS, Protocol, parse_events
from tests.e2e.test_llama_server import count, is_content, kill, serving_well
from tests.e2e.test_matrix import ask
from tests.engines.vllm_serve.helpers import behaviour, fake_vllm, recorded
from tests.live_server import LiveServer

WINDOW = 64
MESSAGES, CHAT, RESPONSES = PROTOCOLS.values()


def config(**more: Any) -> dict[str, Any]:
    model = {
        "backend": "vllm_serve",
        "vllm_model": "tests/echo",
        "vllm_serve_binary": fake_vllm(),
        "vllm_max_model_len": WINDOW,
        "parallel": 2,
    }
    return {"models": {"demo": model | more}}


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    with serving_well(config()) as running:
        yield running


@pytest.fixture(scope="module")
def client(served: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def test_it_answers_in_every_protocol_and_counts_as_it_told_us(
    served: LiveServer, client: httpx.Client, wire: Protocol, stream: bool
) -> None:
    seen = ask(client, wire, stream, "What is up?", limit=4)
    assert seen.text.split() == ["What", "is", "up?", "one"]
    assert seen.usage.prompt == count(served.url, "What is up?")
    assert (seen.usage.cached, seen.usage.output) == (3, 4)


def test_its_own_words_for_an_overflow_become_each_dialects(served: LiveServer, client: httpx.Client) -> None:
    long = "word " * 100
    tokens = count(served.url, long)
    told = client.post("/v1/messages", json=MESSAGES.body(long)).json()["error"]["message"]
    assert told == f"prompt is too long: {tokens} tokens > {WINDOW} maximum"
    error = client.post("/v1/chat/completions", json=CHAT.body(long, stream=True)).json()["error"]
    assert (error["code"], error["n_prompt_tokens"]) == ("context_length_exceeded", tokens)
    failed = parse_events(client.post("/v1/responses", json=RESPONSES.body(long, stream=True)).text)[-1]
    assert failed.data["response"]["error"]["code"] == "context_length_exceeded"


def test_tools_are_refused_where_nobody_could_read_a_call(client: httpx.Client) -> None:
    reply = client.post("/v1/chat/completions", json=CHAT.body("What is up?", tools=True))
    assert reply.status_code == 400
    assert "tools" in reply.json()["error"]["message"]


def test_a_kill_in_mid_stream_is_an_error_and_the_next_request_is_answered(wire: Protocol) -> None:
    with serving_well(config()) as mortal:
        with stream_events(mortal, wire.path, wire.body("Endless words", stream=True)) as arriving:
            seen = [next(frame for frame in arriving if is_content(frame))]
            kill(mortal)
            seen += arriving
        assert "was killed by SIGKILL" in str(seen[-1].data)
        with httpx.Client(base_url=mortal.url, timeout=60) as client:
            assert ask(client, wire, False, "Hello!", limit=4).text
        wait_until_idle(mortal)


def test_one_replica_of_two_is_killed_and_the_other_goes_on() -> None:
    with serving_well(config(replicas=2, parallel=1)) as served:
        wait_until(lambda: _pids(served).count(None) == 0 and len(_pids(served)) == 2, "both replicas are loaded")
        bodies = [CHAT.body(text, stream=True) for text in ("Endless words", "Endless rain")]
        with stream_events(served, CHAT.path, bodies[0]) as one, stream_events(served, CHAT.path, bodies[1]) as two:
            for stream in (one, two):
                next(frame for frame in stream if is_content(frame))
            first, second = served.app.scheduler.engines("demo")
            assert [each.stats().running for each in (first, second)] == [1, 1]
            os.kill(_pids(served)[0], signal.SIGKILL)
            wait_until(first.lost.done, "the death of one is known")
            assert (second.stats().running, second.lost.done()) == (1, False)


def _pids(served: LiveServer) -> list[Any]:
    return [getattr(each, "pid", None) for each in served.app.scheduler.engines("demo")]


def test_one_load_may_have_settings_of_its_own(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    with serving_well(config(vllm_serve_env=behaviour("", notes), enabled=False)) as served:
        wrong = httpx.post(served.url + "/v1/admin/models/demo/load", json={"vllm_serve_binary": "/bin/sh"})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["code"] == "override_not_allowed"
        asked = {"vllm_max_model_len": 48, "vllm_kv_cache_dtype": "fp8", "vllm_speculative_method": "mtp"}
        reply = httpx.post(served.url + "/v1/admin/models/demo/load", json=asked, timeout=60)
        assert reply.status_code < 300, reply.text
        wait_until(lambda: served.status("demo").state == "ready", "the model is loaded")
        (argv,) = recorded(notes, "argv")
        told = {"--max-model-len": "48", "--kv-cache-dtype": "fp8", "--speculative-config": '{"method":"mtp"}'}
        assert {flag: argv[argv.index(flag) + 1] for flag in told} == told


def test_a_model_that_cannot_be_loaded_fails_alone_with_the_programs_reason() -> None:
    with serving_well(config(vllm_serve_env=behaviour("fails_to_start"))) as served:
        wait_until(lambda: served.status("demo").state == "failed", "the load has failed")
        reply = httpx.post(served.url + "/v1/chat/completions", json=CHAT.body("Hello!"))
        assert reply.status_code == 503
        assert "ValueError: this machine has no such instruction" in reply.json()["error"]["message"]
