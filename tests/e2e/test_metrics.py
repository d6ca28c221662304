"""/metrics after traffic that is known to the last token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.helpers import config as scripted
from tests.e2e.helpers import raw_request, single_slot_config, wait_for_queued, wait_for_running, wait_until
from tests.e2e.protocols import PROTOCOLS, Protocol, Usage, parse_events
from tests.live_server import LiveServer, demo_config, live_server
from tests.telemetry.prometheus_text import sample_values

PROMISED = {
    "http_requests": "counter",
    "http_request_duration_seconds": "histogram",
    "active_requests_current": "gauge",
    "cpu_usage_percent": "gauge",
    "memory_usage_bytes": "gauge",
    "gpu_usage_percent": "gauge",
    "gpu_memory_used_bytes": "gauge",
    "time_to_first_token_seconds": "histogram",
    "inter_token_seconds": "histogram",
    "queue_wait_seconds": "histogram",
    "queue_waiting": "gauge",
    "prompt_tokens": "counter",
    "cached_tokens": "counter",
    "output_tokens": "counter",
    "request_prompt_tokens": "histogram",
    "request_cached_tokens": "histogram",
    "request_output_tokens": "histogram",
    "errors": "counter",
    "cache_hit_ratio": "gauge",
}
DEMO = ("demo",)


class Scrape:
    def __init__(self, served: LiveServer) -> None:
        reply = httpx.get(served.url + "/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        self.text = reply.content

    def __call__(self, sample: str, *labels: str) -> float:
        return sample_values(self.text, sample).get(labels, 0.0)


@pytest.fixture
def fresh() -> Iterator[LiveServer]:
    """A server of its own, so that every number is this test's."""
    with live_server(scripted()) as served:
        yield served


def ask(served: LiveServer, wire: Protocol, said: str, *, stream: bool = False, **more: Any) -> Usage:
    reply = httpx.post(served.url + wire.path, json=wire.body(said, stream=stream, **more))
    assert reply.status_code == 200, reply.text
    return (wire.streamed(parse_events(reply.text)) if stream else wire.whole(reply.json())).usage


def test_every_promised_name_is_there_with_its_type(fresh: LiveServer):
    families = {family.name: family for family in text_string_to_metric_families(Scrape(fresh).text.decode())}
    assert {name: families[name].type for name in PROMISED} == PROMISED
    assert all(family.documentation for family in families.values())


def test_tokens_are_those_that_the_clients_were_told(fresh: LiveServer):
    told = [
        ask(fresh, wire, said, stream=stream)
        for wire in PROTOCOLS.values()
        for said in ("text", "thinking", "length")
        for stream in (False, True)
    ]
    scrape, count = Scrape(fresh), len(told)
    prompt, cached, output = (sum(getattr(usage, name) for usage in told) for name in ("prompt", "cached", "output"))
    assert cached > 0
    assert scrape("prompt_tokens_total", *DEMO) == prompt
    assert scrape("cached_tokens_total", *DEMO) == cached
    assert scrape("output_tokens_total", *DEMO) == output
    assert scrape("cache_hit_ratio", *DEMO) == pytest.approx(cached / prompt)
    for name, total in (("prompt", prompt), ("cached", cached), ("output", output)):
        assert scrape(f"request_{name}_tokens_count", *DEMO) == count
        assert scrape(f"request_{name}_tokens_sum", *DEMO) == total
    assert scrape("reasoning_tokens_total", *DEMO) > 0
    assert scrape("finish_reasons_total", "end") == count


def test_several_answers_to_one_prompt_count_it_once(fresh: LiveServer):
    reply = httpx.post(fresh.url + "/v1/chat/completions", json=PROTOCOLS["chat"].body("text", n=3)).json()
    scrape = Scrape(fresh)
    assert len(reply["choices"]) == 3
    assert scrape("prompt_tokens_total", *DEMO) == reply["usage"]["prompt_tokens"]
    assert scrape("output_tokens_total", *DEMO) == reply["usage"]["completion_tokens"]
    assert scrape("request_prompt_tokens_count", *DEMO) == 1


def test_requests_are_counted_by_route_method_and_status(fresh: LiveServer):
    for wire in PROTOCOLS.values():
        ask(fresh, wire, "text")
    httpx.post(fresh.url + "/v1/messages", content=b"{")
    httpx.get(fresh.url + "/v1/models/some/odd/name")
    httpx.get(fresh.url + "/no/such/path")
    httpx.get(fresh.url + "/v1/messages")
    scrape = Scrape(fresh)
    for wire in PROTOCOLS.values():
        assert scrape("http_requests_total", wire.path, "POST", "200") == 1
    assert scrape("http_requests_total", "/v1/messages", "POST", "400") == 1
    assert scrape("http_requests_total", "/v1/models/{id}", "GET", "200") == 1
    assert scrape("http_requests_total", "other", "GET", "404") == 1
    assert scrape("http_requests_total", "/v1/messages", "GET", "405") == 1
    assert scrape("http_request_duration_seconds_count", "/v1/messages") == 3


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/embeddings", "/responses"])
def test_a_path_without_its_prefix_is_the_same_route(fresh: LiveServer, path: str):
    httpx.post(fresh.url + path, content=b"{")
    assert Scrape(fresh)("http_requests_total", "/v1" + path, "POST", "400") == 1


