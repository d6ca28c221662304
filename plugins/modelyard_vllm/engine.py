"""vLLM in process: its AsyncLLM runs in a separate thread; token ids go in, deltas come out.

    generate ─→ VllmJob ─→ AsyncLlmRunner on vLLM's loop: one task per job reads `AsyncLLM.generate`
                        ─→ TokenDispatch: one wake-up of the gateway's loop per step ─→ GenerationQueue

vLLM has one KV cache for all named caches. A salt in every prompt keeps them apart, and the scopes of one cache.
Evicting a cache changes its salt; vLLM drops the old blocks when it needs room.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from modelyard.core.engine import (
    CacheStats,
    Capabilities,
    Control,
    EngineInfo,
    EngineSpec,
    EngineStats,
    OnProgress,
    Prompt,
)
from modelyard.core.errors import ModelyardError, Unavailable
from modelyard.engines.generation_queue import TokenDispatch
from modelyard.engines.in_process import InProcessEngine
from modelyard_vllm.async_llm import AsyncLlmRunner, CacheCounters, EventLoopThread, VllmJob, load_library
from modelyard_vllm.model_folder import (
    check_weights,
    find_folder,
    read_config,
    require_folder,
    resolve_companions,
)
from modelyard_vllm.options import VllmOptions, engine_arguments
from modelyard_vllm.request import (
    IGNORED,
    STRUCTURED_OUTPUTS_CONFIG,
    VllmAdapters,
    VllmRequest,
    sampling_arguments,
    structured_output_arguments,
)

_MODALITIES = ("text", "image")
_BLOCK = 16  # tokens per KV block, vLLM's default


class VllmEngine(InProcessEngine[VllmJob]):
    library = "vLLM"

    def __init__(self, spec: EngineSpec) -> None:
        self.options: VllmOptions = spec.options
        self._adapters = VllmAdapters(self.options.lora)
        capabilities = Capabilities(
            modalities=tuple(each for each in spec.modalities if each in _MODALITIES),
            structured=True,
            logprobs=True,
            lora=self._adapters.enabled,
            ignored=IGNORED,
        )
        super().__init__(spec, EngineInfo("vllm", dict(spec.caches), capabilities, page=_BLOCK))
        self._thread = EventLoopThread(f"vllm:{spec.model}")
        self._runner: AsyncLlmRunner | None = None
        self._job_numbers = itertools.count()
        self._evictions = dict.fromkeys(spec.caches, 0)
        self._counters = {name: CacheCounters() for name in spec.caches}
        self._speculation = SpeculationCounters()

    def __repr__(self) -> str:
        return f"<VllmEngine {self.spec.model}: {len(self._running())} running>"

    # --- opening and closing ------------------------------------------------------------------------------------------

    async def _load(self, progress: OnProgress) -> None:
        model = self._checked_model()
        progress(0.0, "importing vLLM")
        self._thread.start()
        library = await asyncio.to_thread(load_library)
        progress(0.1, "loading weights")
        self._runner = runner = AsyncLlmRunner(library, TokenDispatch(self._loop), self._counters, self._on_lost)
        stat_loggers = [self._speculation.create_logger] if self.options.speculates else []
        await self._thread.run(runner.start(self._engine_arguments(model), stat_loggers))
        self.n_vocab = runner.n_vocab

    def _checked_model(self) -> str:
        """A local model is checked here: vLLM reports a missing file as a missing name on the hub."""
        name = self.options.model_name
        folder = require_folder(name) if name.startswith(("/", "~", ".")) else find_folder(name)
        if folder is None:
            return name
        read_config(folder)
        check_weights(folder)
        return str(folder)

    def _engine_arguments(self, model: str) -> dict[str, Any]:
        """`vllm_engine_args` take precedence over ours."""
        ours = {
            "structured_outputs_config": STRUCTURED_OUTPUTS_CONFIG,
            "scheduling_policy": "priority",
            "disable_log_stats": not self.options.speculates,
        }
        return ours | engine_arguments(resolve_companions(self.options), self.spec.caches, model)

    def _on_lost(self, error: ModelyardError) -> None:
        """On vLLM's loop."""
        self._loop.call_soon_threadsafe(self._report_lost, error)

    async def _shut_down(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await self._thread.run(runner.shut_down(self._stop_error or Unavailable("the engine was closed")))
        await self._thread.stop()

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def _create_job(self, prompt: Prompt, cache: str, window: int) -> VllmJob:
        control_tokens, constraint = self._open_runner().control_tokens, prompt.constraint
        id = f"{self.spec.model}-{next(self._job_numbers)}"
        job = VllmJob(id, prompt, self._loop, cache, window, self._on_cancel)
        job.request = VllmRequest(
            {"prompt_token_ids": prompt.ids, "cache_salt": f"{cache}/{self._evictions[cache]}/{prompt.scope}"},
            sampling_arguments(prompt, job.max_output, self.n_vocab),
            None if constraint is None else structured_output_arguments(constraint, control_tokens),
            self._adapters.select(prompt.adapters),
        )
        return job

    def _submit(self, job: VllmJob) -> None:
        runner = self._open_runner()
        runner.running.add(job)
        self._thread.call(runner.start_job, job)

    def _open_runner(self) -> AsyncLlmRunner:
        self._require_open()
        if self._runner is None:
            raise Unavailable("the engine is not open")
        return self._runner

    def _on_cancel(self, job: VllmJob) -> None:
        """From any thread."""
        if (runner := self._runner) is not None:
            self._thread.call(runner.cancel_job, job)

    def _running(self) -> list[VllmJob]:
        """A copy: vLLM's thread removes jobs."""
        return [] if self._runner is None else list(self._runner.running)

    # --- the rest of the interface ------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        running, counters = self._running(), self._counters.values()
        return EngineStats(
            running=len(running),
            sequences=self.info.capacity,
            occupied_tokens=sum(job.prompt_tokens + job.output_tokens for job in running),
            reused_tokens=sum(each.reused for each in counters),
            evaluated_tokens=sum(each.evaluated for each in counters),
            guessed_tokens=self._speculation.guessed,
            accepted_tokens=self._speculation.accepted,
            caches={name: CacheStats(each.reused, each.evaluated) for name, each in self._counters.items()},
        )

    async def control(self, op: Control) -> None:
        if op.op == "evict":
            for name in [self._cache_name(op.cache)] if op.cache is not None else self._evictions:
                self._evictions[name] += 1
        elif op.op == "load_adapter":
            self._adapters.load(op.argument)
        elif op.op == "unload_adapter":
            runner = self._open_runner()
            await self._thread.run(runner.remove_adapter(self._adapters.unload(op.argument)))
        else:
            raise self._unsupported_control(op)


class SpeculationCounters:
    """vLLM reports speculation to its statistics loggers only, so this implements one."""

    def __init__(self) -> None:
        self.guessed = self.accepted = 0

    def create_logger(self, vllm_config: Any, engine_index: int = 0) -> SpeculationCounters:
        del vllm_config, engine_index
        return self

    def record(self, scheduler_stats: Any = None, iteration_stats: Any = None, *_: Any, **more: Any) -> None:
        del iteration_stats, more
        stats = getattr(scheduler_stats, "spec_decoding_stats", None)
        if stats is not None:
            self.guessed += stats.num_draft_tokens
            self.accepted += stats.num_accepted_tokens

    def log_engine_initialized(self) -> None: ...

    def log(self) -> None: ...

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        del is_awake, level
