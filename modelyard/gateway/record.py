"""An answer that is over, as the history keeps it."""

from __future__ import annotations

from modelyard.core.events import Failed, Finished, Timings, Usage
from modelyard.gateway.answer import ChoiceStream
from modelyard.telemetry.history import RequestRecord


def record(answer: ChoiceStream, last: Finished | Failed, now: float) -> RequestRecord:
    job, caller, where = answer.job, answer.job.caller, answer.where
    if failed := isinstance(last, Failed):
        status, usage, timings = last.error.code or last.error.kind, Usage(), Timings()
    else:
        status, usage, timings = last.reason, last.usage, last.timings
    return RequestRecord(
        trace=caller.trace,
        model=job.model.name,
        cache=job.target.cache,
        endpoint=caller.endpoint,
        key=caller.key,
        session=job.request.session,
        at=now,
        status=status,
        failed=failed,
        usage=usage,
        timings=timings,
        divergence=where.divergence if where is not None else None,
        evicted=where is not None and where.evicted,
        reuse=answer.reuse,
    )
