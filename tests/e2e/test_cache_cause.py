"""What a cache had of a prompt and why not more: in the header, the log, the metrics and the admin API."""

from __future__ import annotations

import json
import logging
import sqlite3
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelyard.library import default_model
from tests.e2e.helpers import wait_until
from tests.live_server import LiveServer, demo_config, live_server
from tests.telemetry.prometheus_text import sample_values

RULES = "You are an agent who works with files. " * 20
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
THOUGHTLESS = [{**rule, "steps": [step for step in rule["steps"] if "think" not in step]} for rule in SCRIPT]
ECHO = {"path": "a.txt", "n": 5000, "why": "because it was asked for"}  # as a client tells it: in another order


class Talk:
    def __init__(self, served: LiveServer, **body: Any) -> None:
        self.url, self.messages = served.url, [{"role": "user", "content": "look into it"}]
        self.body = {"model": "m", "max_tokens": 100, "system": RULES, "tools": [TOOL], **body}
        self.headers = {"x-claude-code-session-id": "talk"}

    def turn(self, **more: Any) -> dict[str, Any]:
        body = {**self.body, "messages": self.messages, **more}
        self.response = httpx.post(f"{self.url}/v1/messages", json=body, headers=self.headers, timeout=60)
        self.response.raise_for_status()
        return {} if body.get("stream") else self.response.json()

    def goes_on(self, *content: dict[str, Any], result: Any = "It is empty.") -> None:
        calls = [block for block in content if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call["id"], "content": result} for call in calls]
        self.messages += [{"role": "assistant", "content": list(content)}, {"role": "user", "content": results}]

    def count(self, url: str) -> int:
        """The tokens of what would be asked next; without a URL, where nobody has heard the answer."""
        body = {**self.body, "messages": self.messages}
        if url:
            reply = httpx.post(f"{url}/v1/messages/count_tokens", json=body, headers=self.headers, timeout=60)
            return int(reply.raise_for_status().json()["input_tokens"])
        with live_server(demo_config(SCRIPT)) as stranger:
            return self.count(stranger.url)

    @property
    def told(self) -> dict[str, str]:
        told = self.response.headers["x-modelyard-cache"]
        return dict(part.split("=") for part in told.split("; "))


def echoed(reply: dict[str, Any]) -> list[dict[str, Any]]:
    return [block | ({"input": ECHO} if block["type"] == "tool_use" else {}) for block in reply["content"]]


def test_a_call_that_comes_back_in_another_order_is_read_from_the_cache_all_the_same() -> None:
    with live_server(demo_config(SCRIPT)) as served:
        talk = Talk(served)
        first = talk.turn()
        assert talk.told["cause"] == "new_session"
        talk.goes_on(*echoed(first))
        second = talk.turn()
    used, now = first["usage"], second["usage"]
    assert talk.told == {
        "reused": str(now["cache_read_input_tokens"]),
        "evaluated": talk.told["evaluated"],
        "cause": "none",
    }
    assert now["cache_read_input_tokens"] >= used["input_tokens"] + used["output_tokens"]


def test_reasoning_that_the_client_leaves_out_is_put_back() -> None:
    with live_server(demo_config(SCRIPT)) as served:
        talk = Talk(served)
        first = talk.turn()
        talk.goes_on(*(block for block in echoed(first) if block["type"] != "thinking"))
        talk.turn()
    assert talk.told["cause"] == "none"


def test_reasoning_that_the_client_was_never_shown_is_put_back() -> None:
    with live_server(demo_config(SCRIPT, show_thinking=False)) as served:
        talk = Talk(served)
        first = talk.turn()
        assert [block["type"] for block in first["content"]] == ["text", "tool_use"]
        talk.goes_on(*echoed(first))
        talk.turn()
    assert talk.told["cause"] == "none"


def test_line_breaks_before_a_call_are_told_as_they_were_written() -> None:
    """The template writes one, the model wrote three, and the client was shown none of them."""
    first, last = SCRIPT
    script = [first, {**last, "steps": [{"text": "Looking.\n\n\n"}, last["steps"][-1]]}]
    with live_server(demo_config(script)) as served:
        talk = Talk(served)
        reply = talk.turn()
        assert reply["content"][0]["text"] == "Looking."
        talk.goes_on(*echoed(reply))
        talk.turn()
    assert talk.told["cause"] == "none"


def test_a_call_that_the_client_has_changed_is_the_clients_word_and_is_told() -> None:
    with live_server(demo_config(SCRIPT)) as served:
        talk = Talk(served)
        first = talk.turn()
        blocks = [
            block | ({"input": {"other": "words"}} if block["type"] == "tool_use" else {}) for block in first["content"]
        ]
        talk.goes_on(*blocks)
        talk.turn()
    assert talk.told["cause"] == "arguments_reserialised"


@pytest.mark.parametrize("stream", [False, True])
def test_a_change_is_in_the_header_the_log_the_metrics_and_the_record(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "modelyard.http")
    with live_server(demo_config(SCRIPT)) as served:
        talk = Talk(served)
        talk.turn()
        talk.turn(system="It is Monday. " + RULES, stream=stream)
        trace = talk.response.headers["request-id"]
        record = httpx.get(f"{served.url}/v1/admin/requests/{trace}").json()["ended"][0]
        metrics = httpx.get(f"{served.url}/metrics").content
    told = talk.told
    assert told["cause"] == "system_changed"
    reuse = record["reuse"]
    assert (str(reuse["reused"]), str(reuse["evaluated"])) == (told["reused"], told["evaluated"])
    assert (reuse["cause"], reuse["message"], reuse["role"]) == ("system_changed", 0, "system")
    assert reuse["token"] == reuse["reused"]
    assert sample_values(metrics, "cache_requests_total") == {("main", "new_session"): 1, ("main", "system_changed"): 1}
    assert sample_values(metrics, "evaluated_tokens_total")["main", "system_changed"] == reuse["evaluated"]
    lines = [record.__dict__["fields"] for record in caplog.records if record.getMessage() == "request"]
    (line,) = [one for one in lines if one.get("cause") == "system_changed"]
    assert (line["reused"], line["evaluated"]) == (reuse["reused"], reuse["evaluated"])
    assert (line["token"], line["message"], line["role"]) == (reuse["token"], 0, "system")


