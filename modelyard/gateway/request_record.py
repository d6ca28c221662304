"""Timings and history record of a finished request. Pure."""

from __future__ import annotations

from modelyard.core.engine import Accepted
from modelyard.core.events import Failed, Finished, Timings, Usage
from modelyard.core.request import Caller
from modelyard.gateway.prepared_request import PreparedRequest
from modelyard.router.router import Target
from modelyard.telemetry.cache_diagnostics import CacheReuse
from modelyard.telemetry.history import RequestRecord


def gateway_timings(
    engine: Timings,
    *,
    now: float,
    started: float,
    tokenize_s: float,
    queue_s: float = 0.0,
    arrived: float | None = None,
    engine_started: float | None = None,
    first_output: float | None = None,
    remote: bool,
) -> Timings:
    """The engine's own figures, completed with what the gateway measured. All times are of one clock.

    A remote engine's first token includes the network, so it does not count as the model's.
    """
    first_token, decode = engine.first_token, engine.decode
    if engine_started is not None and first_output is not None and not remote:
        first_token = first_output - engine_started if first_token is None else first_token
        decode = now - first_output if decode is None else decode
    in_gateway = now - started + tokenize_s
    return Timings(
        queue=queue_s,
        tokenize=tokenize_s,
        prefill=engine.prefill,
        first_token=first_token,
        decode=decode,
        backend=None if engine_started is None else now - engine_started,
        engine=in_gateway,
        total=in_gateway if arrived is None else now - arrived,
    )


def request_record(
    prepared: PreparedRequest,
    accepted: Accepted | None,
    reuse: CacheReuse | None,
    last: Finished | Failed,
    now: float,
) -> RequestRecord:
    caller = prepared.caller
    if failed := isinstance(last, Failed):
        status, usage, timings = last.error.code or last.error.kind, Usage(), Timings()
    else:
        status, usage, timings = last.reason, last.usage, last.timings
    return RequestRecord(
        trace=caller.trace,
        model=prepared.model.name,
        cache=prepared.target.cache,
        endpoint=caller.endpoint,
        key=caller.key,
        session=prepared.request.session,
        at=now,
        status=status,
        failed=failed,
        usage=usage,
        timings=timings,
        divergence=accepted.divergence if accepted is not None else None,
        evicted=accepted is not None and accepted.evicted,
        reuse=reuse,
    )


def input_record(
    target: Target, caller: Caller, status: str, failed: bool, usage: Usage, timings: Timings, now: float
) -> RequestRecord:
    """Of a request that generates nothing: embeddings, a ranking."""
    return RequestRecord(
        trace=caller.trace,
        model=target.model,
        cache=target.cache,
        endpoint=caller.endpoint,
        key=caller.key,
        at=now,
        status=status,
        failed=failed,
        usage=usage,
        timings=timings,
    )
