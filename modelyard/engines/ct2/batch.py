"""One call of `generate_batch` while it runs: it belongs to a thread of its own, and ends its jobs one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from modelyard.core.engine import CacheInfo, Chunk, End, IdLogprob, Prompt, Tokens
from modelyard.core.errors import ModelyardError, Timeout
from modelyard.core.events import Timings, Usage
from modelyard.engines.ct2.options import Call, Ct2Options, generate_arguments, is_beam
from modelyard.engines.generation_queue import GenerationQueue

# One job in the engine's hands: how much it may say, what it has said, and its way out.


class Ct2Job:
    """Made on the reader's loop. While its batch runs it belongs to the batch's thread, except for `cancelled`, which
    anybody may set."""

    def __init__(self, prompt: Prompt, loop: Any, on_cancel: Callable[[], None]) -> None:
        self.prompt, self._on_cancel = prompt, on_cancel
        self.queue: GenerationQueue[Chunk] = GenerationQueue(on_cancel=self.cancel, loop=loop)
        self.ids, self.prompt_tokens = prompt.ids, prompt.n_tokens
        self.stops = frozenset(prompt.stop_ids)
        self.cancelled: bool = False
        self.ended: bool = False
        self.call: Call = {}
        self.most = self.said = 0
        self.began = time.perf_counter()
        self.first_at: float | None = None

    def __repr__(self) -> str:
        return f"<Job {self.prompt_tokens} tokens, {self.said}/{self.most} said>"

    def cancel(self) -> None:
        self.cancelled = True
        self._on_cancel()

    def is_late(self, now: float) -> bool:
        """`now` is unix time, as deadlines are."""
        return self.prompt.deadline is not None and now >= self.prompt.deadline

    def fit(self, cache: CacheInfo, options: Ct2Options) -> None:
        """How much it may say in this cache: CTranslate2 itself goes over any window."""
        room = cache.window - self.prompt_tokens
        self.most = min(self.prompt.max_tokens, room)
        self.full: str = "window" if room < self.prompt.max_tokens else "length"
        self.call = generate_arguments(self.prompt, self.most, options)

    def speaks(self, tokens: int = 1) -> None:
        if self.first_at is None:
            self.first_at = time.perf_counter()
        self.said += tokens

    def end(self, reason: Any, error: ModelyardError | None = None) -> End:
        self.ended = True
        return End(reason, Usage(self.prompt_tokens, 0, self.said), self._timings(), error)

    def _timings(self) -> Timings:
        now, first = time.perf_counter(), self.first_at
        told = first - self.began if first is not None else None
        decode = now - first if first is not None else None
        return Timings(prefill=told, first_token=told, decode=decode, total=now - self.began)


# Which of the jobs that wait share the next batch. Pure.
#
# The oldest job leads. Others go with it where their arguments are the same and their prompts are nearly as long as its
# own: CTranslate2 reads a batch only as far as its shortest prompt in one go, and token by token from there.


def next_batch(waiting: Sequence[Ct2Job], slack: int) -> list[Ct2Job]:
    """The longest prompt first: so CTranslate2 keeps its rows, and the rows of its logits are in our order."""
    leader = waiting[0]
    shortest = longest = leader.prompt_tokens
    chosen: list[Ct2Job] = []
    for job in waiting:
        low, high = min(shortest, job.prompt_tokens), max(longest, job.prompt_tokens)
        if job.call == leader.call and high - low <= slack:
            shortest, longest = low, high
            chosen.append(job)
    return sorted(chosen, key=lambda job: -job.prompt_tokens)


Emit = Callable[[Ct2Job, list[Chunk], bool], None]


class Ct2Batch:
    """`fault` is set by anybody who wants it to stop: its jobs then end with it. `wake` is called once a step, after
    the last token of it: a loop that works meanwhile would hold the GIL against the callbacks that are still to come,
    and while CTranslate2 computes the next step it has it for itself."""

    def __init__(self, jobs: list[Ct2Job], words: Sequence[str], emit: Emit, wake: Callable[[], None]) -> None:
        self.jobs, self._words, self._emit, self._wake = jobs, words, emit, wake
        self.fault: ModelyardError | None = None
        wanted = [job.prompt.logprobs for job in jobs if job.prompt.logprobs is not None]
        self._scores, self._top = bool(wanted), max(wanted, default=0)
        self._step = self._last = -1
        self._rows: list[int] = []  # whose the rows of this step are
        self._logits: npt.NDArray[np.float32] | None = None

    def __repr__(self) -> str:
        return f"<Batch of {len(self.jobs)}, {sum(not job.ended for job in self.jobs)} running>"

    def run(self, generator: Any) -> None:
        """Returns when every job has ended."""
        prompts = [[self._words[id] for id in job.ids] for job in self.jobs]
        call = dict(self.jobs[0].call)
        call["end_token"] = list(call.get("end_token", ()))  # none: the callback knows each job's own
        if is_beam(self.jobs[0].prompt.sampling):
            self._told(generator.generate_batch(prompts, include_prompt_in_result=False, **call))
            self._wake()
            return
        generator.generate_batch(
            prompts,
            include_prompt_in_result=False,
            max_length=max(job.most for job in self.jobs),
            return_scores=self._scores,
            return_logits_vocab=self._top > 0,
            callback=self._on_token,
            **call,
        )

    # --- token by token ---------------------------------------------------------------------------------------------

    def _on_token(self, said: Any) -> bool:
        """CTranslate2 calls this once a token and job, row after row; True ends the job."""
        if said.step != self._step:
            self._begin(said)
        is_over = self._hear(self.jobs[said.batch_id], said)
        if said.batch_id >= self._last:
            self._wake()
        return is_over

    def _begin(self, said: Any) -> None:
        """The logits of all rows come with the first token of a step, and with no other."""
        self._step = said.step
        self._rows = [index for index, job in enumerate(self.jobs) if not job.ended]
        self._last = self._rows[-1] if self._rows else -1
        if self._top:
            self._logits = _host(said.logits)

    def _hear(self, job: Ct2Job, said: Any) -> bool:
        if job.ended or self._given_up(job):
            return True
        token: int = said.token_id
        if token in job.stops:
            self._end(job, "stop")
            return True
        job.speaks()
        self._emit(job, [Tokens([token], self._logprobs(job, said))], False)
        if job.said < job.most:
            return False
        self._end(job, job.full)
        return True

    def _given_up(self, job: Ct2Job) -> bool:
        if self.fault is not None:
            self._end(job, "error", self.fault)
        elif job.cancelled:
            self._end(job, "cancelled")
        elif job.is_late(time.time()):
            self._end(job, "error", Timeout("the job's deadline passed"))
        return job.ended

    def _end(self, job: Ct2Job, reason: str, error: ModelyardError | None = None) -> None:
        self._emit(job, [job.end(reason, error)], True)

    # --- log probabilities ------------------------------------------------------------------------------------------

    def _logprobs(self, job: Ct2Job, said: Any) -> list[IdLogprob] | None:
        wanted = job.prompt.logprobs
        if wanted is None:
            return None
        if not wanted or self._logits is None:
            return [IdLogprob(said.token_id, min(0.0, said.log_prob))]
        return [logprob_of(self._logits[self._rows.index(said.batch_id)], said.token_id, wanted)]

    # --- beam search ------------------------------------------------------------------------------------------------

    def _told(self, results: Sequence[Any]) -> None:
        for job, result in zip(self.jobs, results, strict=True):
            ids = list(result.sequences_ids[0])
            stopped = bool(ids) and ids[-1] in job.stops
            if self._given_up(job):
                continue
            if said := ids[:-1] if stopped else ids:
                job.speaks(len(said))
                self._emit(job, [Tokens(said)], False)
            self._end(job, "stop" if stopped else job.full)


def _host(logits: Any) -> npt.NDArray[np.float32]:
    """A copy: the view is CTranslate2's, for as long as this step lasts."""
    import ctranslate2

    if logits.device != "cpu":
        logits = logits.to_device(ctranslate2.Device.cpu)
    if logits.dtype != ctranslate2.DataType.float32:
        logits = logits.to(ctranslate2.DataType.float32)
    return np.array(logits, np.float32)


def logprob_of(logits: npt.NDArray[np.float32], token: int, top: int) -> IdLogprob:
    """Of the model's own distribution, before any truncation."""
    peak = float(logits.max())
    total = peak + float(np.log(np.exp(logits - peak).sum()))
    top = min(top, len(logits))
    ids = np.argpartition(logits, -top)[-top:]
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    best = tuple((int(i), float(logits[i]) - total) for i in ids)
    return IdLogprob(token, float(logits[token]) - total, best)
