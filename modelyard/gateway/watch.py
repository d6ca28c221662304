"""Watches what each cache was asked: a changed system prompt that the cache did not hold is a sentence for the log."""

from __future__ import annotations

from modelyard.core.engine import Accepted
from modelyard.gateway.job import Job, Run
from modelyard.telemetry.fingerprint import Change, Fingerprints, leading_system, message_at
from modelyard.vocab.shield import unshield


class Watch:
    def __init__(self) -> None:
        self._seen = Fingerprints()

    def look(self, job: Job, where: Accepted) -> str | None:
        """None where the prompt stayed, or where another sequence of the cache had the changed one already."""
        system = leading_system(job.request.messages)
        if system is None:
            return None
        change, run = self._seen.look(job.target.cache, system), job.run(0)
        if change is None or run is None or where.divergence is None:
            return None
        return _told(change, job, run, where.divergence)


def _told(change: Change, job: Job, run: Run, token: int) -> str | None:
    messages = job.request.messages
    position = len(job.model.parts.vocab.decode(run.ids[:token]))
    at = message_at(unshield(run.text), position, messages)
    if at > 0:
        return None
    return (
        f"the system prompt in cache {job.target.cache!r} changed from {change.before} to {change.after}: "
        f"token {token} of {len(run.ids)}, in message {at} ({messages[at].role}), is the first that was not cached; "
        f"it stands at character {position} of the rendered prompt"
    )
