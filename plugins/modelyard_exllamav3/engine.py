"""ExLlamaV3 in process: one model, several named caches, one thread that owns them all.

In each step the generator of every cache that has jobs runs once, in turn. Tokens of a step reach the event loop while
the GPU computes the next one (`TokenDispatch`).

`ExllamaJob` is one generation, `ExllamaCache` one named cache with its generator, `ExllamaModel` the weights and the
caches. They belong to the engine's thread.

Constrained output is llguidance behind the filter interface that ExLlamaV3 calls at every token.
ExLlamaV3's own filters are not used: they know one-token triggers only, compile where they are created, and raise when
a grammar fails during generation, which ends the jobs of all clients.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.engine import (
    Accepted,
    CacheInfo,
    CacheStats,
    Control,
    EngineInfo,
    EngineSpec,
    EngineStats,
    Progress,
    Prompt,
    Tokens,
)
from modelyard.core.errors import Internal, InvalidRequest, ModelyardError, Unavailable, Unsupported
from modelyard.core.events import Timings
from modelyard.core.request import Constraint
from modelyard.core.tokenizer import IdLogprob
from modelyard.engines.generation_queue import TokenDispatch
from modelyard.engines.grammars import Grammars
from modelyard.engines.in_process import InProcessJob, ThreadedEngine, warn_about_trained_length
from modelyard.plugins import MissingLibrary
from modelyard_exllamav3.model_folder import ExllamaModelInfo, find_folder, read_model_info, read_tokenizer
from modelyard_exllamav3.options import (
    CAPABILITIES,
    PAGE,
    Arguments,
    ExllamaOptions,
    batch_size,
    cache_bits,
    cache_tokens,
    generator_arguments,
    job_arguments,
    load_arguments,
    sampler_steps,
)

log = logging.getLogger(__name__)

_NO_TOKEN = -1


class GrammarFilters(Grammars):
    """Creates the filters of one model. `as_tensor` turns a row of bits into a tensor without a copy."""

    def __init__(self, folder: Path, info: ExllamaModelInfo, as_tensor: Callable[[Any], Any]) -> None:
        super().__init__(partial(_load_tokenizer, folder, info))
        self._as_tensor = as_tensor

    def create(self, constraint: Constraint) -> GrammarFilter | None:
        """None if the constraint is dropped."""
        matcher = self.matcher_if_valid(constraint)
        if matcher is None:
            return None
        return GrammarFilter(matcher, self.tokenizer, self._as_tensor, constraint.trigger)


def _load_tokenizer(folder: Path, info: ExllamaModelInfo) -> LLTokenizer:
    return LLTokenizer(read_tokenizer(folder), n_vocab=info.n_vocab, eos_token=list(info.eos_ids) or None)


class GrammarFilter:
    """Constrains one job's output to a grammar; with a trigger only what follows it, each time until it is complete.

    `is_active` and `trigger_token` are ExLlamaV3's: it activates the filter at the start of the job unless
    `trigger_token` is set. `error` is set when the grammar fails; that ends this job only.
    """

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, as_tensor: Callable[[Any], Any], trigger: str | None = None
    ) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer
        self._trigger, self._tail = (trigger or "").encode(), b""
        self.trigger_token = _NO_TOKEN if trigger else None
        self.is_active = not trigger
        self.error: InvalidRequest | None = None
        self._bits = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
        self._mask = as_tensor(self._bits.reshape(1, -1))

    @property
    def ends_job(self) -> bool:
        """The job ends when the grammar is complete."""
        return not self._trigger

    def attach(self, job: Any) -> None:
        """Part of ExLlamaV3's interface."""

    def reset(self) -> None:
        self._matcher.reset()
        self._tail = b""

    def use_background_worker(self) -> bool:
        """The mask is computed while the GPU computes."""
        return True

    def get_next_logit_mask(self) -> Any:
        """A set bit allows a token. After an error all are allowed: the job ends before the token is sent."""
        if self.error is None:
            self._matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
            self._check_matcher()
        if self.error is not None:
            self._bits.fill(-1)
        return self._mask

    def feed(self, token: int) -> bool:
        """Takes each generated token; True ends the job."""
        if self.error is not None:
            return True
        if not self.is_active:
            self._look_for_trigger(token)
            return False
        self._matcher.consume_token(token)
        self._check_matcher()
        self.is_active = self.error is None and not self._matcher.is_stopped()
        return self.error is not None or (self.ends_job and not self.is_active)

    def _check_matcher(self) -> None:
        """Some grammars exceed llguidance's limits only while they are used."""
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip()
            self.error = InvalidRequest(f"the grammar failed: {reason}", code="bad_grammar")

    def _look_for_trigger(self, token: int) -> None:
        """A token may end the trigger and continue with text that the grammar forbids. It has been generated already,
        so this one call stays unconstrained."""
        text = self._tail + self._tokenizer.decode_bytes([token])
        _, found, rest = text.partition(self._trigger)
        if not found:
            self._tail = text[max(0, len(text) - len(self._trigger) + 1) :]
            return
        self._tail = b""
        self._matcher.reset()
        ids = self._tokenizer.tokenize_bytes(rest) if rest else []
        matches = self._matcher.try_consume_tokens(ids) == len(ids)
        self.is_active = matches and not self._matcher.is_stopped()


