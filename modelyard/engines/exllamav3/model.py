"""The loaded model: its weights, a generator for each cache, and ExLlamaV3's own objects for a job. Thread only."""

from __future__ import annotations

import gc
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from modelyard.core.engine import (
    Accepted,
    CacheInfo,
    CacheStats,
    Chunk,
    End,
    EngineSpec,
    IdLogprob,
    Progress,
    Prompt,
    Tokens,
)
from modelyard.core.errors import Internal, InvalidRequest, ModelyardError, Timeout, Unavailable
from modelyard.core.events import Timings, Usage
from modelyard.engines.exllamav3 import arguments
from modelyard.engines.exllamav3.arguments import Call
from modelyard.engines.exllamav3.grammar_filter import GrammarFilter
from modelyard.engines.exllamav3.model_folder import ExllamaModelInfo
from modelyard.engines.exllamav3.options import PAGE, ExllamaOptions
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.engines.token_dispatch import TokenDispatch
from modelyard.plugins import MissingLibrary

# ExLlamaV3 and torch, imported when a model is loaded: the first import on a machine compiles kernels for minutes.


class ExllamaLibrary(Struct, frozen=True):
    exl: Any
    torch: Any


def load_library() -> ExllamaLibrary:
    try:
        import exllamav3
        import torch
    except Exception as error:  # a compiler that is not there, no GPU, versions that do not fit: it raises all kinds
        told = str(error).strip().splitlines()
        raise MissingLibrary(
            f"ExLlamaV3 does not work here: {told[-1] if told else type(error).__name__}. It needs an NVIDIA GPU, a "
            "CUDA build of torch and, to compile itself once, nvcc"
        ) from error
    return ExllamaLibrary(exllamav3, torch)


# One job in the engine's hands: how much it may say, what it has said, and its way out.


class ExllamaJob:
    """Made on the reader's loop; from `admit` on it belongs to the engine's thread, except for `cancelled`, which
    anybody may set and the thread reads between two steps."""

    def __init__(self, prompt: Prompt, loop: Any) -> None:
        self.prompt = prompt
        self.queue: GenerationQueue[Chunk] = GenerationQueue(on_cancel=self.cancel, loop=loop)
        self.ids, self.prompt_tokens = prompt.ids, prompt.n_tokens
        self.cancelled: bool = False
        self.filter: GrammarFilter | None = None  # set before the thread sees the job
        self.raw: Any = None  # ExLlamaV3's own
        self.cached: int | None = None  # unknown until it begins to be read
        self.most = self.said = 0
        self.began = time.perf_counter()
        self.first_at: float | None = None

    def __repr__(self) -> str:
        return f"<Job {self.prompt_tokens} tokens, {self.said}/{self.most} said>"

    def cancel(self) -> None:
        self.cancelled = True

    def is_late(self, now: float) -> bool:
        """`now` is unix time, as deadlines are."""
        return self.prompt.deadline is not None and now >= self.prompt.deadline

    def fit(self, cache: CacheInfo) -> None:
        """How much it may say in this cache: to ExLlamaV3 a window is what the pages hold."""
        room = cache.window - self.prompt_tokens
        self.most = min(self.prompt.max_tokens, room)
        self.full: str = "window" if room < self.prompt.max_tokens else "length"

    def speaks(self, tokens: int) -> None:
        if self.first_at is None:
            self.first_at = time.perf_counter()
        self.said += tokens

    def end(self, reason: Any, error: ModelyardError | None = None, told: dict[str, Any] | None = None) -> End:
        """`told`: ExLlamaV3's last word on the job, with its own times."""
        return End(reason, Usage(self.prompt_tokens, self.cached or 0, self.said), self._timings(told or {}), error)

    def _timings(self, told: dict[str, Any]) -> Timings:
        now, first = time.perf_counter(), self.first_at
        waited = first - self.began if first is not None else None
        decode = now - first if first is not None else None
        return Timings(
            prefill=told.get("time_prefill", waited),
            first_token=waited,
            decode=told.get("time_generate", decode),
            total=now - self.began,
        )


# One named cache: pages of KV and a generator of their own, and the jobs that run there. Belongs to the thread.

log = logging.getLogger(__name__)

Deed = Callable[[], None]
Result = dict[str, Any]

_LEAST = math.log(1e-45)  # of a probability that is 0 in 32 bits


class ExllamaCache:
    """`make` turns a job into ExLlamaV3's own, whose sampler calls `sampled`."""

    def __init__(
        self, info: CacheInfo, generator: Any, make: Callable[[ExllamaJob, Deed], Any], dispatch: TokenDispatch
    ) -> None:
        self.info, self._generator, self._make, self._dispatch = info, generator, make, dispatch
        self.jobs: list[ExllamaJob] = []
        self._unsampled = 0
        self.reused = self.evaluated = self.held = 0  # tokens

    def __repr__(self) -> str:
        return f"<Lane {len(self.jobs)} jobs, {self.held} tokens held>"

    def admit(self, job: ExllamaJob) -> None:
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

    def _end(
        self, job: ExllamaJob, reason: str, error: ModelyardError | None = None, told: Result | None = None
    ) -> None:
        self.jobs.remove(job)
        job.raw = None  # the two hold each other, and its pinned memory should not wait for the collector
        self._count()
        self._dispatch.put(job, [job.end(reason, error, told)], True)

    def _count(self) -> None:
        self.held = sum(page.kv_position for page in self._generator.pagetable.all_pages)

    # --- what the generator says ------------------------------------------------------------------------------------

    def _take(self, job: ExllamaJob, result: Result) -> None:
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

    def _accept(self, job: ExllamaJob) -> None:
        """When the first of it is read: only then is it known how much was in the pages already."""
        if job.cached is None:
            job.cached = job.raw.cached_pages * PAGE + job.raw.cached_tokens
            self.reused += job.cached
            self.evaluated += job.prompt_tokens - job.cached
            self._dispatch.put(job, [Accepted(job.cached, job.cached)], False)

    def _streamed(self, job: ExllamaJob, result: Result) -> None:
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

    def _failed(self, job: ExllamaJob, error: Exception) -> None:
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