def test_every_failed_request_is_counted_once_under_its_code(fresh: LiveServer):
    for wire in PROTOCOLS.values():
        for stream in (False, True):
            for said in ("error before", "error during"):
                httpx.post(fresh.url + wire.path, json=wire.body(said, stream=stream))
        httpx.post(fresh.url + wire.path, content=b"{")
        httpx.post(fresh.url + wire.path, json=wire.body("x " * 5000))
    httpx.post(fresh.url + "/v1/chat/completions", json=PROTOCOLS["chat"].body("error before", n=3))
    httpx.post(fresh.url + "/tokenize", json={})
    httpx.get(fresh.url + "/no/such/path")
    httpx.get(fresh.url + "/v1/responses/resp_none")
    httpx.get(fresh.url + "/health", headers={"host": "evil.example"})
    errors = sample_values(Scrape(fresh).text, "errors_total")
    assert errors.pop(("internal_error",)) == 13
    assert errors.pop(("context_length_exceeded",)) == 3
    assert errors.pop(("path_not_found",)) == 1
    assert errors.pop(("response_not_found",)) == 1
    assert errors.pop(("host_not_allowed",)) == 1
    assert sum(errors.values()) == 4, errors


def test_a_client_that_leaves_is_counted_as_cancelled(fresh: LiveServer):
    with raw_request(fresh, "/v1/messages", PROTOCOLS["messages"].body("endless stream", stream=True)) as caller:
        caller.reads(b"so far")
    wait_until(lambda: Scrape(fresh)("errors_total", "cancelled") == 1, "it is counted")


def test_the_first_token_and_the_time_between_tokens_are_measured():
    with live_server(demo_config([{"steps": [{"prefill": 0.2}, {"tokens": 20}]}], token_delay=0.002)) as served:
        told = [ask(served, PROTOCOLS["chat"], "go", stream=stream) for stream in (False, True)]
        scrape = Scrape(served)
    assert scrape("time_to_first_token_seconds_count", *DEMO) == 2
    assert scrape("time_to_first_token_seconds_sum", *DEMO) >= 0.4, "prefill is part of it"
    assert scrape("time_to_first_token_seconds_bucket", "0.1", *DEMO) == 0
    between = scrape("inter_token_seconds_count", *DEMO)
    assert 0 < between <= sum(usage.output for usage in told) - 2, "the first token of an answer follows none"
    assert scrape("inter_token_seconds_sum", *DEMO) > 0


def test_the_queue_is_seen_while_it_stands_and_measured_when_it_moves():
    with live_server(single_slot_config()) as served:
        endless = PROTOCOLS["chat"].body("endless stream", stream=True)
        with raw_request(served, "/v1/chat/completions", endless) as first:
            first.reads(b"so far")
            with raw_request(served, "/v1/chat/completions", PROTOCOLS["chat"].body("text", stream=True)) as second:
                wait_for_queued(served, 1)
                standing = Scrape(served)
                first.leaves()
                second.reads(b"[DONE]")
        wait_for_running(served, 0)
        moved = Scrape(served)
    assert standing("queue_waiting", *DEMO) == 1
    assert standing("active_requests_current") == 2
    assert standing("queue_wait_seconds_count", *DEMO) == 1
    assert standing("queue_wait_seconds_sum", *DEMO) == 0, "the first did not wait"
    assert moved("queue_waiting", *DEMO) == 0
    assert moved("queue_wait_seconds_count", *DEMO) == 2
    assert moved("queue_wait_seconds_sum", *DEMO) > 0


def test_nothing_is_active_when_nobody_asks(fresh: LiveServer):
    ask(fresh, PROTOCOLS["chat"], "text")
    wait_until(lambda: Scrape(fresh)("active_requests_current") == 0, "all is over")


def test_the_machine_is_looked_at(fresh: LiveServer):
    scrape = Scrape(fresh)
    assert scrape("memory_usage_bytes") > 10_000_000
    assert scrape("cpu_usage_percent") >= 0
    assert scrape("process_start_time_seconds") > 1_700_000_000
    assert len(sample_values(scrape.text, "modelyard_build_info")) == 1
