"""One named cache: pages of KV and a generator of their own, and the jobs that run there. Belongs to the thread."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

from modelyard.core.engine import Accepted, CacheInfo, CacheStats, IdLogprob, Progress, Tokens
from modelyard.core.errors import Internal, ModelyardError, Timeout, Unavailable
from modelyard.engines.exllamav3.job import Job
from modelyard.engines.exllamav3.options import PAGE
from modelyard.engines.token_dispatch import TokenDispatch

log = logging.getLogger(__name__)

Deed = Callable[[], None]
Result = dict[str, Any]

_LEAST = math.log(1e-45)  # of a probability that is 0 in 32 bits


class Lane:
    """`make` turns a job into ExLlamaV3's own, whose sampler calls `sampled`."""

    def __init__(
        self, info: CacheInfo, generator: Any, make: Callable[[Job, Deed], Any], dispatch: TokenDispatch
    ) -> None:
        self.info, self._generator, self._make, self._dispatch = info, generator, make, dispatch
        self.jobs: list[Job] = []
        self._unsampled = 0
        self.reused = self.evaluated = self.held = 0  # tokens

    def __repr__(self) -> str:
        return f"<Lane {len(self.jobs)} jobs, {self.held} tokens held>"

    def admit(self, job: Job) -> None:
        job.raw = self._make(job, self._sampled)
        self._generator.enqueue(job.raw)
        self.jobs.append(job)

    def step(self) -> None:
        self._sweep(time.time())
        self._unsampled = len(self.jobs)
        if self.jobs:
            for result in self._generator.iterate():
                self._take(result["job"].identifier, result)  # of a job that failed alone nothing else is told

    def _sampled(self) -> None:
        """After the last sampler of a step all its work is launched, and what follows is a wait for the GPU."""
        self._unsampled -= 1
        if self._unsampled == 0:
            self._dispatch.before_gpu_wait()

    @property
    def only_speaks(self) -> bool:
        """No prompt is to be read in the next step, of those that are known here."""
        return all(job.said for job in self.jobs)

    def evict(self) -> None:
        """What no job is using right now."""
        for page in list(self._generator.pagetable.unreferenced_pages.values()):
            page.clear()
        self._count()

    def fail_all(self, error: ModelyardError) -> None:
        """The generator may be past helping: nothing is asked of it."""
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            self._dispatch.put(job, [job.end("error", error)], True)

    def close(self) -> None:
        """What the engine still knows of it must not keep its pages alive."""
        generator, self._generator = self._generator, None
        generator.close()

    def stats(self) -> CacheStats:
        """Read from the loop, so of plain numbers only."""
        return CacheStats(self.reused, self.evaluated)

    # --- jobs that are not wanted any more --------------------------------------------------------------------------

    def _sweep(self, now: float) -> None:
        for job in [job for job in self.jobs if job.cancelled or job.is_late(now)]:
            self._generator.cancel(job.raw)
            if job.cancelled:
                self._end(job, "cancelled")
            else:
                self._end(job, "error", Timeout("the job's deadline passed"))

    def _end(self, job: Job, reason: str, error: ModelyardError | None = None, told: Result | None = None) -> None:
        self.jobs.remove(job)
        job.raw = None  # the two hold each other, and its pinned memory should not wait for the collector
        self._count()
        self._dispatch.put(job, [job.end(reason, error, told)], True)

    def _count(self) -> None:
        self.held = sum(page.kv_position for page in self._generator.pagetable.all_pages)

    # --- what the generator says ------------------------------------------------------------------------------------

    def _take(self, job: Job, result: Result) -> None:
        match result["stage"]:
            case "prefill":
                self._accept(job)
                if not job.said:  # else it has queued for pages anew, and is read again
                    self._dispatch.put(job, [Progress(result["curr_progress"], job.prompt_tokens)], False)
            case "streaming":
                self._accept(job)
                self._streamed(job, result)
            case "error":
                self._failed(job, result["error"])

    def _accept(self, job: Job) -> None:
        """When the first of it is read: only then is it known how much was in the pages already."""
        if job.cached is None:
            job.cached = job.raw.cached_pages * PAGE + job.raw.cached_tokens
            self.reused += job.cached
            self.evaluated += job.prompt_tokens - job.cached
            self._dispatch.put(job, [Accepted(job.cached, job.cached)], False)

    def _streamed(self, job: Job, result: Result) -> None:
        if (said := _said(result)) is not None:
            urgent = job.said == 0 or "requeue" in result  # its first word; or it will be read anew before the next
            job.speaks(len(said.ids))
            self._dispatch.put(job, [said], urgent=urgent)
        if not result["eos"]:
            return
        fault = job.filter.fault if job.filter is not None else None
        if fault is not None:
            self._end(job, "error", fault, result)
        else:
            self._end(job, job.full if result["eos_reason"] == "max_new_tokens" else "stop", None, result)

    def _failed(self, job: Job, error: Exception) -> None:
        """One job's failure, unless it is the GPU's: after that nothing it computes can be relied on."""
        if "CUDA error" in str(error):
            raise error
        log.error("ExLlamaV3 failed a job", exc_info=error)
        out_of_memory = "out of memory" in str(error).lower()
        told = "the GPU's memory is too small for this prompt right now"
        self._end(job, "error", Unavailable(told) if out_of_memory else Internal("ExLlamaV3 could not answer"))


def _said(result: Result) -> Tokens | None:
    """Tokens are held back while a character is incomplete; what is held at the end comes with a stop token, which is
    not said."""
    ids, source = _ids(result), result
    if result["eos"] and (held := result.get("held")) is not None:
        ids, source = _ids(held), held
        if result["eos_reason"] == "stop_token":
            ids = ids[:-1]
    return Tokens(ids, _logprobs(ids, source)) if ids else None


def _ids(part: Result) -> list[int]:
    tensor = part.get("token_ids")
    return [int(token) for token in tensor.tolist()[0]] if tensor is not None else []


def _logprobs(ids: list[int], part: Result) -> list[IdLogprob] | None:
    """ExLlamaV3 gives probabilities of the model's own distribution, before masks and samplers."""
    if (chosen := part.get("token_probs")) is None:
        return None
    probs = chosen.tolist()[0]
    if (tops := part.get("top_k_tokens")) is None:
        return [IdLogprob(id, _log(prob)) for id, prob in zip(ids, probs, strict=False)]
    rows = zip(ids, probs, tops.tolist()[0], part["top_k_probs"].tolist()[0], strict=False)
    return [IdLogprob(id, _log(prob), _top(best, their)) for id, prob, best, their in rows]


def _top(ids: list[int], probs: list[float]) -> tuple[tuple[int, float], ...]:
    return tuple((int(id), _log(prob)) for id, prob in zip(ids, probs, strict=True))


def _log(prob: float) -> float:
    return min(0.0, math.log(prob)) if prob > 0 else _LEAST