_MIN_LOGPROB = math.log(1e-45)  # of a probability that 32 bits round to 0

Result = dict[str, Any]


class ExllamaLibrary(Struct, frozen=True):
    exl: Any
    torch: Any


def load_library() -> ExllamaLibrary:
    """The first import on a machine compiles kernels for minutes, so it waits until a model is loaded."""
    try:
        import exllamav3
        import torch
    except Exception as error:  # no compiler, no GPU, versions that do not match: it raises all kinds
        lines = str(error).strip().splitlines()
        raise MissingLibrary(
            f"ExLlamaV3 does not work on this machine: {lines[-1] if lines else type(error).__name__}. It needs an "
            "NVIDIA GPU, a CUDA build of torch and, to compile its kernels once, nvcc"
        ) from error
    return ExllamaLibrary(exllamav3, torch)


class ExllamaJob(InProcessJob):
    def __init__(self, prompt: Prompt, loop: AbstractEventLoop, cache: str, window: int) -> None:
        super().__init__(prompt, loop, cache, window)
        self.filter: GrammarFilter | None = None  # set before the thread gets the job
        self.native: Any = None  # ExLlamaV3's own Job
        self.accepted: bool = False
        self.last_result: Result = {}  # has ExLlamaV3's own times

    def timings(self) -> Timings:
        own, result = super().timings(), self.last_result
        prefill, decode = result.get("time_prefill", own.prefill), result.get("time_generate", own.decode)
        return replace(own, prefill=prefill, decode=decode)


