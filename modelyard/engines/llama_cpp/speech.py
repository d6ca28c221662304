"""What a job says after a row of logits: the token, its odds where they are asked for, and whether it was the last."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from msgspec import Struct

from modelyard.core.engine import End, IdLogprob
from modelyard.core.errors import ModelyardError
from modelyard.core.events import Timings, Usage
from modelyard.engines.llama_cpp.job import Job
from modelyard.engines.llama_cpp.sample import logits_of, logprob_of

Ending = tuple[str, ModelyardError | None]  # as an End has it


class Said(Struct):
    """What a job says in one step."""

    ids: list[int]
    logprobs: list[IdLogprob] | None


def nothing(job: Job) -> Said:
    """As yet."""
    return Said([], [] if job.prompt.logprobs is not None else None)


def draw(context: Any, n_vocab: int, job: Job, row: int, said: Said) -> Ending | None:
    """The next token, or why there is none; and whether it was the last."""
    wanted = job.prompt.logprobs
    raw = logits_of(context, row, n_vocab).copy() if wanted is not None else None
    try:
        token = _pick(context, n_vocab, job, row)
    except ModelyardError as error:
        return "error", error
    ending = take(job, token, said)
    if raw is not None and said.logprobs is not None and len(said.logprobs) < len(said.ids):
        said.logprobs.append(logprob_of(raw, token, wanted or 0))
    return ending


def _pick(context: Any, n_vocab: int, job: Job, row: int) -> int:
    if job.scripted is not None:
        return next(job.scripted, next(iter(job.stops), -1))
    if job.mask is None:
        return job.chain.pick(context, row)
    logits = logits_of(context, row, n_vocab)
    return job.mask.pick(logits, partial(job.chain.pick, context, row, logits))


def take(job: Job, token: int, said: Said) -> Ending | None:
    """The job says this token, unless it is one that ends it."""
    if token in job.stops or token < 0:
        return "stop", None
    job.append(token)
    said.ids.append(token)
    if job.mask is not None and job.mask.is_complete:
        return "stop", None
    if job.output >= job.prompt.max_tokens:
        return "length", None
    return ("window", None) if job.length >= job.limit else None


def end(job: Job, reason: Any, error: ModelyardError | None) -> End:
    return End(reason, Usage(job.prompt_tokens, job.cached, job.output), _timings(job), error)


def _timings(job: Job) -> Timings:
    now, first = time.perf_counter(), job.first_at
    return Timings(
        prefill=first - job.began if first else None,
        first_token=first - job.began if first else None,
        decode=now - first if first else None,
        backend=now - job.began,
        total=now - job.began,
    )
