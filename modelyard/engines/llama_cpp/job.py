"""One job in the engine's hands: its tokens, how far they are read, and its way out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct

from modelyard.core.engine import Chunk, End, IdLogprob, Prompt
from modelyard.core.errors import ModelyardError
from modelyard.core.events import Timings, Usage
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.engines.llama_cpp.grammar_mask import GrammarMask, TriggeredMask
from modelyard.engines.llama_cpp.sampler import JobSampler, logits_row, token_logprob


class LlamaCppJob:
    """`ids` holds prompt and output in one growing array; `done` of them are in the KV cache.

    Made on the reader's loop; from `admit` on it belongs to the engine's thread, except for `cancelled`, which anybody
    may set and the thread reads at each step.
    """

    def __init__(self, prompt: Prompt, loop: Any, arrived: int) -> None:
        self.prompt, self.arrived = prompt, arrived
        self.queue: GenerationQueue[Chunk] = GenerationQueue(on_cancel=self.cancel, loop=loop)
        self.cancelled = False
        self.prompt_tokens = prompt.n_tokens
        self._room = np.empty(self.prompt_tokens + min(prompt.max_tokens, 1024), np.int32)
        ids = prompt.ids  # fewer than there are prompt tokens where media are: such a job is refused
        self._room[: len(ids)] = ids
        self.length = len(ids)
        self.done = self.cached = 0
        self.pauses: list[int] = []  # where its state is to be kept while it is read, in order; set by the thread
        # Tokens at which it ends, if not before; `begin` may lower it.
        self.limit = self.prompt_tokens + prompt.max_tokens
        self.stops = frozenset(prompt.stop_ids)
        self.chain: JobSampler  # set by the engine's thread
        self.mask: GrammarMask | TriggeredMask | None = None  # set before the thread sees the job
        self.scripted: Iterator[int] | None = None  # what it is to say instead of what is drawn; set by the thread
        self.began = time.perf_counter()
        self.first_at: float | None = None

    def cancel(self) -> None:
        self.cancelled = True

    @property
    def is_plain(self) -> bool:
        """It says what its samplers draw from the row's logits as they are, and nobody asks how likely that was."""
        return self.mask is None and self.scripted is None and self.prompt.logprobs is None

    @property
    def takes_the_best(self) -> bool:
        return self.is_plain and self.chain.takes_the_best

    def is_late(self, now: float) -> bool:
        """`now` is unix time, as deadlines are."""
        return self.prompt.deadline is not None and now >= self.prompt.deadline

    @property
    def ids(self) -> Any:
        return self._room[: self.length]

    @property
    def held(self) -> Any:
        """What of it is in the KV cache."""
        return self._room[: self.done]

    @property
    def newest(self) -> int:
        return int(self._room[self.length - 1])

    @property
    def pending(self) -> int:
        return self.length - self.done

    @property
    def until_pause(self) -> int:
        return (self.pauses[0] if self.pauses else self.length) - self.done

    @property
    def generating(self) -> bool:
        return self.first_at is not None

    @property
    def output(self) -> int:
        return self.length - self.prompt_tokens

    def begin(self, keep: int, window: int) -> None:
        self.done = self.cached = keep
        self.limit = min(self.limit, window)

    def prefilled(self) -> None:
        if self.first_at is None:
            self.first_at = time.perf_counter()

    def append(self, token: int) -> None:
        if self.length == len(self._room):
            self._room = np.concatenate([self._room, np.empty(max(1024, self.length // 2), np.int32)])
        self._room[self.length] = token
        self.length += 1

    def say(self, token: int) -> None:
        """The token after all that was read in this step."""
        self.append(token)
        self.done += 1

    def close(self) -> None:
        self.chain.close()


# What a job says after a row of logits: the token, its odds where they are asked for, and whether it was the last.

Finish = tuple[str, ModelyardError | None]  # as an End has it


class StepOutput(Struct):
    """What a job says in one step."""

    ids: list[int]
    logprobs: list[IdLogprob] | None


def new_output(job: LlamaCppJob) -> StepOutput:
    """As yet."""
    return StepOutput([], [] if job.prompt.logprobs is not None else None)


def sample_token(context: Any, n_vocab: int, job: LlamaCppJob, row: int, said: StepOutput) -> Finish | None:
    """The next token, or why there is none; and whether it was the last."""
    wanted = job.prompt.logprobs
    raw = logits_row(context, row, n_vocab).copy() if wanted is not None else None
    try:
        token = _pick(context, n_vocab, job, row)
    except ModelyardError as error:
        return "error", error
    ending = append_token(job, token, said)
    if raw is not None and said.logprobs is not None and len(said.logprobs) < len(said.ids):
        said.logprobs.append(token_logprob(raw, token, wanted or 0))
    return ending


def _pick(context: Any, n_vocab: int, job: LlamaCppJob, row: int) -> int:
    if job.scripted is not None:
        return next(job.scripted, next(iter(job.stops), -1))
    if job.mask is None:
        return job.chain.pick(context, row)
    logits = logits_row(context, row, n_vocab)
    return job.mask.pick(logits, partial(job.chain.pick, context, row, logits))


def append_token(job: LlamaCppJob, token: int, said: StepOutput) -> Finish | None:
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


def end(job: LlamaCppJob, reason: Any, error: ModelyardError | None) -> End:
    return End(reason, Usage(job.prompt_tokens, job.cached, job.output), _timings(job), error)


def _timings(job: LlamaCppJob) -> Timings:
    now, first = time.perf_counter(), job.first_at
    return Timings(
        prefill=first - job.began if first else None,
        first_token=first - job.began if first else None,
        decode=now - first if first else None,
        backend=now - job.began,
        total=now - job.began,
    )