class ExllamaCache:
    """One named cache: its pages, its generator, and the jobs that run in it.

    `create_native` makes ExLlamaV3's job, whose sampler calls the given function after it has been launched.
    """

    def __init__(
        self,
        generator: Any,
        create_native: Callable[[ExllamaJob, Callable[[], None]], Any],
        dispatch: TokenDispatch,
    ) -> None:
        self.generator, self._create_native, self._dispatch = generator, create_native, dispatch
        self.jobs: list[ExllamaJob] = []
        self._scopes: set[str] = set()  # whose tokens the pages hold
        self._unsampled = 0  # jobs of this step whose sampler has not been launched
        self.reused = self.evaluated = self.held = 0  # tokens

    def __repr__(self) -> str:
        return f"<ExllamaCache {len(self.jobs)} jobs, {self.held} tokens held>"

    def admit(self, job: ExllamaJob) -> None:
        """ExLlamaV3 cannot keep the pages of two scopes apart, so a job finds no idle page of another scope. It may
        still share pages with jobs that run at the same time."""
        if self._scopes - {job.prompt.scope}:
            self.evict()
            self._scopes = {other.prompt.scope for other in self.jobs}
        self._scopes.add(job.prompt.scope)
        job.native = self._create_native(job, self._on_sampled)
        self.generator.enqueue(job.native)
        self.jobs.append(job)

    def step(self) -> None:
        self._end_revoked(time.monotonic())
        self._unsampled = len(self.jobs)
        if self.jobs:
            for result in self.generator.iterate():
                self._handle(result["job"].identifier, result)  # of a failed job the result has nothing else

    def _on_sampled(self) -> None:
        """After the last sampler of a step all its work is launched; the thread then waits for the GPU."""
        self._unsampled -= 1
        if self._unsampled == 0:
            self._dispatch.before_gpu_wait()

    @property
    def only_decodes(self) -> bool:
        """The next step has no prompt to read."""
        return all(job.output_tokens for job in self.jobs)

    def evict(self) -> None:
        """Clears the pages that no running job uses."""
        for page in list(self.generator.pagetable.unreferenced_pages.values()):
            page.clear()
        self._count_held()

    def fail_all(self, error: ModelyardError) -> None:
        """Does not call the generator, which may be broken."""
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            self._dispatch.put(job, [job.end("error", error)], True)

    def close(self) -> None:
        """The engine keeps this object for its counters; the pages must be freed."""
        generator, self.generator = self.generator, None
        generator.close()

    def _end_revoked(self, now: float) -> None:
        for job in list(self.jobs):
            if (finish := job.revoked(now)) is not None:
                self.generator.cancel(job.native)
                self._end(job, *finish)

    def _end(self, job: ExllamaJob, reason: str, error: ModelyardError | None = None) -> None:
        self.jobs.remove(job)
        job.native = None  # a reference cycle: its pinned memory should not wait for the garbage collector
        self._count_held()
        self._dispatch.put(job, [job.end(reason, error)], True)

    def _count_held(self) -> None:
        self.held = sum(page.kv_position for page in self.generator.pagetable.all_pages)

    # --- results of the generator -----------------------------------------------------------------------------------

    def _handle(self, job: ExllamaJob, result: Result) -> None:
        match result["stage"]:
            case "prefill":
                self._accept(job)
                if not job.output_tokens:  # else it has been requeued for pages and is read again
                    self._dispatch.put(job, [Progress(result["curr_progress"], job.prompt_tokens)])
            case "streaming":
                self._accept(job)
                self._stream(job, result)
            case "error":
                self._fail(job, result["error"])

    def _accept(self, job: ExllamaJob) -> None:
        """At the first result: how many tokens the pages already held is not known earlier."""
        if not job.accepted:
            job.accepted, job.cached_tokens = True, job.native.cached_pages * PAGE + job.native.cached_tokens
            self.reused += job.cached_tokens
            self.evaluated += job.prompt_tokens - job.cached_tokens
            self._dispatch.put(job, [Accepted(job.cached_tokens, job.cached_tokens)])

    def _stream(self, job: ExllamaJob, result: Result) -> None:
        if (tokens := _tokens(result)) is not None:
            # Urgent: the first token, and the last one before the job is requeued and read again.
            urgent = job.output_tokens == 0 or "requeue" in result
            job.count_output(len(tokens.ids))
            self._dispatch.put(job, [tokens], urgent=urgent)
        if not result["eos"]:
            return
        job.last_result = result
        if job.filter is not None and job.filter.error is not None:
            self._end(job, "error", job.filter.error)
        else:
            self._end(job, job.limit_reason if result["eos_reason"] == "max_new_tokens" else "stop")

    def _fail(self, job: ExllamaJob, error: Exception) -> None:
        """Ends one job, unless the GPU failed: after a CUDA error no result can be trusted."""
        if "CUDA error" in str(error):
            raise error
        log.error("ExLlamaV3 failed a job", exc_info=error)
        failure: ModelyardError = Internal("ExLlamaV3 could not answer")
        if "out of memory" in str(error).lower():
            failure = Unavailable("the GPU's memory is too small for this prompt right now")
        self._end(job, "error", failure)


