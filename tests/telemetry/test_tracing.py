"""`traceparent` in and out, and the spans of OpenTelemetry, with a collector in memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from modelyard.telemetry.history import RequestRecord, ToolRun
from modelyard.telemetry.tracing import EndedRequest, find_observers, read_traceparent
from modelyard_otel.spans import RequestIds, SpanObserver
from tests.live_server import demo_config, live_server

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
REMOTE = {"x-modelyard-allow-remote": "true"}
UPSTREAM_REPLY = (
    b'{"id":"1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"finish_reason":"stop",'
    b'"message":{"role":"assistant","content":"hi"}}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'
)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, ids = InMemorySpanExporter(), RequestIds()
    provider = TracerProvider(id_generator=ids)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    made = SpanObserver(provider, ids)
    monkeypatch.setattr("modelyard.http.server.find_observers", lambda: [made])
    return exporter


def ask(url: str, model: str = "m", **headers: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers | REMOTE, timeout=20)


def wait_for_root(exporter: InMemorySpanExporter) -> None:
    """The reply is sent before the request is accounted for."""
    while not any(span.kind is SpanKind.SERVER for span in exporter.get_finished_spans()):
        threading.Event().wait(0.005)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_is_a_span_with_its_parent_its_parts_and_the_conventions_for_models(spans: InMemorySpanExporter):
    with live_server(demo_config()) as server:
        reply = ask(server.url, traceparent=PARENT)
        assert reply.status_code == 200
        wait_for_root(spans)
    found = by_name(spans)
    (name,) = [name for name in found if name.startswith("chat ")]
    root, attributes = found[name], dict(found[name].attributes or {})
    assert root.context is not None
    assert root.parent is not None
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, SPAN)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.usage.output_tokens"] == reply.json()["usage"]["completion_tokens"]
    assert attributes["gen_ai.response.finish_reasons"] == ("end",)
    assert attributes["http.response.status_code"] == 200
    for part in ("queue", "prefill", "decode"):
        child = found[part]
        assert child.parent is not None
        assert child.parent.span_id == root.context.span_id
        assert root.start_time is not None
        assert child.start_time is not None
        assert child.start_time >= root.start_time


def test_without_a_parent_the_trace_begins_with_the_id_of_the_request(spans: InMemorySpanExporter):
    with live_server(demo_config()) as server:
        request = ask(server.url).headers["x-request-id"].removeprefix("req_")
        wait_for_root(spans)
    (root,) = [span for span in spans.get_finished_spans() if span.parent is None and span.name.startswith("chat ")]
    assert root.context is not None
    assert f"{root.context.trace_id:032x}".startswith(request)
    assert f"{root.context.span_id:016x}" == request[:16]


def test_a_refused_request_has_its_code_and_no_model(spans: InMemorySpanExporter):
    with live_server(demo_config()) as server:
        assert httpx.post(f"{server.url}/v1/chat/completions", json={"messages": 3}).status_code == 400
        wait_for_root(spans)
    attributes = dict(by_name(spans)["POST /v1/chat/completions"].attributes or {})
    assert attributes["error.type"]
    assert "gen_ai.request.model" not in attributes


def test_each_tool_call_is_a_span_at_its_own_time():
    exporter, ids = InMemorySpanExporter(), RequestIds()
    provider = TracerProvider(id_generator=ids)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    calls = (ToolRun("math", "add", "ok", 2.0, at=105.0), ToolRun("math", "div", "error", 1.0, at=107.0))
    record = RequestRecord(trace="ab" * 12, model="m", cache="m", at=109.0, status="end", calls=calls)
    about: dict[str, Any] = {
        "trace": "ab" * 12,
        "traceparent": "",
        "method": "POST",
        "path": "/v1/responses",
        "status": 200,
        "error": "",
    }
    SpanObserver(provider, ids).ended(EndedRequest(**about, seconds=10.0, ended=110.0, records=[record]))
    found = by_name(exporter)
    assert (found["execute_tool add"].start_time, found["execute_tool add"].end_time) == (103 * 10**9, 105 * 10**9)
    assert dict(found["execute_tool div"].attributes or {})["error.type"] == "error"


@pytest.fixture
def upstream() -> Iterator[tuple[str, list[str | None]]]:
    seen: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            seen.append(self.headers.get("traceparent"))
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(UPSTREAM_REPLY)))
            self.end_headers()
            self.wfile.write(UPSTREAM_REPLY)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", seen
    server.shutdown()
    server.server_close()
    thread.join()


def remote(url: str) -> dict[str, Any]:
    return {"models": {"far": {"backend": "openai_remote", "remote_base_url": url, "remote_model": "m"}}}


def test_an_upstream_gets_the_span_of_the_request_as_its_parent(
    spans: InMemorySpanExporter, upstream: tuple[str, list[str | None]]
):
    url, seen = upstream
    with live_server(remote(url)) as server:
        reply = ask(server.url, "far", traceparent=PARENT)
        assert reply.status_code == 200, reply.text
    assert seen == [f"00-{TRACE}-{reply.headers['x-request-id'].removeprefix('req_')[:16]}-01"]


def test_without_an_observer_the_callers_own_is_passed_on_and_a_malformed_one_is_not(
    upstream: tuple[str, list[str | None]],
):
    url, seen = upstream
    with live_server(remote(url)) as server:
        assert ask(server.url, "far", traceparent=PARENT).status_code == 200
        assert ask(server.url, "far", traceparent="00-zz").status_code == 200
    assert seen == [PARENT, None]


@pytest.mark.parametrize("header", ["", "00-" + "0" * 32 + f"-{SPAN}-01", f"00-{TRACE}-{SPAN}-01\r\nx: y", "ff"])
def test_only_a_valid_traceparent_is_read(header: str):
    assert read_traceparent(header) == ""


def test_nothing_observes_unless_a_collector_is_named(monkeypatch: pytest.MonkeyPatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert find_observers() == []
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert len(find_observers()) == 1


def test_without_its_packages_nothing_is_said_until_a_collector_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delitem(sys.modules, "modelyard_otel.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert (find_observers(), caplog.messages) == ([], [])
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    assert find_observers() == []
    assert "pip install 'modelyard[otel]'" in caplog.text
