"""Jobs, which of them share a batch, and one call of `generate_batch` while it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from modelyard.core.engine import Prompt, Tokens
from modelyard.core.errors import ModelyardError, Timeout
from modelyard.core.tokenizer import IdLogprob
from modelyard.engines.ct2.options import is_beam_search
from modelyard.engines.in_process import InProcessJob
from modelyard.engines.token_dispatch import TokenDispatch


class Ct2Job(InProcessJob):
    """While its batch runs it belongs to the batch's thread."""

    def __init__(self, prompt: Prompt, loop: asyncio.AbstractEventLoop, on_cancel: Callable[[], None]) -> None:
        super().__init__(prompt, loop)
        self._on_cancel = on_cancel
        self.stop_ids = frozenset(prompt.stop_ids)
        self.arguments: dict[str, Any] = {}  # of `generate_batch`

    def cancel(self) -> None:
        super().cancel()
        self._on_cancel()


def next_batch(waiting: Sequence[Ct2Job], slack: int) -> list[Ct2Job]:
    """The oldest job leads. Jobs join it that have the same arguments and a prompt of nearly the same length:
    CTranslate2 reads a batch in one pass only up to its shortest prompt, and token by token from there.

    The longest prompt comes first: then CTranslate2 keeps the order of rows, also in its logits. Pure.
    """
    leader = waiting[0]
    shortest = longest = leader.prompt_tokens
    chosen: list[Ct2Job] = []
    for job in waiting:
        low, high = min(shortest, job.prompt_tokens), max(longest, job.prompt_tokens)
        if job.arguments == leader.arguments and high - low <= slack:
            shortest, longest = low, high
            chosen.append(job)
    return sorted(chosen, key=lambda job: -job.prompt_tokens)


class Ct2Batch:
    """Runs in a worker thread and ends its jobs one by one. Any thread may set `error` to stop it.

    Tokens are flushed once per step, after the last row: if the event loop woke earlier, it would hold the GIL against
    the callbacks that are still to come. While CTranslate2 computes the next step, the loop has the GIL for itself.
    """

    def __init__(self, jobs: list[Ct2Job], vocabulary: Sequence[str], dispatch: TokenDispatch) -> None:
        self.jobs, self._vocabulary, self._dispatch = jobs, vocabulary, dispatch
        self.error: ModelyardError | None = None
        requested = [job.prompt.logprobs for job in jobs if job.prompt.logprobs is not None]
        self._logprobs, self._top = bool(requested), max(requested, default=0)
        self._step = self._last_row = -1
        self._rows: list[int] = []  # the jobs that have a row in this step
        self._logits: npt.NDArray[np.float32] | None = None

    def __repr__(self) -> str:
        return f"<Ct2Batch of {len(self.jobs)}, {sum(not job.ended for job in self.jobs)} running>"

    def run(self, generator: Any) -> None:
        """Returns when every job has ended."""
        prompts = [[self._vocabulary[id] for id in job.prompt.ids] for job in self.jobs]
        arguments = dict(self.jobs[0].arguments)
        arguments["end_token"] = list(arguments.get("end_token", ()))  # empty: the callback knows each job's own
        try:
            if is_beam_search(self.jobs[0].prompt.sampling):
                results = generator.generate_batch(prompts, include_prompt_in_result=False, **arguments)
                for job, result in zip(self.jobs, results, strict=True):
                    self._end_beam_search(job, list(result.sequences_ids[0]))
                return
            generator.generate_batch(
                prompts,
                include_prompt_in_result=False,
                max_length=max(job.max_output for job in self.jobs),
                return_scores=self._logprobs,
                return_logits_vocab=self._top > 0,
                callback=self._on_token,
                **arguments,
            )
        finally:
            self._dispatch.flush()

    def _on_token(self, result: Any) -> bool:
        """CTranslate2 calls this once per token and job, row after row; True ends the job."""
        if result.step != self._step:
            self._begin_step(result)
        ended = self._take_token(self.jobs[result.batch_id], result)
        if result.batch_id >= self._last_row:
            self._dispatch.flush()
        return ended

    def _begin_step(self, result: Any) -> None:
        """The logits of all rows come with the first token of a step only."""
        self._step = result.step
        self._rows = [index for index, job in enumerate(self.jobs) if not job.ended]
        self._last_row = self._rows[-1] if self._rows else -1
        if self._top:
            self._logits = _to_numpy(result.logits)

    def _take_token(self, job: Ct2Job, result: Any) -> bool:
        if job.ended or self._end_if_revoked(job):
            return True
        token: int = result.token_id
        if token in job.stop_ids:
            self._end(job, "stop")
            return True
        job.count_output()
        self._dispatch.put(job, [Tokens([token], self._token_logprobs(job, result))])
        if job.output_tokens < job.max_output:
            return False
        self._end(job, job.limit_reason)
        return True

    def _end_beam_search(self, job: Ct2Job, ids: list[int]) -> None:
        if self._end_if_revoked(job):
            return
        stopped = bool(ids) and ids[-1] in job.stop_ids
        if output := ids[:-1] if stopped else ids:
            job.count_output(len(output))
            self._dispatch.put(job, [Tokens(output)])
        self._end(job, "stop" if stopped else job.limit_reason)

    def _end_if_revoked(self, job: Ct2Job) -> bool:
        if self.error is not None:
            self._end(job, "error", self.error)
        elif job.cancelled:
            self._end(job, "cancelled")
        elif job.deadline_passed(time.time()):
            self._end(job, "error", Timeout("the job's deadline passed"))
        return job.ended

    def _end(self, job: Ct2Job, reason: str, error: ModelyardError | None = None) -> None:
        self._dispatch.put(job, [job.end(reason, error)], True)

    def _token_logprobs(self, job: Ct2Job, result: Any) -> list[IdLogprob] | None:
        top = job.prompt.logprobs
        if top is None:
            return None
        if not top or self._logits is None:
            return [IdLogprob(result.token_id, min(0.0, result.log_prob))]
        return [top_logprobs(self._logits[self._rows.index(result.batch_id)], result.token_id, top)]


def _to_numpy(logits: Any) -> npt.NDArray[np.float32]:
    """A copy: CTranslate2's view is valid for this step only."""
    import ctranslate2

    if logits.device != "cpu":
        logits = logits.to_device(ctranslate2.Device.cpu)
    if logits.dtype != ctranslate2.DataType.float32:
        logits = logits.to(ctranslate2.DataType.float32)
    return np.array(logits, np.float32)


def top_logprobs(logits: npt.NDArray[np.float32], token: int, top: int) -> IdLogprob:
    """Of the model's own distribution, before any truncation."""
    peak = float(logits.max())
    total = peak + float(np.log(np.exp(logits - peak).sum()))
    top = min(top, len(logits))
    ids = np.argpartition(logits, -top)[-top:]
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    best = tuple((int(i), float(logits[i]) - total) for i in ids)
    return IdLogprob(token, float(logits[token]) - total, best)