class ExllamaModel:
    """The weights and the caches. ExLlamaV3 lays out the pages while it loads, so caches are created first."""

    def __init__(
        self,
        library: ExllamaLibrary,
        folder: Path,
        info: ExllamaModelInfo,
        spec: EngineSpec,
        dispatch: TokenDispatch,
        on_progress: Callable[[float], None],
    ) -> None:
        self.library, self._info = library, info
        self._options: ExllamaOptions = spec.options
        self.caches: dict[str, ExllamaCache] = {}
        exl, options = library.exl, self._options
        self._sampler = _notifying_sampler(exl.CustomSampler)
        config = exl.Config.from_directory(str(folder))
        self._model = exl.Model.from_config(config)
        self._tokenizer = exl.Tokenizer.from_config(config)
        try:
            tokens = cache_tokens(options, spec.caches)
            pages = {name: self._create_pages(name, info, tokens[name]) for name, info in spec.caches.items()}
            max_batch = max((batch_size(options, info) for info in spec.caches.values()), default=1)
            arguments = load_arguments(options, max_batch, tokens.values())
            self._load_weights(arguments, on_progress)
            if options.exllama_warmup and pages:  # before a generator owns the pages: it writes into them
                sizes = {name: arguments[name] for name in ("max_chunk_size", "max_batch_size")}
                self._model.warmup(cache=next(iter(pages.values())), **sizes)
            for name, cache in spec.caches.items():
                arguments = generator_arguments(options, cache, tokens[name])
                generator = exl.Generator(model=self._model, cache=pages[name], tokenizer=self._tokenizer, **arguments)
                self.caches[name] = ExllamaCache(generator, self.create_native_job, dispatch)
        except BaseException:
            self.close()
            raise

    def _create_pages(self, name: str, info: CacheInfo, tokens: int) -> Any:
        exl, bits = self.library.exl, cache_bits(name, info, self._options)
        layers: Arguments = {"layer_type": exl.CacheLayer_fp16}
        if bits is not None:
            layers = {"layer_type": exl.CacheLayer_quant, "k_bits": bits[0], "v_bits": bits[1]}
        jobs = batch_size(self._options, info)
        return exl.Cache(self._model, max_num_tokens=tokens, max_batch_size=jobs, **layers)

    def _load_weights(self, arguments: Arguments, on_progress: Callable[[float], None]) -> None:
        try:
            self._model.load(callback=lambda done, total: on_progress(done / max(1, total)), **arguments)
        except Exception as error:
            if "out of memory" in str(error).lower() or "insufficient vram" in str(error).lower():
                raise InvalidRequest(
                    f"the GPUs have too little free memory for this model: {error}. Lower n_ctx or parallel, "
                    "or set exllama_cache_quant",
                    code="model_too_large",
                ) from error
            raise

    def create_native_job(self, job: ExllamaJob, on_sampled: Callable[[], None]) -> Any:
        exl, torch = self.library.exl, self.library.torch
        stop_ids = self._info.eos_ids if job.filter is not None and job.filter.ends_job else ()
        return exl.Job(
            input_ids=torch.tensor([job.prompt.ids], dtype=torch.long),
            sampler=self._sampler(on_sampled, [self._sampler_step(*s) for s in sampler_steps(job.prompt.sampling)]),
            filters=[job.filter] if job.filter is not None else [],
            identifier=job,
            **job_arguments(job.prompt, job.max_output, self._options, stop_ids),
        )

    def _sampler_step(self, name: str, arguments: Arguments) -> Any:
        if (texts := arguments.get("dry_sequence_breakers")) is not None:
            ids = self.library.exl.dry_sequence_breaker_tokens(self._tokenizer, tuple(texts))
            arguments = arguments | {"dry_sequence_breakers": ids}
        return getattr(self.library.exl, name)(**arguments)

    def close(self) -> None:
        """Generators and pages form reference cycles: GPU memory is free only after a collection."""
        for cache in self.caches.values():
            cache.close()
        self._model.unload()
        self.caches = {}
        self._model = self._tokenizer = None
        gc.collect()
        self.library.torch.cuda.empty_cache()


def _notifying_sampler(base: Any) -> Any:
    """ExLlamaV3's sampler that reports when it has been launched: the last event of a step that we can observe."""

    class Sampler(base):  # type: ignore[misc]
        def __init__(self, on_sampled: Callable[[], None], steps: list[Any]) -> None:
            super().__init__(steps)
            self._on_sampled = on_sampled

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            token = super().forward(*args, **kwargs)
            self._on_sampled()
            return token

    return Sampler


def _tokens(result: Result) -> Tokens | None:
    """ExLlamaV3 holds tokens back while a character is incomplete. What it still holds at the end comes with the stop
    token, which is not part of the answer."""
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
    if (top_ids := part.get("top_k_tokens")) is None:
        return [IdLogprob(id, _log(prob)) for id, prob in zip(ids, probs, strict=False)]
    rows = zip(ids, probs, top_ids.tolist()[0], part["top_k_probs"].tolist()[0], strict=False)
    return [
        IdLogprob(id, _log(prob), tuple((int(i), _log(p)) for i, p in zip(best_ids, best_probs, strict=True)))
        for id, prob, best_ids, best_probs in rows
    ]


