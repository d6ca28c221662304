"""The `metrics` object of a reply to POST /v1/responses. Every field is always present, null where not measured.

    pool_total_wall_ms                     since the request arrived
    └── engine_total_wall_ms               rendering, queue and backend
        ├── engine_tokenize_ms             rendering the prompt and tokenizing it
        ├── engine_queue_wait_ms           waiting for a slot
        └── backend_inference_wall_ms      inside the engine
            └── gpu_generate_total_ms      time to the first token plus decoding

Sums and differences use the rounded milliseconds, so that the fields of one object agree with each other.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from modelyard.core.events import Finished, Timings

Number = float | None


class ResponseMetrics(Struct):
    backend_inference_wall_ms: Number = None
    engine_total_wall_ms: Number = None
    engine_outside_backend_wall_ms: Number = None
    pool_total_wall_ms: Number = None
    engine_queue_wait_ms: Number = None
    engine_tokenize_ms: Number = None
    gpu_time_to_first_token_ms: Number = None
    gpu_generate_total_ms: Number = None
    gpu_decode_after_first_token_ms: Number = None
    engine_prompt_tokens: int | None = None
    engine_output_tokens: int | None = None
    engine_tokens_per_second: Number = None


def write_metrics(finished: Finished) -> ResponseMetrics:
    times, usage = finished.timings, finished.usage
    backend, engine = _ms(times.backend), _ms(times.engine)
    first, decode = _ms(times.first_token), _ms(times.decode)
    generated = None if first is None or decode is None else round(first + decode, 3)
    decode_ms = backend if generated is None else generated
    return ResponseMetrics(
        backend_inference_wall_ms=backend,
        engine_total_wall_ms=engine,
        engine_outside_backend_wall_ms=None if engine is None or backend is None else round(engine - backend, 3),
        pool_total_wall_ms=_ms(times.total),
        engine_queue_wait_ms=_ms(times.queue),
        engine_tokenize_ms=_ms(times.tokenize),
        gpu_time_to_first_token_ms=first,
        gpu_generate_total_ms=generated,
        gpu_decode_after_first_token_ms=decode,
        engine_prompt_tokens=usage.prompt,
        engine_output_tokens=usage.output,
        engine_tokens_per_second=round(usage.output / decode_ms * 1e3, 3) if decode_ms else None,
    )


def read_metrics(value: object) -> Timings:
    """An upstream's `metrics` field. A missing one, or one with another shape, gives empty timings."""
    try:
        metrics = msgspec.convert(value or {}, ResponseMetrics)
    except msgspec.ValidationError:
        return Timings()
    return Timings(
        queue=_seconds(metrics.engine_queue_wait_ms),
        tokenize=_seconds(metrics.engine_tokenize_ms),
        first_token=_seconds(metrics.gpu_time_to_first_token_ms),
        decode=_seconds(metrics.gpu_decode_after_first_token_ms),
        backend=_seconds(metrics.backend_inference_wall_ms),
        engine=_seconds(metrics.engine_total_wall_ms),
        total=_seconds(metrics.pool_total_wall_ms),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3
