"""Every metric that exists, as one table: its name, its labels, and how the values of several processes become one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

Fold = Literal["sum", "max", "min"]


class Family(Struct, frozen=True):
    """A histogram has `buckets`; only a gauge may fold otherwise than by adding."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    fold: Fold = "sum"


_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_TOKENS = (1.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0, 262144.0)


def _counter(name: str, help: str, *labels: str) -> Family:
    return Family(name, "counter", help, labels)


def _histogram(name: str, help: str, label: str, buckets: tuple[float, ...]) -> Family:
    return Family(name, "histogram", help, (label,), buckets)


def _gauge(name: str, help: str, *labels: str, fold: Fold = "sum") -> Family:
    return Family(name, "gauge", help, labels, fold=fold)


_ALL = (
    _counter("http_requests_total", "HTTP requests answered", "endpoint", "method", "status"),
    _histogram("http_request_duration_seconds", "HTTP request to the last byte of its answer", "endpoint", _SECONDS),
    _gauge("active_requests_current", "Inference requests in progress"),
    _histogram("time_to_first_token_seconds", "Request accepted to first token", "model", _SECONDS),
    _histogram("inter_token_seconds", "Time between two tokens of one answer", "model", _TOKEN_SECONDS),
    _histogram("queue_wait_seconds", "Time in the queue before a place in an engine was free", "model", _SECONDS),
    _gauge("queue_waiting", "Requests in the queue", "model"),
    _gauge("queue_waiting_tokens", "Prompt tokens of the requests in the queue", "model"),
    _gauge("model_running", "Answers that run", "model"),
    _gauge("model_replicas", "Replicas that take requests", "model"),
    _counter("model_loads_total", "Replicas that were loaded", "model"),
    _counter("model_failures_total", "Loads that failed and engines that were lost", "model"),
    _counter("model_evictions_total", "Replicas that made room for another model", "model"),
    _counter("prompt_tokens_total", "Prompt tokens, the cached ones included", "model"),
    _counter("cached_tokens_total", "Prompt tokens that were found in a KV cache", "model"),
    _counter("output_tokens_total", "Output tokens, the reasoning ones included", "model"),
    _counter("reasoning_tokens_total", "Output tokens spent on reasoning", "model"),
    _histogram("request_prompt_tokens", "Prompt tokens of a request", "model", _TOKENS),
    _histogram("request_cached_tokens", "Cached prompt tokens of a request", "model", _TOKENS),
    _histogram("request_output_tokens", "Output tokens of one answer", "model", _TOKENS),
    _counter("finish_reasons_total", "Answers by what ended them", "reason"),
    _counter("errors_total", "Failed requests by error code", "code"),
    _counter("cache_requests_total", "Prompts by why their cache had no more of them", "cache", "cause"),
    _counter("evaluated_tokens_total", "Prompt tokens that had to be read, by why", "cache", "cause"),
    _counter("system_prompt_changes_total", "Requests whose changed system prompt was not in their cache", "cache"),
    _counter("joined_requests_total", "Requests answered by a job that ran already for the same request", "model"),
    _counter("request_warnings_total", "Requests served with something in them left out", "kind"),
    _gauge("cpu_usage_percent", "CPU use of this program and its children; 100 is one core"),
    _gauge("memory_usage_bytes", "Resident memory of this program and its children"),
    # Every gateway process sees the same GPUs: adding would count them once a process.
    _gauge("gpu_usage_percent", "Use of the GPU by anybody", "gpu", fold="max"),
    _gauge("gpu_memory_used_bytes", "Memory of the GPU used by anybody", "gpu", fold="max"),
    _gauge("process_start_time_seconds", "Start of the oldest process, since 1970", fold="min"),
    _gauge("modelyard_build_info", "The running version, as a label", "version", fold="max"),
)

FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}

# Not in the table: a ratio cannot be folded, so it is worked out from the folded counters.
CACHE_HIT_RATIO = _gauge("cache_hit_ratio", "Cached share of all prompt tokens so far", "model")
