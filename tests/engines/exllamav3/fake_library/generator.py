"""Generator and Job: a queue, jobs that join and leave a running batch, and results as dictionaries."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.engines.exllamav3.fake_library.model import Cache, Model, Tokenizer
from tests.engines.exllamav3.fake_library.pages import PAGE, Page, PageTable
from tests.engines.exllamav3.fake_library.tensors import Tensor

Result = dict[str, Any]


class Job:
    def __init__(
        self,
        input_ids: Any,
        max_new_tokens: int | None = None,
        sampler: Any = None,
        seed: int | None = None,
        stop_conditions: list[int] | None = None,
        return_top_tokens: int = 0,
        return_probs: bool = False,
        filters: list[Any] | None = None,
        identifier: object | None = None,
        max_rq_tokens: int | None = None,
    ) -> None:
        assert all(ids.device.type == "cpu" for ids in input_ids), "input_ids must reside in system memory"
        assert input_ids.dtype == np.int64
        assert input_ids.shape[0] == 1
        assert input_ids.shape[1] > 0, "Input IDs cannot be empty."
        assert max_new_tokens is None or max_new_tokens >= 1, "max_new_tokens must be >= 1, or None for no limit"
        assert all(isinstance(token, int) for token in stop_conditions or ())
        self.ids: list[int] = input_ids.tolist()[0]
        self.prompt_tokens, self.most = len(self.ids), max_new_tokens
        self.sampler, self.filters, self.stops = sampler, filters or [], set(stop_conditions or ())
        self.chance = np.random.default_rng(seed)
        self.top, self.probs, self.identifier, self.max_rq_tokens = (
            return_top_tokens,
            return_probs,
            identifier,
            max_rq_tokens,
        )
        self.serial_number = -1
        self.pages: list[Page] = []
        self.kv_position = self.cached_pages = self.cached_tokens = 0
        self.new_tokens = self.segment = 0
        self.is_requeued = False
        self.held: list[tuple[int, float, Any]] = []
        self.cached_before: int | None = None

    @property
    def is_prefill_done(self) -> bool:
        return self.kv_position == len(self.ids) - 1

    def pages_needed(self) -> int:
        assert self.most is not None
        rest = self.most - self.new_tokens
        rest = min(rest, self.max_rq_tokens) if self.max_rq_tokens else rest + 1
        return -(-(len(self.ids) + rest) // PAGE)

    def read(self, count: int) -> None:
        """The KV of the next tokens is there now."""
        for token in self.ids[self.kv_position : self.kv_position + count]:
            page = self.pages[self.kv_position // PAGE]
            if not page.tokens:
                page.before = tuple(self.ids[: self.kv_position])
            page.tokens.append(token)
            self.kv_position += 1


class Generator:
    def __init__(
        self,
        model: Model,
        cache: Cache,
        tokenizer: Tokenizer,
        max_batch_size: int = 256,
        max_chunk_size: int = 2048,
        max_q_size: int = 8,
    ) -> None:
        shared = (max_chunk_size // 2 + PAGE - 1) // PAGE * PAGE
        assert 0 < shared <= max_chunk_size, "shared_chunk_size must be no larger than max_chunk_size"
        self.model, self.cache, self.tokenizer = model, cache, tokenizer
        self.pagetable = PageTable(cache.max_num_tokens)
        self.max_batch_size, self.max_chunk_size, self.max_q_size = max_batch_size, max_chunk_size, max_q_size
        self.pending_jobs: list[Job] = []
        self.active_jobs: list[Job] = []
        self.job_serial = 0
        self.closed = False
        cache.owner = self

    def enqueue(self, job: Job) -> int:
        pages = len(self.pagetable.all_pages)
        assert job.most is not None
        job.most = min(job.most, max(1, pages * PAGE - len(job.ids) - 1))
        assert job.pages_needed() <= pages, f"Job requires {job.pages_needed()} pages (only {pages} available)"
        job.serial_number = self.job_serial
        self.job_serial += 1
        self.pending_jobs.append(job)
        return job.serial_number

    def cancel(self, job: Job) -> None:
        if job in self.pending_jobs:
            self.pending_jobs.remove(job)
        elif job in self.active_jobs:
            self._let_go(job)

    def iterate(self) -> list[Result]:
        assert not self.closed
        assert self.cache.initialized, "Cache tensors were never allocated."
        assert self.cache.owner is self, "This Generator no longer owns its Cache"
        self.model.config.library.steps += 1
        self.model.config.library.before_step()
        results: list[Result] = []
        self._start_jobs(results)
        for job in list(self.active_jobs):
            self._prefill(job, results)
        for job in [job for job in self.active_jobs if job.is_prefill_done]:
            self._generate(job, results)
        return results

    def close(self) -> None:
        self.closed = True

    # --- starting and reading ---------------------------------------------------------------------------------------

    def _start_jobs(self, results: list[Result]) -> None:
        for job in list(self.pending_jobs):
            new = job.pages_needed() - sum(page.ref_count > 0 for page in self.pagetable.found(job.ids))
            if len(self.active_jobs) >= self.max_batch_size or new > len(self.pagetable.unreferenced_pages):
                continue
            self.pending_jobs.remove(job)
            self.active_jobs.append(job)
            for one in job.filters if not job.is_requeued else ():
                one.attach(job)
                one.reset()
                one.is_active = one.trigger_token is None
            job.pages, job.cached_pages = self.pagetable.take(job.ids, job.pages_needed())
            job.kv_position = job.cached_pages * PAGE
            results.append(self._result(job, "started"))

    def _prefill(self, job: Job, results: list[Result]) -> None:
        start, library = job.kv_position, self.model.config.library
        if library.job_error is not None:
            error, library.job_error = library.job_error, None
            self._let_go(job)
            results.append({"job": job, "serial": job.serial_number, "stage": "error", "eos": True, "error": error})
            return
        end = min((start + self.max_chunk_size) // PAGE * PAGE, len(job.ids) - 1)
        if end <= start:
            return
        if start % PAGE == 0:
            known = self.pagetable.begun(job.ids[:end], start, job.pages[start // PAGE])
            job.cached_tokens += known
            job.read(known)
        job.read(end - job.kv_position)
        progress = {"curr_progress": job.kv_position, "max_progress": len(job.ids) - 1}
        results.append(self._result(job, "prefill") | progress)

    # --- speaking ---------------------------------------------------------------------------------------------------

    def _generate(self, job: Job, results: list[Result]) -> None:
        job.read(1)
        raw = self.model.logits(job.ids)
        masked = raw.copy()
        for one in job.filters:
            if one.is_active:
                masked[~_allowed(one.get_next_logit_mask(), len(raw))] = -np.inf
        token = job.sampler.forward(masked, job.ids, job.chance)
        ended = sum(one.feed(token) for one in job.filters) > 0  # every one hears it
        job.ids.append(token)
        job.new_tokens, job.segment = job.new_tokens + 1, job.segment + 1
        job.held.append((token, *_odds(raw, token, job.top)))
        results.append(self._streamed(job, token, ended))
        if results[-1]["eos"]:
            self._let_go(job)
        elif results[-1].get("requeue"):
            self._requeue(job)

    def _streamed(self, job: Job, token: int, ended: bool) -> Result:
        result = self._result(job, "streaming")
        if token in job.stops:
            trigger = {"eos_triggering_token_id": token}
            return result | self._last(job, "stop_token") | trigger | {"held": _emitted(job)}
        if job.new_tokens >= (job.most or 0):
            return result | self._last(job, "max_new_tokens") | _emitted(job)
        if ended:
            return result | self._last(job, "end_filter") | _emitted(job)
        if not self.tokenizer.is_whole([one for one, _, _ in job.held]) and len(job.held) < 20:
            return result
        if job.max_rq_tokens is not None and job.segment > job.max_rq_tokens - 1:
            result["requeue"] = True
        return result | _emitted(job)

    def _last(self, job: Job, reason: str) -> Result:
        cached = job.cached_pages * PAGE + job.cached_tokens if job.cached_before is None else job.cached_before
        return {
            "eos": True,
            "eos_reason": reason,
            "new_tokens": job.new_tokens,
            "prompt_tokens": job.prompt_tokens,
            "time_enqueued": 0.0,
            "time_prefill": 0.25,
            "time_generate": 0.5,
            "cached_pages": cached // PAGE,
            "cached_tokens": cached,
        }

    def _result(self, job: Job, stage: str) -> Result:
        known = {"job": job, "stage": stage, "eos": False, "serial": job.serial_number}
        return known if job.identifier is None else known | {"identifier": job.identifier}

    def _let_go(self, job: Job) -> None:
        for page in job.pages:
            page.ref_count -= 1
        job.pages = []
        self.active_jobs.remove(job)

    def _requeue(self, job: Job) -> None:
        """The same job starts again, with its output as part of its prompt."""
        if job.cached_before is None:
            job.cached_before = job.cached_pages * PAGE + job.cached_tokens
        self._let_go(job)
        job.cached_pages = job.cached_tokens = job.kv_position = job.segment = 0
        job.is_requeued = True
        self.pending_jobs.insert(0, job)


def _allowed(mask: Any, count: int) -> Any:
    assert mask.dtype == np.int32
    assert mask.shape[0] == 1
    bits = np.unpackbits(mask.array.reshape(-1).view(np.uint8), bitorder="little")
    allowed = np.zeros(count, np.bool_)
    allowed[: len(bits)] = bits[:count].astype(np.bool_)
    return allowed


def _odds(raw: Any, token: int, top: int) -> tuple[float, Any]:
    probs = np.exp(raw - raw.max())
    probs /= probs.sum()
    order = np.argsort(-probs)[:top]
    return float(probs[token]), (order, probs[order])


def _emitted(job: Job) -> Result:
    held, job.held = job.held, []
    result: Result = {"token_ids": Tensor([[token for token, _, _ in held]])}
    if job.probs:
        result["token_probs"] = Tensor([[prob for _, prob, _ in held]])
    if job.top:
        result["top_k_tokens"] = Tensor([[ids for _, _, (ids, _) in held]])
        result["top_k_probs"] = Tensor([[probs for _, _, (_, probs) in held]])
    return result