def test_tools_and_the_billing_line() -> None:
    bill = [{"type": "text", "text": f"x-anthropic-billing-header: cch={n};"} for n in ("a1", "b2")]
    rules = {"type": "text", "text": RULES}
    with live_server(demo_config(SCRIPT)) as served:
        talk = Talk(served)
        talk.turn(system=[bill[0], rules])
        talk.turn(system=[bill[1], rules])
        assert talk.told["cause"] == "none"
        talk.turn(system=[bill[1], rules], tools=[TOOL | {"name": "another"}])
        assert talk.told["cause"] == "tools_changed"
        talk.turn(system=[{"type": "text", "text": "Hello. " + bill[0]["text"] + RULES}])
        talk.turn(system=[{"type": "text", "text": "Hello. " + bill[1]["text"] + RULES}])
        assert talk.told["cause"] == "billing_block"


def test_evicted_by_hand_is_told_as_evicted() -> None:
    with live_server(demo_config(SCRIPT)) as served:
        talk = Talk(served)
        first = talk.turn()
        talk.goes_on(*echoed(first))
        engine: Any = served.app.scheduler.engine("demo")
        served.loop.call_soon_threadsafe(engine.cache("main")[1].clear)
        talk.turn()
    assert talk.told["cause"] == "evicted"


def test_a_stream_that_a_ping_had_to_open_says_nothing_of_the_cache() -> None:
    """Its headers went out before the engine had looked: the one place is taken for as long as the first hangs."""
    config = demo_config([{"steps": [{"text": "ok"}, {"hang": True}]}])
    config["caches"]["main"]["parallel"] = 1
    config["http"] = {"keepalive_s": 0.05}
    with live_server(config) as served, httpx.Client(base_url=served.url, timeout=60) as client:
        first, second = (stream(client, text) for text in ("one", "two"))
        with first, second as waiting:
            assert waiting.status_code == 200
            assert "x-modelyard-cache" not in waiting.headers


def stream(client: httpx.Client, text: str) -> AbstractContextManager[httpx.Response]:
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]}
    return client.stream("POST", "/v1/chat/completions", json=body)


def test_an_engine_in_a_process_of_its_own_tells_the_same() -> None:
    with live_server(demo_config(SCRIPT, placement="process") | {"workers": {"patience": 1000}}) as served:
        talk = Talk(served)
        first = talk.turn()
        assert talk.told["cause"] == "new_session"
        talk.goes_on(*echoed(first))
        talk.turn()
        assert talk.told["cause"] == "none"
        talk.turn(system="It is Monday. " + RULES, stream=True)
        assert talk.told["cause"] == "system_changed"


def test_another_gateway_that_shares_the_store_tells_a_call_in_the_same_words(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    config = demo_config(THOUGHTLESS) | {"store": {"backend": "sqlite", "path": str(store)}}
    with live_server(config) as one, live_server(config) as other, closing(sqlite3.connect(store)) as file:
        talk = Talk(one)
        talk.goes_on(*echoed(talk.turn()))
        wait_until(lambda: file.execute("SELECT entries FROM totals").fetchone()[0] == 1, "the words are in the store")
        here, there, alone = (talk.count(url) for url in (one.url, other.url, ""))
    assert here == there
    assert here != alone, "the client's words have as many tokens: this test shows nothing"


def test_the_real_engine_reads_only_what_is_new(tmp_path: Path) -> None:
    """With the model's own template, which knows no tools: they are told in words."""
    script = tmp_path / "replay.jsonl"
    script.write_text("\n".join(map(json.dumps, THOUGHTLESS)))
    default_model.fetch()
    config = {
        "models": {"smollm2": {"n_threads": 1, "speculation": "off", "replay": str(script)}},
        "caches": {"main": {"model": "smollm2", "n_ctx": 2048, "parallel": 1}},
        "routes": [{"match": "*", "cache": "main"}],
    }
    with live_server(config) as served:
        talk = Talk(served, system="You are an agent.")
        first = talk.turn()
        talk.goes_on(*echoed(first))
        second = talk.turn()
    used = first["usage"]
    assert second["content"] == [{"type": "text", "text": "It is there."}]
    assert int(talk.told["reused"]) == used["input_tokens"] + used["output_tokens"]
    assert talk.told["cause"] == "none"


def test_a_tool_that_was_found_by_search_moves_nothing_at_the_head() -> None:
    """The client puts it into the middle of its list, and a reference to it into the result of the search."""
    found = TOOL | {"name": "early", "defer_loading": True}
    reference = [{"type": "tool_reference", "tool_name": "early"}]
    with live_server(demo_config(SCRIPT)) as served:
        talk = Talk(served)
        talk.goes_on(*echoed(talk.turn(tools=[TOOL | {"name": "any"}, TOOL])), result=reference)
        talk.turn(tools=[TOOL | {"name": "any"}, found, TOOL])
    assert talk.told["cause"] == "none"