def _log(prob: float) -> float:
    return min(0.0, math.log(prob)) if prob > 0 else _MIN_LOGPROB


class ExllamaEngine(ThreadedEngine[ExllamaJob]):
    library = "ExLlamaV3"

    def __init__(self, spec: EngineSpec, load: Callable[[], ExllamaLibrary] = load_library) -> None:
        info = EngineInfo("exllamav3", dict(spec.caches), CAPABILITIES, device="cuda", page=PAGE)
        super().__init__(spec, info)
        self._load_library = load
        self._model: ExllamaModel | None = None
        self._caches: dict[str, ExllamaCache] = {}
        self._filters: GrammarFilters | None = None

    def __repr__(self) -> str:
        return f"<ExllamaEngine {self.spec.model}: {', '.join(map(repr, self._caches.values())) or 'not open'}>"

    # --- the event loop's side ----------------------------------------------------------------------------------------

    def _create_job(self, prompt: Prompt, cache: str, window: int) -> ExllamaJob:
        if prompt.adapters:
            raise Unsupported(
                "ExLlamaV3 would apply a LoRA adapter to all jobs at once: use a model with the adapter merged into it",
                code="lora_unsupported",
                param="lora_adapter",
            )
        job = ExllamaJob(prompt, self._loop, cache, window)
        if prompt.constraint is not None and self._filters is not None:
            job.preparing = self._filters.submit(partial(self._compile_filter, job, self._filters, prompt.constraint))
        return job

    def _compile_filter(self, job: ExllamaJob, filters: GrammarFilters, constraint: Constraint) -> None:
        if not job.cancelled:
            job.filter = filters.create(constraint)

    def stats(self) -> EngineStats:
        """Reads plain numbers only, while the thread runs."""
        caches = self._caches.values()
        return EngineStats(
            running=sum(len(cache.jobs) for cache in caches),
            sequences=self.info.capacity,
            occupied_tokens=sum(cache.held for cache in caches),
            reused_tokens=sum(cache.reused for cache in caches),
            evaluated_tokens=sum(cache.evaluated for cache in caches),
            caches={name: CacheStats(cache.reused, cache.evaluated) for name, cache in self._caches.items()},
        )

    async def control(self, op: Control) -> None:
        if op.op != "evict":
            raise self._unsupported_control(op)
        self._require_open()
        for name in [self._cache_name(op.cache)] if op.cache is not None else self._caches:
            await self.run_on_thread(self._caches[name].evict)

    def _release(self) -> None:
        filters, self._filters = self._filters, None
        if filters is not None:
            filters.close()

    # --- the thread's side --------------------------------------------------------------------------------------------

    def _load_model(self, report: Callable[[float], bool]) -> None:
        folder = find_folder(self.spec.options.path)
        info = read_model_info(folder)
        self.n_vocab = info.n_vocab
        warn_about_trained_length(self.spec, info.trained_length)

        def on_progress(fraction: float) -> None:
            if not report(fraction):
                raise Unavailable("the engine was closed")

        library = self._load_library()
        on_progress(0.0)
        self._model = ExllamaModel(library, folder, info, self.spec, self._dispatch, on_progress)
        self._caches = self._model.caches
        self._filters = GrammarFilters(folder, info, library.torch.from_numpy)

    def _unload_model(self) -> None:
        model, self._model = self._model, None
        if model is not None:
            model.close()

    def _has_work(self) -> bool:
        return any(cache.jobs for cache in self._caches.values())

    def _admit(self, job: ExllamaJob) -> None:
        self._caches[job.cache].admit(job)

    def _step(self) -> None:
        for cache in self._caches.values():
            if cache.jobs:
                cache.step()
        only_decodes = all(cache.only_decodes for cache in self._caches.values())
        self._dispatch.end_step(only_decodes and self._inbox.empty())

    def _finish_step(self) -> None:
        self._dispatch.flush()  # what has arrived may delay the next step

    def _fail_all(self, error: ModelyardError) -> None:
        for cache in self._caches.values():
            cache.fail_all(error)
