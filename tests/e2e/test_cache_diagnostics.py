"""Cache diagnostics: how much of a prompt was cached and why not more, in header, log, metrics and admin API."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.scripted_llama import scripted_answers
from tests.e2e.helpers import wait_until
from tests.engines.llama_cpp.short_model import short_model_file
from tests.live_server import LiveServer, demo_config, live_server
from tests.telemetry.prometheus_text import sample_values

SYSTEM_PROMPT = "You are an agent who works with files. " * 20
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {}}}
SCRIPT: list[dict[str, Any]] = [
    {"result": ".", "steps": [{"text": "It is there."}]},
    {
        "when": "look",
        "steps": [
            {"think": "I should use the tool."},
            {"text": "Looking.\n"},
            {"call": {"name": "look", "arguments": '{"why":"because it was asked for", "path":"a.txt", "n":5000.0}'}},
        ],
    },
]
SCRIPT_WITHOUT_REASONING = [
    {**rule, "steps": [step for step in rule["steps"] if "think" not in step]} for rule in SCRIPT
]
ECHOED_ARGUMENTS = {
    "path": "a.txt",
    "n": 5000,
    "why": "because it was asked for",
}  # as a client echoes it


class Conversation:
    def __init__(self, server: LiveServer, **body: Any) -> None:
        self.url, self.messages = server.url, [{"role": "user", "content": "look into it"}]
        self.body = {"model": "m", "max_tokens": 100, "system": SYSTEM_PROMPT, "tools": [TOOL], **body}
        self.headers = {"x-claude-code-session-id": "talk"}

    def turn(self, **more: Any) -> dict[str, Any]:
        body = {**self.body, "messages": self.messages, **more}
        self.response = httpx.post(f"{self.url}/v1/messages", json=body, headers=self.headers, timeout=60)
        self.response.raise_for_status()
        return {} if body.get("stream") else self.response.json()

    def append_turn(self, *content: dict[str, Any], result: Any = "It is empty.") -> None:
        calls = [block for block in content if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": result} for call in calls]
        self.messages += [{"role": "assistant", "content": list(content)}, {"role": "user", "content": results}]

    def count(self, url: str) -> int:
        """The tokens of the next request; without a URL, on a new server that has not seen the conversation."""
        body = {**self.body, "messages": self.messages}
        if url:
            reply = httpx.post(f"{url}/v1/messages/count_tokens", json=body, headers=self.headers, timeout=60)
            return int(reply.raise_for_status().json()["input_tokens"])
        with live_server(demo_config(SCRIPT)) as other:
            return self.count(other.url)

    @property
    def cache_header(self) -> dict[str, str]:
        header = self.response.headers["x-modelyard-cache"]
        return dict(part.split("=") for part in header.split("; "))


def echoed(reply: dict[str, Any]) -> list[dict[str, Any]]:
    return [block | ({"input": ECHOED_ARGUMENTS} if block["type"] == "tool_use" else {}) for block in reply["content"]]


def test_a_reordered_call_is_read_from_the_cache() -> None:
    with live_server(demo_config(SCRIPT)) as server:
        conversation = Conversation(server)
        first = conversation.turn()
        assert conversation.cache_header["cause"] == "new_session"
        conversation.append_turn(*echoed(first))
        second = conversation.turn()
    usage, next_usage = first["usage"], second["usage"]
    assert conversation.cache_header == {
        "reused": str(next_usage["cache_read_input_tokens"]),
        "evaluated": conversation.cache_header["evaluated"],
        "cause": "none",
    }
    assert next_usage["cache_read_input_tokens"] >= usage["input_tokens"] + usage["output_tokens"]


def test_reasoning_omitted_by_the_client_is_restored() -> None:
    with live_server(demo_config(SCRIPT)) as server:
        conversation = Conversation(server)
        first = conversation.turn()
        conversation.append_turn(*(block for block in echoed(first) if block["type"] != "thinking"))
        conversation.turn()
    assert conversation.cache_header["cause"] == "none"


def test_hidden_reasoning_is_restored() -> None:
    with live_server(demo_config(SCRIPT, show_thinking=False)) as server:
        conversation = Conversation(server)
        first = conversation.turn()
        assert [block["type"] for block in first["content"]] == ["text", "tool_use"]
        conversation.append_turn(*echoed(first))
        conversation.turn()
    assert conversation.cache_header["cause"] == "none"


def test_line_breaks_before_a_call_are_restored() -> None:
    """The template writes one, the model generated three, and the client saw none of them."""
    first, last = SCRIPT
    script = [first, {**last, "steps": [{"text": "Looking.\n\n\n"}, last["steps"][-1]]}]
    with live_server(demo_config(script)) as server:
        conversation = Conversation(server)
        reply = conversation.turn()
        assert reply["content"][0]["text"] == "Looking."
        conversation.append_turn(*echoed(reply))
        conversation.turn()
    assert conversation.cache_header["cause"] == "none"


def test_a_changed_call_is_kept_and_reported() -> None:
    with live_server(demo_config(SCRIPT)) as server:
        conversation = Conversation(server)
        first = conversation.turn()
        blocks = [
            block | ({"input": {"other": "words"}} if block["type"] == "tool_use" else {}) for block in first["content"]
        ]
        conversation.append_turn(*blocks)
        conversation.turn()
    assert conversation.cache_header["cause"] == "arguments_reserialised"


@pytest.mark.parametrize("stream", [False, True])
def test_the_cause_is_in_the_header_the_log_the_metrics_and_the_admin_api(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "modelyard.http")
    with live_server(demo_config(SCRIPT)) as server:
        conversation = Conversation(server)
        conversation.turn()
        conversation.turn(system="It is Monday. " + SYSTEM_PROMPT, stream=stream)
        trace = conversation.response.headers["request-id"]
        record = httpx.get(f"{server.url}/v1/admin/requests/{trace}").json()["ended"][0]
        metrics = httpx.get(f"{server.url}/metrics").content
    header = conversation.cache_header
    assert header["cause"] == "system_changed"
    reuse = record["reuse"]
    assert (str(reuse["reused"]), str(reuse["evaluated"])) == (header["reused"], header["evaluated"])
    assert (reuse["cause"], reuse["message"], reuse["role"]) == ("system_changed", 0, "system")
    assert reuse["token"] == reuse["reused"]
    assert sample_values(metrics, "cache_requests_total") == {("main", "new_session"): 1, ("main", "system_changed"): 1}
    assert sample_values(metrics, "evaluated_tokens_total")["main", "system_changed"] == reuse["evaluated"]
    lines = [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "request"]
    (line,) = [first for first in lines if first.get("cause") == "system_changed"]
    assert (line["reused"], line["evaluated"]) == (reuse["reused"], reuse["evaluated"])
    assert (line["token"], line["message"], line["role"]) == (reuse["token"], 0, "system")


def test_causes_for_changed_tools_and_billing_blocks() -> None:
    bill = [{"type": "text", "text": f"x-anthropic-billing-header: cch={n};"} for n in ("a1", "b2")]
    rules = {"type": "text", "text": SYSTEM_PROMPT}
    with live_server(demo_config(SCRIPT)) as server:
        conversation = Conversation(server)
        conversation.turn(system=[bill[0], rules])
        conversation.turn(system=[bill[1], rules])
        assert conversation.cache_header["cause"] == "none"
        conversation.turn(system=[bill[1], rules], tools=[TOOL | {"name": "another"}])
        assert conversation.cache_header["cause"] == "tools_changed"
        conversation.turn(system=[{"type": "text", "text": "Hello. " + bill[0]["text"] + SYSTEM_PROMPT}])
        conversation.turn(system=[{"type": "text", "text": "Hello. " + bill[1]["text"] + SYSTEM_PROMPT}])
        assert conversation.cache_header["cause"] == "billing_block"


def test_an_evicted_sequence_is_reported() -> None:
    with live_server(demo_config(SCRIPT)) as server:
        conversation = Conversation(server)
        first = conversation.turn()
        conversation.append_turn(*echoed(first))
        engine: Any = server.app.scheduler.engine("demo")
        server.loop.call_soon_threadsafe(engine.cache("main").sequences.clear)
        conversation.turn()
    assert conversation.cache_header["cause"] == "evicted"


def test_a_stream_opened_by_a_keepalive_has_no_cache_header() -> None:
    """Its headers are sent while it queues: the first stream occupies the only slot."""
    config = demo_config([{"steps": [{"text": "ok"}, {"hang": True}]}])
    config["caches"]["main"]["parallel"] = 1
    config["http"] = {"keepalive_s": 0.05}
    with live_server(config) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        first, second = (stream(client, text) for text in ("one", "two"))
        with first, second as waiting:
            assert waiting.status_code == 200
            assert "x-modelyard-cache" not in waiting.headers


def stream(client: httpx.Client, text: str) -> AbstractContextManager[httpx.Response]:
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]}
    return client.stream("POST", "/v1/chat/completions", json=body)


def test_an_engine_in_a_separate_process_reports_the_same_causes() -> None:
    with live_server(demo_config(SCRIPT, placement="process") | {"workers": {"patience": 1000}}) as server:
        conversation = Conversation(server)
        first = conversation.turn()
        assert conversation.cache_header["cause"] == "new_session"
        conversation.append_turn(*echoed(first))
        conversation.turn()
        assert conversation.cache_header["cause"] == "none"
        conversation.turn(system="It is Monday. " + SYSTEM_PROMPT, stream=True)
        assert conversation.cache_header["cause"] == "system_changed"


def test_a_gateway_with_a_shared_store_restores_the_same_text(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    config = demo_config(SCRIPT_WITHOUT_REASONING) | {"store": {"backend": "sqlite", "path": str(store)}}
    with live_server(config) as first, live_server(config) as other, closing(sqlite3.connect(store)) as file:
        conversation = Conversation(first)
        conversation.append_turn(*echoed(conversation.turn()))
        wait_until(lambda: file.execute("SELECT entries FROM totals").fetchone()[0] == 1, "the entry is in the store")
        own_count, other_count, without_store = (conversation.count(url) for url in (first.url, other.url, ""))
    assert own_count == other_count
    assert own_count != without_store, (
        "the echoed text has as many tokens as the generated one, so this test proves nothing"
    )


def test_llama_cpp_evaluates_only_new_tokens() -> None:
    """The template of the model has no tools, so they are described in the prompt."""
    model = {"backend": "llama_cpp", "path": str(short_model_file()), "n_threads": 1, "speculation": "off"}
    config = {
        "models": {"smollm2": model},
        "caches": {"main": {"model": "smollm2", "n_ctx": 2048, "parallel": 1}},
        "routes": [{"match": "*", "cache": "main"}],
    }
    with scripted_answers(SCRIPT_WITHOUT_REASONING), live_server(config) as server:
        conversation = Conversation(server, system="You are an agent.")
        first = conversation.turn()
        conversation.append_turn(*echoed(first))
        second = conversation.turn()
    usage = first["usage"]
    assert second["content"] == [{"type": "text", "text": "It is there."}]
    assert int(conversation.cache_header["reused"]) == usage["input_tokens"] + usage["output_tokens"]
    assert conversation.cache_header["cause"] == "none"


def test_a_deferred_tool_does_not_change_the_prefix() -> None:
    """The client inserts it into the middle of its list and refers to it in the result of the search."""
    found = TOOL | {"name": "early", "defer_loading": True}
    reference = [{"type": "tool_reference", "tool_name": "early"}]
    with live_server(demo_config(SCRIPT)) as server:
        conversation = Conversation(server)
        conversation.append_turn(*echoed(conversation.turn(tools=[TOOL | {"name": "any"}, TOOL])), result=reference)
        conversation.turn(tools=[TOOL | {"name": "any"}, found, TOOL])
    assert conversation.cache_header["cause"] == "none"


# --- API keys ---------------------------------------------------------------------------------------------------------

KEYS = [{"name": name, "key": f"key-of-{name}"} for name in ("ann", "bob", "cyd", "dan")]


def reuse_of(server: LiveServer, key: str, text: str, **headers: str) -> tuple[int, int, str]:
    """Cached tokens in the usage, and reused tokens and cause in the header."""
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": text}]}
    reply = httpx.post(
        f"{server.url}/v1/chat/completions",
        json=body,
        headers={"authorization": f"Bearer key-of-{key}", **headers},
        timeout=60,
    )
    fields = dict(part.split("=") for part in reply.headers["x-modelyard-cache"].split("; "))
    return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"], int(fields["reused"]), fields["cause"]


def check_that_no_key_learns_what_another_one_sent(config: dict[str, Any]) -> None:
    secret = "The combination of the safe is 12 34 56. " * 20
    with live_server(config) as server:
        assert reuse_of(server, "ann", secret)[0] == 0
        for key, guess in (("bob", secret), ("cyd", secret[:400])):
            assert reuse_of(server, key, guess) == (0, 0, "new_session")
            again = reuse_of(server, "ann", secret)
            assert again[0] == again[1] > 100, "a key has lost its own reuse"
        assert reuse_of(server, "dan", secret, **{"x-session-id": "s"}) == (0, 0, "new_session")


def check_that_keys_share_a_cache_if_they_may(config: dict[str, Any]) -> None:
    text = "A long common prompt. " * 20
    with live_server(config) as server:
        assert reuse_of(server, "ann", text)[0] == 0
        assert reuse_of(server, "bob", text)[0] > 60


def test_no_key_learns_what_another_one_sent() -> None:
    check_that_no_key_learns_what_another_one_sent({**demo_config(), "keys": KEYS})


@pytest.mark.parametrize("place", ["model", "cache"])
def test_keys_share_a_cache_if_they_may(place: str) -> None:
    config = {**demo_config(), "keys": KEYS}
    (config["models"]["demo"] if place == "model" else config["caches"]["main"])["share_across_keys"] = True
    check_that_keys_share_a_cache_if_they_may(config)