class ExllamaModel:
    """Caches are made before the weights are loaded: that is when their pages are laid out on the GPUs."""

    def __init__(
        self,
        library: ExllamaLibrary,
        where: Path,
        shape: ExllamaModelInfo,
        spec: EngineSpec,
        dispatch: TokenDispatch,
        tell: Callable[[float], None],
    ) -> None:
        self._library, self._shape = library, shape
        self._options: ExllamaOptions = spec.options
        self.lanes: dict[str, ExllamaCache] = {}
        self._sampler = _telling(library.exl.CustomSampler)
        exl, options = library.exl, self._options
        config = exl.Config.from_directory(str(where))
        self._raw = exl.Model.from_config(config)
        self._tokenizer = exl.Tokenizer.from_config(config)
        try:
            tokens = arguments.cache_tokens(options, spec.caches)
            caches = {name: self._cache(name, info, tokens[name]) for name, info in spec.caches.items()}
            most = max((arguments.batch(options, info) for info in spec.caches.values()), default=1)
            called = arguments.load_arguments(options, most, tokens.values())
            self._load(called, tell)
            self._warm_up(list(caches.values()), called)
            for name, info in spec.caches.items():
                called = arguments.generator_arguments(options, info, tokens[name])
                generator = exl.Generator(model=self._raw, cache=caches[name], tokenizer=self._tokenizer, **called)
                self.lanes[name] = ExllamaCache(info, generator, self._job, dispatch)
        except BaseException:
            self.close()
            raise

    def _cache(self, name: str, info: CacheInfo, tokens: int) -> Any:
        exl, quant = self._library.exl, arguments.quant_of(name, info, self._options)
        called: Call = {"max_num_tokens": tokens, "max_batch_size": arguments.batch(self._options, info)}
        if quant is None:
            return exl.Cache(self._raw, layer_type=exl.CacheLayer_fp16, **called)
        k_bits, v_bits = quant
        return exl.Cache(self._raw, layer_type=exl.CacheLayer_quant, k_bits=k_bits, v_bits=v_bits, **called)

    def _load(self, called: Call, tell: Callable[[float], None]) -> None:
        try:
            self._raw.load(callback=lambda done, whole: tell(done / max(1, whole)), **called)
        except Exception as error:
            if "out of memory" in str(error).lower() or "insufficient vram" in str(error).lower():
                raise InvalidRequest(
                    f"the GPUs have too little free memory for this model: {error}. Take a smaller n_ctx or parallel, "
                    "or set exllama_cache_quant",
                    code="model_too_large",
                ) from error
            raise

    def _warm_up(self, caches: list[Any], called: Call) -> None:
        """Before any generator owns the pages, for it writes into them."""
        if self._options.exllama_warmup and caches:
            sizes = {name: called[name] for name in ("max_chunk_size", "max_batch_size")}
            self._raw.warmup(cache=caches[0], **sizes)

    def _job(self, job: ExllamaJob, sampled: Deed) -> Any:
        exl, torch, prompt = self._library.exl, self._library.torch, job.prompt
        ends = self._shape.ends if job.filter is not None and job.filter.ends_the_job else ()
        return exl.Job(
            input_ids=torch.tensor([job.ids], dtype=torch.long),
            sampler=self._sampler(sampled, [self._step(*step) for step in arguments.sampler_steps(prompt.sampling)]),
            filters=[job.filter] if job.filter is not None else [],
            identifier=job,
            **arguments.job_arguments(prompt, job.most, self._options, ends),
        )

    def _step(self, name: str, called: Call) -> Any:
        if (words := called.get("dry_sequence_breakers")) is not None:
            ids = self._library.exl.dry_sequence_breaker_tokens(self._tokenizer, tuple(words))
            called = called | {"dry_sequence_breakers": ids}
        return getattr(self._library.exl, name)(**called)

    def close(self) -> None:
        """Generators and their pages hold each other: what the GPU held is free when the collector has been."""
        for lane in self.lanes.values():
            lane.close()
        self._raw.unload()
        self.lanes = {}
        self._raw = self._tokenizer = None
        gc.collect()
        self._library.torch.cuda.empty_cache()


def _telling(kind: Any) -> Any:
    """ExLlamaV3's sampler that tells when it has been launched: the last thing of a step that is ours to see."""

    class Sampler(kind):  # type: ignore[misc]
        def __init__(self, sampled: Deed, steps: list[Any]) -> None:
            super().__init__(steps)
            self._sampled = sampled

        def forward(self, *called: Any, **named: Any) -> Any:
            drawn = super().forward(*called, **named)
            self._sampled()
            return drawn

    return Sampler
