"""ExLlamaV3 in process: one model, several named caches, one thread that owns them all.

In each step the generator of every cache that has jobs runs once, in turn. Tokens of a step reach the event loop while
the GPU computes the next one (`token_dispatch`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from modelyard.core.engine import Control, EngineInfo, EngineSpec, EngineStats, Prompt
from modelyard.core.errors import ModelyardError, Unavailable, Unsupported
from modelyard.engines.exllamav3.arguments import CAPABILITIES
from modelyard.engines.exllamav3.grammar_filter import GrammarFilters
from modelyard.engines.exllamav3.model import ExllamaCache, ExllamaJob, ExllamaLibrary, ExllamaModel, load_library
from modelyard.engines.exllamav3.model_folder import find_folder, read_model_info
from modelyard.engines.exllamav3.options import PAGE
from modelyard.engines.in_process import ThreadedEngine


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

    def _create_job(self, prompt: Prompt) -> ExllamaJob:
        return ExllamaJob(prompt, self._loop)

    def _check_support(self, prompt: Prompt) -> None:
        super()._check_support(prompt)
        if prompt.adapters:
            raise Unsupported(
                "ExLlamaV3 would apply a LoRA adapter to all jobs at once: use a model with the adapter merged into it",
                code="lora_unsupported",
                param="lora_adapter",
            )

    def _prepare(self, job: ExllamaJob) -> Future[None] | None:
        constraint, filters = job.prompt.constraint, self._filters
        if constraint is None or filters is None:
            return None

        def compile_filter() -> None:
            job.filter = filters.create(constraint)

        return filters.submit(compile_filter)

    def stats(self) -> EngineStats:
        caches = self._caches.values()
        return EngineStats(
            running=sum(len(cache.jobs) for cache in caches),
            sequences=self.info.capacity,
            occupied_tokens=sum(cache.held for cache in caches),
            reused_tokens=sum(cache.reused for cache in caches),
            evaluated_tokens=sum(cache.evaluated for cache in caches),
            caches={name: cache.stats() for name, cache in self._caches.items()},
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
        self._warn_about_trained_length(info.trained_length)

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
