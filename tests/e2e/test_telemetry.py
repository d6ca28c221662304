"""Telemetry over HTTP: /metrics after known traffic, and the four files of captured requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests import cli_process
from tests.e2e.helpers import config, raw_request, single_slot_config, wait_for_queued, wait_for_running, wait_until
from tests.e2e.helpers import config as scripted
from tests.e2e.protocols import CHAT, MESSAGES, PROTOCOLS, Protocol, Usage, parse_events
from tests.live_server import LiveServer, demo_config, live_server
from tests.telemetry.prometheus_text import sample_values

METRIC_TYPES = {
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
    def __init__(self, server: LiveServer) -> None:
        reply = httpx.get(server.url + "/metrics")
        assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
        self.text = reply.content

    def __call__(self, sample: str, *labels: str) -> float:
        return sample_values(self.text, sample).get(labels, 0.0)


@pytest.fixture
def new_server() -> Iterator[LiveServer]:
    """A new server, so that all counters start at zero."""
    with live_server(scripted()) as server:
        yield server


def post(server: LiveServer, protocol: Protocol, text: str, *, stream: bool = False, **more: Any) -> Usage:
    reply = httpx.post(server.url + protocol.path, json=protocol.body(text, stream=stream, **more))
    assert reply.status_code == 200, reply.text
    return (protocol.parse_stream(parse_events(reply.text)) if stream else protocol.parse_reply(reply.json())).usage


def test_documented_metrics_exist_with_their_type(new_server: LiveServer):
    families = {family.name: family for family in text_string_to_metric_families(Scrape(new_server).text.decode())}
    assert {name: families[f"modelyard_{name}"].type for name in METRIC_TYPES} == METRIC_TYPES
    assert all(family.documentation for family in families.values())


def test_token_metrics_equal_the_reported_usage(new_server: LiveServer):
    usages = [
        post(new_server, protocol, text, stream=stream)
        for protocol in PROTOCOLS.values()
        for text in ("text", "thinking", "length")
        for stream in (False, True)
    ]
    scrape, count = Scrape(new_server), len(usages)
    prompt, cached, output = (sum(getattr(usage, name) for usage in usages) for name in ("prompt", "cached", "output"))
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


def test_several_choices_count_the_prompt_once(new_server: LiveServer):
    reply = httpx.post(new_server.url + "/v1/chat/completions", json=CHAT.body("text", n=3)).json()
    scrape = Scrape(new_server)
    assert len(reply["choices"]) == 3
    assert scrape("prompt_tokens_total", *DEMO) == reply["usage"]["prompt_tokens"]
    assert scrape("output_tokens_total", *DEMO) == reply["usage"]["completion_tokens"]
    assert scrape("request_prompt_tokens_count", *DEMO) == 1


def test_requests_are_counted_by_route_method_and_status(new_server: LiveServer):
    for protocol in PROTOCOLS.values():
        post(new_server, protocol, "text")
    httpx.post(new_server.url + "/v1/messages", content=b"{")
    httpx.get(new_server.url + "/v1/models/some/odd/name")
    httpx.get(new_server.url + "/no/such/path")
    httpx.get(new_server.url + "/v1/messages")
    scrape = Scrape(new_server)
    for protocol in PROTOCOLS.values():
        assert scrape("http_requests_total", protocol.path, "POST", "200") == 1
    assert scrape("http_requests_total", "/v1/messages", "POST", "400") == 1
    assert scrape("http_requests_total", "/v1/models/{id}", "GET", "200") == 1
    assert scrape("http_requests_total", "other", "GET", "404") == 1
    assert scrape("http_requests_total", "/v1/messages", "GET", "405") == 1
    assert scrape("http_request_duration_seconds_count", "/v1/messages") == 3


@pytest.mark.parametrize("path", ["/chat/completions", "/embeddings", "/rerank", "/responses"])
def test_a_path_without_v1_is_counted_as_the_same_route(new_server: LiveServer, path: str):
    httpx.post(new_server.url + path, content=b"{")
    assert Scrape(new_server)("http_requests_total", "/v1" + path, "POST", "400") == 1


def test_completions_without_v1_is_a_route_of_its_own(new_server: LiveServer) -> None:
    """Its body decides between llama-server's protocol and OpenAI's."""
    httpx.post(new_server.url + "/completions", content=b"{")
    scrape = Scrape(new_server)
    assert scrape("http_requests_total", "/completions", "POST", "400") == 1
    assert scrape("http_requests_total", "/v1/completions", "POST", "400") == 0


def test_every_failed_request_is_counted_once_by_its_code(new_server: LiveServer):
    for protocol in PROTOCOLS.values():
        for stream in (False, True):
            for text in ("error before", "error during"):
                httpx.post(new_server.url + protocol.path, json=protocol.body(text, stream=stream))
        httpx.post(new_server.url + protocol.path, content=b"{")
        httpx.post(new_server.url + protocol.path, json=protocol.body("x " * 5000))
    httpx.post(new_server.url + "/v1/chat/completions", json=CHAT.body("error before", n=3))
    httpx.post(new_server.url + "/tokenize", json={})
    httpx.get(new_server.url + "/no/such/path")
    httpx.get(new_server.url + "/v1/responses/resp_none")
    httpx.get(new_server.url + "/health", headers={"host": "evil.example"})
    errors = sample_values(Scrape(new_server).text, "errors_total")
    assert errors.pop(("internal_error",)) == 13
    assert errors.pop(("context_length_exceeded",)) == 3
    assert errors.pop(("path_not_found",)) == 1
    assert errors.pop(("response_not_found",)) == 1
    assert errors.pop(("host_not_allowed",)) == 1
    assert sum(errors.values()) == 4, errors


def test_a_disconnect_is_counted_as_cancelled(new_server: LiveServer):
    with raw_request(new_server, "/v1/messages", MESSAGES.body("endless stream", stream=True)) as caller:
        caller.read_until(b"so far")
    wait_until(lambda: Scrape(new_server)("errors_total", "cancelled") == 1, "the error is counted")


def test_time_to_first_token_and_inter_token_time_are_measured():
    with live_server(demo_config([{"steps": [{"prefill": 0.2}, {"tokens": 20}]}], token_delay=0.002)) as server:
        usages = [post(server, CHAT, "go", stream=stream) for stream in (False, True)]
        scrape = Scrape(server)
    assert scrape("time_to_first_token_seconds_count", *DEMO) == 2
    assert scrape("time_to_first_token_seconds_sum", *DEMO) >= 0.4, "prefill is part of it"
    assert scrape("time_to_first_token_seconds_bucket", "0.1", *DEMO) == 0
    between = scrape("inter_token_seconds_count", *DEMO)
    assert 0 < between <= sum(usage.output for usage in usages) - 2, "the first token of a reply has no predecessor"
    assert scrape("inter_token_seconds_sum", *DEMO) > 0


def test_queue_length_and_wait_time_are_measured():
    with live_server(single_slot_config()) as server:
        endless = CHAT.body("endless stream", stream=True)
        with raw_request(server, "/v1/chat/completions", endless) as first:
            first.read_until(b"so far")
            with raw_request(server, "/v1/chat/completions", CHAT.body("text", stream=True)) as second:
                wait_for_queued(server, 1)
                queued = Scrape(server)
                first.close()
                second.read_until(b"[DONE]")
        wait_for_running(server, 0)
        finished = Scrape(server)
    assert queued("queue_waiting", *DEMO) == 1
    assert queued("active_requests_current") == 2
    assert queued("queue_wait_seconds_count", *DEMO) == 1
    assert queued("queue_wait_seconds_sum", *DEMO) == 0, "the first did not wait"
    assert finished("queue_waiting", *DEMO) == 0
    assert finished("queue_wait_seconds_count", *DEMO) == 2
    assert finished("queue_wait_seconds_sum", *DEMO) > 0


def test_no_request_is_active_after_the_last_reply(new_server: LiveServer):
    post(new_server, CHAT, "text")
    wait_until(lambda: Scrape(new_server)("active_requests_current") == 0, "no active requests")


def test_process_metrics_are_measured(new_server: LiveServer):
    scrape = Scrape(new_server)
    assert scrape("memory_usage_bytes") > 10_000_000
    assert scrape("cpu_usage_percent") >= 0
    assert scrape("process_start_time_seconds") > 1_700_000_000
    assert len(sample_values(scrape.text, "modelyard_build_info")) == 1


# --- captured requests ------------------------------------------------------------------------------------------------

FILE_NAMES = ("1-client-request.json", "2-prompt.txt", "3-model-output.txt")


class CaptureFolder:
    """The folder of captured requests and its server."""

    def __init__(self, capture: Path, server: LiveServer) -> None:
        self._folder, self.url = capture, server.url

    def post(self, path: str, content: bytes, **headers: str) -> tuple[httpx.Response, dict[str, bytes]]:
        """A reply and its four files, which are written after the reply."""
        reply = httpx.post(self.url + path, content=content, headers=headers, timeout=cli_process.DEADLINE)
        trace = reply.headers["request-id"].removeprefix("req_")
        wait_until(
            lambda: any(path.stat().st_size for path in self._folder.glob(f"*-{trace}.4-*")),
            "the fourth file is written",
        )
        return reply, self._files(trace)

    def _files(self, trace: str) -> dict[str, bytes]:
        return {path.name.partition(trace + ".")[2]: path.read_bytes() for path in self._folder.glob(f"*-{trace}.*")}


@pytest.fixture(scope="module")
def capture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaptureFolder]:
    debug_dir = tmp_path_factory.mktemp("journal") / "debug"
    with live_server(config(log={"debug_dir": str(debug_dir)}, http={"max_body_bytes": 4096, "port": 0})) as server:
        yield CaptureFolder(debug_dir, server)


def test_every_protocol_writes_four_files(capture: CaptureFolder, protocol: Protocol, stream: bool):
    body = json.dumps(protocol.body("thinking, please", stream=stream)).encode()
    reply, files = capture.post(protocol.path, body)
    response = "4-client-response.sse" if stream else "4-client-response.json"
    assert set(files) == {*FILE_NAMES, response}
    assert files["1-client-request.json"] == body
    assert b"thinking, please" in files["2-prompt.txt"]
    assert files["3-model-output.txt"].decode() == "<think>\nLet me see.\n</think>\n\nForty-two."
    assert files[response] == reply.content


def test_the_captured_prompt_is_the_rendered_template(capture: CaptureFolder):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "text"}]
    body = json.dumps({"model": "demo", "messages": messages}).encode()
    _, files = capture.post("/v1/chat/completions", body)
    rendered = httpx.post(capture.url + "/apply-template", content=body).json()["prompt"]
    assert files["2-prompt.txt"].decode() == rendered


REFUSED_BODIES: dict[str, tuple[bytes, int]] = {
    "not JSON": (b"{", 400),
    "no messages": (b'{"model": "demo"}', 400),
    "too large": (b" " * 5000, 413),
}


def test_a_refused_request_writes_four_files(capture: CaptureFolder, protocol: Protocol):
    for case, (body, status) in REFUSED_BODIES.items():
        reply, files = capture.post(protocol.path, body)
        assert reply.status_code == status, case
        assert set(files) == {*FILE_NAMES, "4-client-response.json"}, case
        assert files["1-client-request.json"] == (b"" if status == 413 else body), case
        assert (files["2-prompt.txt"], files["3-model-output.txt"]) == (b"", b"")
        assert files["4-client-response.json"] == reply.content


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/messages/count_tokens", b'{"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}', 200),
        ("/v1/responses/input_tokens", b'{"model": "demo", "input": "Hi"}', 200),
        ("/tokenize", b'{"content": "Hi"}', 200),
        ("/v1/embeddings", b'{"model": "demo", "input": 7}', 400),
        ("/v1/rerank", b"{", 400),
    ],
)
def test_counting_and_embedding_write_four_files(capture: CaptureFolder, path: str, body: bytes, status: int):
    reply, files = capture.post(path, body)
    assert reply.status_code == status
    assert set(files) == {*FILE_NAMES, "4-client-response.json"}
    assert files["1-client-request.json"] == body
    assert files["4-client-response.json"] == reply.content


def test_a_request_to_another_server_writes_what_was_sent_and_received(capture: CaptureFolder, tmp_path: Path):
    remote = {"backend": "openai_remote", "remote_base_url": capture.url + "/v1", "remote_model": "demo"}
    settings: dict[str, Any] = {"models": {"far": remote}, "log": {"debug_dir": str(tmp_path)}}
    with live_server(settings) as server:
        headers = {"x-modelyard-allow-remote": "true"}
        for stream in (False, True):
            body = {"model": "far", "messages": [{"role": "user", "content": "text"}], "stream": stream}
            reply = httpx.post(server.url + "/v1/chat/completions", json=body, headers=headers)
            assert reply.status_code == 200, reply.text
    sent = [json.loads(path.read_bytes()) for path in sorted(tmp_path.glob("*.2-prompt.txt"))]
    received = [path.read_text() for path in sorted(tmp_path.glob("*.3-model-output.txt"))]
    assert [body["messages"][-1]["content"] for body in sent] == ["text", "text"]
    assert len(received) == 2
    assert all("chat.completion" in text for text in received)


@pytest.mark.parametrize("text", ["error before", "error during"])
def test_a_failed_request_writes_the_output_so_far(capture: CaptureFolder, protocol: Protocol, stream: bool, text: str):
    reply, files = capture.post(protocol.path, json.dumps(protocol.body(text, stream=stream)).encode())
    (response,) = set(files) - set(FILE_NAMES)
    assert len(files) == 4
    assert text.encode() in files["2-prompt.txt"]
    assert files["3-model-output.txt"] == (b"Half an" if text == "error during" else b"")
    assert files[response] == reply.content
    assert b"out of memory" in reply.content


def test_keys_are_never_written(tmp_path: Path):
    settings: dict[str, Any] = {"log": {"debug_dir": str(tmp_path)}}
    env = {"MODELYARD_API_KEY": "sk-very-secret"}
    with live_server(demo_config() | settings, env) as server:
        body = json.dumps(MESSAGES.body("hi")).encode()
        _, files = CaptureFolder(tmp_path, server).post("/v1/messages", body, **{"x-api-key": "sk-very-secret"})
    assert len(files) == 4
    assert not [name for name, data in files.items() if b"sk-very-secret" in data]


def test_only_the_last_requests_are_kept(tmp_path: Path):
    settings: dict[str, Any] = {"log": {"debug_dir": str(tmp_path), "debug_max_requests": 2}}
    with live_server(demo_config() | settings) as server:
        capture = CaptureFolder(tmp_path, server)
        bodies = [json.dumps(CHAT.body(f"number {n}")).encode() for n in range(5)]
        for body in bodies:
            capture.post("/v1/chat/completions", body)
        wait_until(lambda: len(list(tmp_path.iterdir())) == 8, "older files are deleted")
        kept = {path.read_bytes() for path in tmp_path.glob("*.1-client-request.json")}
    assert kept == set(bodies[-2:])


def test_the_debug_option_writes_into_the_current_folder(tmp_path: Path):
    with cli_process.serve(tmp_path, "--debug", *cli_process.DEMO) as server:
        reply = httpx.post(server.url + "/v1/messages", json=MESSAGES.body("hi"), timeout=cli_process.DEADLINE)
        assert server.stop() == 0
    files = list((tmp_path / "debug").iterdir())
    assert reply.status_code == 200
    assert len(files) == 4, "all are on disk when the server has ended"
    assert {path.stat().st_mode & 0o077 for path in files} == {0}, "prompts are private"
