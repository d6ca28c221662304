"""The spans of a request: itself, its queue, prefill and decoding, and each tool call."""

from __future__ import annotations

import os
from collections.abc import Iterator

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from modelyard import __version__
from modelyard.telemetry.history import RequestRecord
from modelyard.telemetry.tracing import EndedRequest

_OPERATIONS = {"/v1/embeddings": "embeddings", "/api/embed": "embeddings", "/v1/completions": "text_completion"}
_SPAN_DIGITS, _TRACE_DIGITS = 16, 32


class RequestIds(RandomIdGenerator):
    """The ids of a request's span are known before it is made, because upstreams are sent them: they are the request's
    own id, shortened and lengthened."""

    def __init__(self) -> None:
        self.request = ""

    def generate_span_id(self) -> int:
        request, self.request = self.request, ""
        return int(request[:_SPAN_DIGITS], 16) if request else super().generate_span_id()

    def generate_trace_id(self) -> int:
        return int(trace_id(self.request), 16) if self.request else super().generate_trace_id()


def trace_id(request: str) -> str:
    return request.ljust(_TRACE_DIGITS, "0")


class SpanObserver:
    """An `Observer` (modelyard/telemetry/tracing.py). Spans are made when a request has ended, with the times that were
    measured, so that nothing is added to its path; a thread of the SDK sends them."""

    def __init__(self, provider: TracerProvider, ids: RequestIds) -> None:
        self._tracer, self._ids = provider.get_tracer("modelyard", __version__), ids

    def traceparent(self, trace: str, parent: str) -> str:
        version, found, _, flags = parent.split("-") if parent else ("00", trace_id(trace), "", "01")
        return f"{version}-{found}-{trace[:_SPAN_DIGITS]}-{flags}"

    def ended(self, request: EndedRequest) -> None:
        record = request.records[0] if request.records else None
        began, end = request.ended - request.seconds, request.ended
        operation = _OPERATIONS.get(request.path, "chat")
        name = f"{operation} {record.model}" if record is not None else f"{request.method} {request.path}"
        parent = TraceContextTextMapPropagator().extract({"traceparent": request.traceparent}, Context())
        self._ids.request = request.trace
        root = self._tracer.start_span(
            name, parent, SpanKind.SERVER, dict(_attributes(request, record, operation)), start_time=_ns(began)
        )
        self._ids.request = ""  # a span that is not sampled has taken none
        within = set_span_in_context(root, Context())
        for child, start, seconds, attributes in _children(request, began):
            span = self._tracer.start_span(child, within, SpanKind.INTERNAL, attributes, start_time=_ns(start))
            span.end(_ns(start + seconds))
        if request.status >= 500:
            root.set_status(Status(StatusCode.ERROR, request.error))
        root.end(_ns(end))


def _attributes(
    request: EndedRequest, record: RequestRecord | None, operation: str
) -> Iterator[tuple[str, str | int | float | list[str]]]:
    yield "http.request.method", request.method
    yield "url.path", request.path
    yield "http.response.status_code", request.status
    yield "modelyard.request_id", request.trace
    if request.error:
        yield "error.type", request.error
    if record is None:
        return
    yield "gen_ai.operation.name", operation
    yield "gen_ai.provider.name", "modelyard"
    yield "gen_ai.request.model", record.model
    yield "gen_ai.response.model", record.model
    yield "gen_ai.usage.input_tokens", record.usage.prompt
    yield "gen_ai.usage.output_tokens", sum(each.usage.output for each in request.records)
    yield "gen_ai.usage.cache_read.input_tokens", record.usage.cached
    yield "gen_ai.response.finish_reasons", [each.status for each in request.records]
    if record.session:
        yield "gen_ai.conversation.id", record.session
    if record.timings.first_token is not None:
        yield "gen_ai.response.time_to_first_chunk", record.timings.first_token


def _children(request: EndedRequest, began: float) -> Iterator[tuple[str, float, float, Attributes]]:
    """Name, start, seconds and attributes. Queue and prefill are placed one behind the other; decoding ends the record,
    and a tool call has its own time."""
    for record in request.records:
        timings, start = record.timings, began + (record.timings.tokenize or 0.0)
        if timings.queue is not None:
            yield "queue", start, timings.queue, {}
            start += timings.queue
        prefill = timings.prefill if timings.prefill is not None else timings.first_token
        if prefill is not None:
            evaluated = record.usage.prompt - record.usage.cached
            yield "prefill", start, prefill, {"modelyard.evaluated_tokens": evaluated}
        if timings.decode is not None:
            yield "decode", record.at - timings.decode, timings.decode, {"modelyard.output_tokens": record.usage.output}
        for call in record.calls:
            about = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": call.tool}
            about |= {"error.type": call.status} if call.status != "ok" else {}
            yield f"execute_tool {call.tool}", call.at - call.seconds, call.seconds, about


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def create_observer() -> SpanObserver:
    ids = RequestIds()
    resource = Resource.create({} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "modelyard"})
    provider = TracerProvider(resource=resource, id_generator=ids)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return SpanObserver(provider, ids)
