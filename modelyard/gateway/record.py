"""An answer that is over, as the history keeps it."""

from __future__ import annotations

from modelyard.core.events import Failed, Finished, Timings, Usage
from modelyard.gateway.answer import Course
from modelyard.gateway.job import Job
from modelyard.telemetry.history import Record


def record(job: Job, last: Finished | Failed, course: Course, now: float) -> Record:
    where = course.where
    usage, timings = (last.usage, last.timings) if isinstance(last, Finished) else (Usage(), Timings())
    return Record(
        trace=job.caller.trace,
        model=job.model.name,
        cache=job.target.cache,
        endpoint=job.caller.endpoint,
        key=job.caller.key,
        session=job.request.session,
        at=now,
        status=last.reason if isinstance(last, Finished) else last.error.code or last.error.kind,
        failed=isinstance(last, Failed),
        usage=usage,
        timings=timings,
        divergence=where.divergence if where is not None else None,
        evicted=where is not None and where.evicted,
        reuse=course.reuse,
    )
