"""Spans of OpenTelemetry for requests, by the conventions for generative AI.

They are switched on by OpenTelemetry's own variables: `OTEL_EXPORTER_OTLP_ENDPOINT`, or the same for traces, names the
collector; `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER` and the others work as they are documented there. A request is one
span with children for the queue, the prefill, the decoding and each tool call. Prompts and answers are not in them.
"""

from __future__ import annotations

import os

from modelyard.telemetry.tracing import Observer

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def observer() -> Observer | None:
    """The entry point; None unless a collector is named. Only then are OpenTelemetry's packages needed."""
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return None
    from modelyard_otel.spans import create_observer

    return create_observer()
