"""vLLM in process: its AsyncLLM lives in a thread of its own, token ids go in, deltas come out.

    generate ─→ Job ─→ Core, on vLLM's loop: a task a job reads `AsyncLLM.generate` ─→ one wake-up a step ─→ mailboxes

Caches are one KV cache in vLLM. What keeps them apart is a salt for each in every prompt; evicting one is giving it
another salt, and vLLM throws the old blocks away when it needs room.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import Any

from modelyard.core.engine import (
    Accepted,
    CacheStats,
    Capabilities,
    Chunk,
    Control,
    End,
    EngineInfo,
    EngineSpec,
    EngineStats,
    Generation,
    OnProgress,
    Prompt,
)
from modelyard.core.errors import ContextOverflow, InvalidRequest, ModelyardError, NotFound, Unavailable, Unsupported
from modelyard.engines.vllm import async_llm, model_folder
from modelyard.engines.vllm.async_llm import AsyncLlmRunner, EventLoopThread, Parcel, VllmJob, VllmRequest
from modelyard.engines.vllm.options import VllmOptions, engine_arguments
from modelyard.engines.vllm.request import (
    IGNORED,
    STRUCTURED_OUTPUTS_CONFIG,
    LoraAdapters,
    sampling_arguments,
    structured_output_arguments,
)

# What a cache has saved, and what speculation has brought: counted as vLLM tells it.


class CacheCounters:
    """Prompt tokens of one cache: `reused` had been read before."""

    def __init__(self) -> None:
        self.reused = self.evaluated = 0

    def read(self, tokens: int, cached: int) -> None:
        self.reused += cached
        self.evaluated += tokens - cached


class SpeculationCounters:
    """vLLM tells of guesses to those who log its statistics, so this poses as such a logger."""

    def __init__(self) -> None:
        self.guessed = self.accepted = 0

    def logger(self, vllm_config: Any, engine_index: int = 0) -> SpeculationCounters:
        del vllm_config, engine_index
        return self

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **more: Any) -> None:
        del iteration_stats, more
        told = getattr(scheduler_stats, "spec_decoding_stats", None)
        if told is not None:
            self.guessed += told.num_draft_tokens
            self.accepted += told.num_accepted_tokens

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        del is_awake, level


_MODALITIES = ("text", "image")
_BLOCK = 16  # tokens that vLLM keeps and finds again at a time, unless it is told otherwise
_SWITCH_S = 0.0005  # vLLM's thread waits this long at most for a busy gateway to let go of the GIL


class VllmEngine:
    def __init__(self, spec: EngineSpec) -> None:
        self.options: VllmOptions = spec.options
        self._spec = spec
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[ModelyardError] = self._loop.create_future()
        self._adapters = LoraAdapters(self.options.lora)
        self.info = EngineInfo("vllm", dict(spec.caches), self._capabilities(), page=_BLOCK)
        self._home = EventLoopThread(f"vllm:{spec.model}")
        self._core: AsyncLlmRunner | None = None
        self._opening: asyncio.Task[None] | None = None
        self._is_open = False
        self._over: ModelyardError | None = None  # why nothing can run here any more
        self._numbers = itertools.count()
        self._evictions = dict.fromkeys(spec.caches, 0)
        self._jobs: set[VllmJob] = set()
        self._tallies = {name: CacheCounters() for name in spec.caches}
        self._speculation = SpeculationCounters()

    def __repr__(self) -> str:
        return f"<VllmEngine {self._spec.model}: {len(self._jobs)} running>"

    def _capabilities(self) -> Capabilities:
        return Capabilities(
            modalities=tuple(each for each in self._spec.modalities if each in _MODALITIES),
            structured=True,
            logprobs=True,
            lora=self._adapters.enabled,
            ignored=IGNORED,
        )

    # --- life -------------------------------------------------------------------------------------------------------

    async def open(self, progress: OnProgress) -> None:
        where = self._where()
        progress(0.0, "importing vLLM")
        # A task of its own: whoever stops waiting for it leaves work behind that `close` has to wait for.
        self._opening = asyncio.create_task(self._open(where, progress))
        await asyncio.shield(self._opening)
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
        progress(1.0, "loading weights")

    def _where(self) -> str:
        """A model that lies here is checked here: in vLLM's words a missing file is a missing name on the hub."""
        name = self.options.model_name
        found = (
            model_folder.require_folder(name) if name.startswith(("/", "~", ".")) else model_folder.find_folder(name)
        )
        if found is None:
            return name
        model_folder.read_folder_config(found)
        model_folder.check_weights(found)
        return str(found)

    async def _open(self, where: str, progress: OnProgress) -> None:
        self._home.start()
        lib = await asyncio.to_thread(async_llm.load_library)
        progress(0.1, "loading weights")
        self._core = core = AsyncLlmRunner(lib, self._loop.call_soon_threadsafe, self._hand_out, self._lose)
        loggers = [self._speculation.logger] if self.options.speculates else []
        await self._home.ask(core.make(self._arguments(where), loggers))
        self._is_open = True

    def _arguments(self, where: str) -> dict[str, Any]:
        """Ours first: whoever sets them in vllm_engine_args has the last word."""
        ours = {
            "structured_outputs_config": STRUCTURED_OUTPUTS_CONFIG,
            "scheduling_policy": "priority",
            "disable_log_stats": not self.options.speculates,
        }
        return ours | engine_arguments(model_folder.resolve_companions(self.options), self._spec.caches, where)

    async def close(self) -> None:
        """Idempotent."""
        self._over = self._over or Unavailable("the engine was closed")
        self._is_open = False
        if self._opening is not None:
            await asyncio.wait({self._opening})  # not `gather`, which would be cut off with whoever waits here
            if not self._opening.cancelled():
                self._opening.exception()  # seen: whoever opened it was told
        core, self._core = self._core, None
        if core is not None:
            await self._home.ask(core.shut(self._over))
            await asyncio.sleep(0)  # the last parcels are on their way
        await self._home.end()

    def _lose(self, why: ModelyardError) -> None:
        self._over = self._over or why
        if not self.lost.done():
            self.lost.set_result(why)

    # --- jobs -------------------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt) -> Generation[Chunk]:
        job = VllmJob(f"{self._spec.model}-{next(self._numbers)}", prompt, self._loop, self._on_cancel)
        try:
            core = self._there()
            asked = self._asked(job, core)
        except ModelyardError as error:
            job.queue.put_many([job.end("error", error)], last=True)
        else:
            self._jobs.add(job)
            self._home.call(core.start, job, asked)
        return job.queue

    def _there(self) -> AsyncLlmRunner:
        if self._over is not None:
            raise self._over
        if self._core is None or not self._is_open:
            raise Unavailable("the engine is not open")
        return self._core

    def _asked(self, job: VllmJob, core: AsyncLlmRunner) -> VllmRequest:
        prompt = job.prompt
        job.cache = self._cache_name(prompt.cache)
        cache = self._spec.caches[job.cache]
        if job.prompt_tokens >= cache.window:
            raise ContextOverflow(job.prompt_tokens, cache.window)
        self._check(job, core.n_vocab)
        job.fit(cache)
        return VllmRequest(
            {"prompt_token_ids": job.ids, "cache_salt": f"{job.cache}/{self._evictions[job.cache]}"},
            sampling_arguments(prompt, job.most, core.n_vocab),
            None if prompt.constraint is None else structured_output_arguments(prompt.constraint, core.markers),
            self._adapters.worn(prompt.adapters),
        )

    def _check(self, job: VllmJob, n_vocab: int) -> None:
        if job.media and "image" not in self.info.capabilities.modalities:
            raise Unsupported("this model reads text only", code="modality_unsupported")
        if not job.ids:
            raise InvalidRequest("the prompt is empty")
        if min(job.ids) < 0 or max(job.ids) >= n_vocab:
            raise InvalidRequest(f"the prompt holds token ids outside 0…{n_vocab - 1}")

    def _cache_name(self, name: str) -> str:
        """A prompt that names none goes to the first."""
        known = self._spec.caches
        name = name or next(iter(known), "")
        if name not in known:
            raise NotFound(f"the engine has no cache {name!r}; it has {', '.join(known)}")
        return name

    def _on_cancel(self, job: VllmJob) -> None:
        """From any thread."""
        if (core := self._core) is not None:
            self._home.call(core.cancel, job)

    def _hand_out(self, parcels: list[Parcel]) -> None:
        for job, chunks in parcels:
            first, last = chunks[0], isinstance(chunks[-1], End)
            if isinstance(first, Accepted):
                self._tallies[job.cache].read(job.prompt_tokens, first.cached_tokens)
            if last:
                self._jobs.discard(job)
            job.queue.put_many(chunks, last=last)

    # --- the rest ---------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        tallies = self._tallies.values()
        return EngineStats(
            running=len(self._jobs),
            sequences=self.info.capacity,
            occupied_tokens=sum(job.prompt_tokens + job.said for job in self._jobs),
            reused_tokens=sum(tally.reused for tally in tallies),
            evaluated_tokens=sum(tally.evaluated for tally in tallies),
            guessed_tokens=self._speculation.guessed,
            accepted_tokens=self._speculation.accepted,
            caches={name: CacheStats(tally.reused, tally.evaluated) for name, tally in self._tallies.items()},
        )

    async def control(self, op: Control) -> None:
        if op.op == "evict":
            for name in [self._cache_name(op.cache)] if op.cache is not None else self._evictions:
                self._evictions[name] += 1
        elif op.op == "load_adapter":
            self._adapters.load(op.argument)
        elif op.op == "unload_adapter":
            await self._home.ask(self._there().forget(self._adapters.unload(op.argument)))
        else:
            raise InvalidRequest(f"{op.op} is not a thing that vLLM can do", code="unsupported_control")
