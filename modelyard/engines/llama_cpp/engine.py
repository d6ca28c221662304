"""llama.cpp in process: one model, several named caches, one thread that owns them all.

    generate ─→ inbox ─→ thread: admit ─→ step of each context with jobs (`context.py`) ─→ dispatch ─→ the job's queue

`ThreadedEngine` has the life cycle. Nothing but its thread touches a llama_context.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, cast

from msgspec.structs import replace

from modelyard.core.engine import (
    Control,
    Embeddings,
    EngineInfo,
    EngineSpec,
    EngineStats,
    Media,
    MovedKv,
    Prompt,
    TokenRun,
)
from modelyard.core.errors import (
    Conflict,
    ContextOverflow,
    InvalidRequest,
    ModelyardError,
    Overloaded,
    Unavailable,
    Unsupported,
)
from modelyard.engines.in_process import ThreadedEngine
from modelyard.engines.llama_cpp import adapters, loading
from modelyard.engines.llama_cpp.adapters import LoraAdapters, parse_adapter_argument
from modelyard.engines.llama_cpp.binding import ThreadPool, lib
from modelyard.engines.llama_cpp.context import LlamaContext
from modelyard.engines.llama_cpp.embedding import Embedder
from modelyard.engines.llama_cpp.estimate import max_outputs, require_mtp_layers, rows_per_stream
from modelyard.engines.llama_cpp.grammar_mask import GrammarMasks, token_piece
from modelyard.engines.llama_cpp.graph_sampler import MAX_SEQUENCES, GraphSampler
from modelyard.engines.llama_cpp.job import LlamaCppJob, ReasoningLimit
from modelyard.engines.llama_cpp.kv_snapshot import StoredKv
from modelyard.engines.llama_cpp.kv_store import KvStore, store_folder
from modelyard.engines.llama_cpp.media import MediaEncoder, Projector
from modelyard.engines.llama_cpp.media_tokens import text_ids
from modelyard.engines.llama_cpp.model_shape import ModelShape
from modelyard.engines.llama_cpp.mtp import HeadKind, MtpDrafter, MtpHead, own_head, require_head
from modelyard.engines.llama_cpp.options import CAPABILITIES, Options, context_layouts, model_capabilities
from modelyard.engines.llama_cpp.sampler import Sampler
from modelyard.engines.llama_cpp.sampler_chain import DrySamplers
from modelyard.engines.llama_cpp.sequence_manager import SequenceManager, share_caches
from modelyard.engines.llama_cpp.speculation import MIN_LIKELY, DraftModel, NgramDrafter, Speculator
from modelyard.engines.llama_cpp.threads import AdaptiveThreads
from modelyard.library import variants
from modelyard.library.architectures import may_share_batch
from modelyard.library.gguf import ModelPurpose, read_architecture
from modelyard.library.model_files import locate_model_file
from modelyard.plugins import MissingLibrary

log = logging.getLogger(__name__)


_MEDIA_READERS = 32
_FIT_SHARES = (1.0, 0.9, 0.75)  # of the free GPU memory: the estimate may be wrong


class LlamaCppEngine(ThreadedEngine[LlamaCppJob]):
    library = "llama.cpp"

    # Set when the model is loaded.
    _adapters: LoraAdapters
    _dry: DrySamplers
    _embedder: Embedder
    _masks: GrammarMasks
    _media_readers: ThreadPoolExecutor
    _thread_pool: ThreadPool
    _threads: AdaptiveThreads

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec, EngineInfo("llama_cpp", dict(spec.caches), CAPABILITIES))  # completed when it is loaded
        self._job_count = 0
        self._model: Any = None
        self._vocab: Any = None
        self._resources = ExitStack()  # frees what was loaded, in reverse order
        self._contexts: list[LlamaContext] = []
        self._caches: dict[str, SequenceManager] = {}
        self._draft_model: DraftModel | None = None
        self._kv_store: KvStore | None = None
        self._projector: Projector | None = None

    # --- loading and unloading, on the thread -------------------------------------------------------------------------

    def _load_model(self, report: Callable[[float], bool]) -> None:
        path = locate_model_file(self.spec.options.path)
        shape = loading.check_before_loading(path, self.spec)
        loading.set_numa(self.spec.options.numa)
        configured = self.spec
        for share in _FIT_SHARES if configured.options.fit else (1.0,):
            try:
                self.spec = loading.prepare_spec(configured, shape, share)
                before = loading.free_memory(configured.options).gpus if configured.options.fit else {}
                self._load_prepared(path, shape, report)
                loading.check_fit(self.spec, before)
                return
            except InvalidRequest as error:
                if not configured.options.fit or share == _FIT_SHARES[-1] or self._stop_error is not None:
                    raise
                log.warning("%r did not fit (%s): trying with less", configured.model, error.message)
                self._unload_model()

    def _load_prepared(self, path: Path, shape: ModelShape | None, report: Callable[[float], bool]) -> None:
        options: Options = self.spec.options
        purpose = shape.purpose if shape is not None else ModelPurpose()
        capabilities = model_capabilities(purpose, options)
        self.info = replace(self.info, caches=dict(self.spec.caches), capabilities=capabilities)
        defer = self._resources.callback
        if options.speculation == "mtp":
            require_head("mtp")
            if shape is not None and options.draft_model_path is None:
                require_mtp_layers(shape)
        self._model = loading.load_model(path, options, report)
        defer(lib.llama_model_free, self._model)
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.n_vocab = lib.llama_vocab_n_tokens(self._vocab)
        most = loading.max_threads(self.spec)
        self._thread_pool, self._threads = ThreadPool(most), AdaptiveThreads(most)
        defer(self._thread_pool.close)
        attach = self._thread_pool.attach
        if capabilities.generates:
            self._projector = self._load_projector(path, options)
        if self._projector is not None:
            defer(self._projector.close)
            modalities = ("text", *self._projector.kinds)
            self.info = replace(self.info, capabilities=replace(capabilities, modalities=modalities))
        self._embedder = Embedder(self._model, self.spec, shape, self.run_on_thread, attach)
        defer(self._embedder.close)
        self._adapters = LoraAdapters(self._model, path, options.lora)
        self._masks = GrammarMasks(self._vocab, self.n_vocab)
        self._dry = DrySamplers(self._vocab)
        defer(self._dry.close)
        defer(self._masks.close)
        self._media_readers = ThreadPoolExecutor(_MEDIA_READERS, "media-reader")  # wait for the sandbox, or read KV
        defer(partial(self._media_readers.shutdown, cancel_futures=True))
        if capabilities.generates:
            self._create_caches(options, path, shape)

    def _load_projector(self, path: Path, options: Options) -> Projector | None:
        """One that merely lies beside the model may belong to another model: then this one reads text."""
        if (file := variants.locate_projector(options.mmproj, path)) is None:
            return None
        try:
            threads, gpu = loading.max_threads(self.spec), loading.encodes_on_gpu(options)
            return Projector(file, self._model, options, threads, gpu=gpu)
        except (ModelyardError, MissingLibrary) as error:
            if options.mmproj is not None:
                raise
            log.warning("%r takes no images or audio: %s", self.spec.model, error)
            return None

    def _create_caches(self, options: Options, path: Path, shape: ModelShape | None) -> None:
        defer, attach = self._resources.callback, self._thread_pool.attach
        if options.uses_draft_model:
            self._draft_model = DraftModel(options, self._model, shape, attach, lambda _: self._stop_error is None)
            defer(self._draft_model.close)
        head = None if self._draft_model is None else self._draft_model.head
        if options.speculation == "mtp" and head is None:
            head = own_head(self._model)
        vectors = adapters.load_control_vectors(options, self._model)
        in_graph, sampled = loading.samples_in_graph(self._model, options), rows_per_stream(options)
        for layout in context_layouts(self.spec.caches, options):
            name, outputs = ", ".join(layout.caches), max_outputs(layout.info, options)
            raw = loading.create_context(self._model, name, layout.info, options, outputs, sampled if in_graph else 1)
            attach(raw)
            context = LlamaContext(raw, layout, self.n_vocab, self._dispatch, self._adapters, options)
            defer(context.close)
            if vectors is not None:
                vectors.apply(raw)
            self._contexts.append(context)
            context.threads = self._threads if loading.may_vary_threads(layout.info, options) else None
            context.shares_batch = may_share_batch(read_architecture(path))
            if not context.shares_batch and layout.info.parallel > 1:
                log.warning(
                    "%r: llama.cpp was not seen to compute several sequences of this architecture in one batch as "
                    "it does one, so each has its own",
                    self.spec.model,
                )
            context.speculator = self._create_speculator(context, raw, head)
            if in_graph and (sequences := layout.info.parallel) <= MAX_SEQUENCES:
                has_memory = partial(loading.has_memory_left, options)
                context.graph_sampler = GraphSampler(raw, sequences, accepts=sampled > 1, has_memory=has_memory)
        if self._projector is not None:
            encoder = MediaEncoder(self._projector, options.media_cache_mb << 20, self.wake)
            defer(encoder.close)
            for context in self._contexts:
                context.encoder = encoder
        for context in self._contexts:
            context.neighbours = [other for other in self._contexts if other is not context]
        created = {name: cache for context in self._contexts for name, cache in context.caches.items()}
        self._caches = {name: created[name] for name in self.spec.caches}
        if options.share_across_caches:
            share_caches(list(self._caches.values()))
        if (folder := store_folder(options)) is not None:
            self._kv_store = KvStore(folder, self.spec, path, self._adapters, self._caches.values())
            self._kv_store.restore_all(self._caches.values(), lambda: self._stop_error is None)

    def _create_speculator(self, context: LlamaContext, raw: Any, head: HeadKind | None) -> Speculator | None:
        options: Options = self.spec.options
        if options.speculation == "off":
            return None
        name, info = ", ".join(context.caches), context.layout.info
        if not context.kv.can_take_back:
            if options.speculation != "auto":
                log.warning("the model %r cannot rewind: no speculation in the cache %r", self.spec.model, name)
            return None
        draft_model = self._draft_model
        if head is not None:
            model = self._model if draft_model is None else draft_model.raw
            return self._create_head(context, raw, name, model, head)
        drafter = NgramDrafter() if draft_model is None else draft_model.create_drafter(name, info)
        return Speculator(drafter, options.max_draft, info.window, measured=options.speculation == "auto")

    def _create_head(self, context: LlamaContext, raw: Any, name: str, model: Any, kind: HeadKind) -> Speculator:
        info, options = context.layout.info, self.spec.options
        head = MtpHead(raw, model, name, info, options, kind)
        self._thread_pool.attach(head.context)
        context.head = head
        context.kv.attach(head, kind.mark)
        most = options.max_draft if kind.layers == 1 else min(options.max_draft, kind.layers)
        least = (
            options.draft_p_min if options.draft_p_min is not None else 0.0 if loading.uses_gpu(options) else MIN_LIKELY
        )
        return Speculator(MtpDrafter(head, least), most, info.window, measured=True)

    def _after_shutdown(self) -> None:
        """The engine closes even if saving fails."""
        try:
            if self._kv_store is not None:
                self._kv_store.save_all(self._caches.values())
        except Exception:
            log.exception("the KV of %r was not saved", self.spec.model)

    def _unload_model(self) -> None:
        self._model, self._vocab, self._caches, self._contexts = None, None, {}, []
        self._projector = None
        self._resources.close()

    # --- the event loop's side ----------------------------------------------------------------------------------------

    def _create_job(self, prompt: Prompt, cache: str, window: int) -> LlamaCppJob:
        if prompt.has_media and prompt.prompt_logprobs is not None and prompt.logprobs_last is None:
            raise Unsupported("the tokens of images have no log probabilities", code="prompt_logprobs_unsupported")
        if prompt.has_media and not isinstance(prompt.parts[-1], TokenRun):
            raise InvalidRequest("a prompt cannot end with an image or audio", code="invalid_image")
        self._job_count += 1
        job = LlamaCppJob(prompt, self._loop, cache, window, self._job_count)
        if prompt.constraint is not None or prompt.sampling.dry_multiplier or prompt.has_media:
            with suppress(RuntimeError):  # the engine died meanwhile; its inbox rejects the job
                if prompt.has_media:
                    job.preparing = self._media_readers.submit(copy_context().run, self._prepare_media, job, window)
                else:
                    job.preparing = self._masks.submit(partial(self._prepare, job, window))
        elif (leaf := self._caches[cache].stored_leaf(job)) is not None:
            with suppress(RuntimeError):
                job.preparing = self._media_readers.submit(self._read_stored, job, leaf)
        return job

    def _prepare_media(self, job: LlamaCppJob, window: int) -> None:
        """On a thread of its own: a slow image of one key delays nobody's grammar and no other image."""
        if not job.cancelled:
            self._read_media(job, window)
        self._masks.submit(partial(self._prepare, job, window)).result()

    def _prepare(self, job: LlamaCppJob, window: int) -> None:
        if job.cancelled:
            return
        self._dry.prepare(job.prompt.sampling, window)
        if job.prompt.constraint is not None:
            job.mask = self._masks.create(job.prompt.constraint)

    def _read_stored(self, job: LlamaCppJob, leaf: StoredKv) -> None:
        if not job.cancelled and self._kv_store is not None:
            job.stored = (leaf, self._kv_store.fetch(self._caches[job.cache], leaf))

    def _read_media(self, job: LlamaCppJob, window: int) -> None:
        if self._projector is None:
            raise Unavailable("the engine was closed")
        prompt = self._projector.read(job.prompt.parts)
        if len(prompt.ids) >= window:
            raise ContextOverflow(len(prompt.ids), window)
        most = self.spec.options.for_cache(self.spec.caches[job.cache]).n_ubatch
        if (needed := max((c.tokens for c in prompt.chunks if not c.is_causal), default=0)) > most:
            raise InvalidRequest(
                f"an image has {needed} tokens, which this model reads at once: set n_ubatch to {needed} or more",
                code="n_ubatch_too_small",
            )
        job.on_cancel = self.wake
        job.read_media(prompt)
        job.limit_output(window)

    async def count_media(self, media: Sequence[Media]) -> list[int]:
        """How many tokens each of them takes."""
        self._require_open()
        if (projector := self._projector) is None:
            raise Unsupported("this model takes text only", code="modality_unsupported")
        return await asyncio.to_thread(lambda: [projector.count(each) for each in media])

    def stats(self) -> EngineStats:
        caches = list(self._caches.values())
        return EngineStats(
            running=sum(cache.running for cache in caches),
            sequences=sum(len(cache.slots) for cache in caches),
            occupied_tokens=sum(len(slot.tokens) for cache in caches for slot in cache.slots),
            reused_tokens=sum(cache.reused for cache in caches),
            copied_tokens=sum(cache.copied for cache in caches),
            restored_tokens=sum(cache.restored for cache in caches),
            evaluated_tokens=sum(cache.evaluated for cache in caches),
            guessed_tokens=sum(cache.guessed for cache in caches),
            accepted_tokens=sum(cache.accepted for cache in caches),
            caches={cache.name: cache.stats() for cache in caches},
            adapters=self._adapters.scales(),
        )

    async def control(self, op: Control) -> MovedKv | None:
        self._require_open()
        if op.op == "load_adapter":
            name, lora = parse_adapter_argument(op.argument)
            await self.run_on_thread(partial(self._adapters.load, name, lora))
            return None
        if op.op == "unload_adapter":
            await self.run_on_thread(partial(self._unload_adapter, op.argument or ""))
            return None
        if op.op in ("save_slot", "restore_slot", "erase_slot"):
            return await self._control_slot(op)
        names = list(self._caches) if op.cache is None else [self._cache_name(op.cache)]
        caches = [self._caches[name] for name in names if name in self._caches]  # a model that embeds has none
        if op.op == "evict":
            for cache in caches:
                await self.run_on_thread(cache.evict)
            return None
        store = self._require_store(op)
        for cache in caches:
            await (store.save if op.op == "save" else store.restore)(cache, self.run_on_thread)
        return None

    async def _control_slot(self, op: Control) -> MovedKv:
        if (cache := self._caches.get(self._cache_name(op.cache or ""))) is None:
            raise Unsupported("this model does not generate", code="model_has_no_chat")
        if op.op == "erase_slot":
            return cast("MovedKv", await self.run_on_thread(partial(cache.erase, op.slot, op.scope)))
        store = self._require_store(op)
        change = store.save_slot if op.op == "save_slot" else store.restore_slot
        return await change(cache, op.slot, op.scope, op.argument or "", self.run_on_thread)

    def _require_store(self, op: Control) -> KvStore:
        if self._kv_store is None:
            raise InvalidRequest(f"{op.op!r} needs kv_store in the model's options", code="kv_store_unset")
        return self._kv_store

    async def embed(self, batch: Sequence[Sequence[int]]) -> Embeddings:
        self._require_open()
        if not (self.info.capabilities.embeddings or self.info.capabilities.rerank):
            raise Unsupported("this model makes no embeddings", code="embeddings_unsupported")
        return await self._embedder.embed(batch)

    # --- the thread's side --------------------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        return any(context.has_work for context in self._contexts)

    def _step(self) -> None:
        for context in self._contexts:
            if context.jobs or context.has_work:
                context.step()
        self._dispatch.flush()

    def _finish_step(self) -> None:
        for context in self._contexts:
            context.flush()

    def _idle_work(self) -> bool:
        return any(cache.park_ahead() for cache in self._caches.values())

    def _admit(self, job: LlamaCppJob) -> None:
        cache = self._caches[job.cache]
        self._adapters.check(job.prompt.adapters)
        if cache.running >= cache.info.parallel:
            raise Overloaded(f"the cache {cache.name!r} has no free sequence")
        if job.stored is not None:
            (leaf, snapshot), job.stored = job.stored, None
            # An adapter may have been unloaded since the file was read.
            fits = snapshot is not None and self._adapters.versions(snapshot.adapters) == snapshot.adapter_versions
            cache.fetch_stored(leaf, snapshot if fits else None)
        job.sampler = Sampler(job.prompt.sampling, self._dry, self.n_vocab, cache.info.window, text_ids(job.ids))
        if job.prompt.post_sampling and (job.sampler.kind == "chain" or job.mask is not None):
            job.sampler.close()
            raise Unsupported(
                "post_sampling_probs: not with a grammar, and with penalties, top_k, top_p, min_p and temperature only",
                param="post_sampling_probs",
            )
        if job.prompt.reasoning is not None:
            job.reasoning = ReasoningLimit(job.prompt.reasoning, partial(token_piece, self._vocab))
        next(context for context in self._contexts if job.cache in context.caches).admit(job)

    def _unload_adapter(self, name: str) -> None:
        self._adapters.check(((name, 1.0),))
        if any(context.uses_adapter(name) for context in self._contexts):
            raise Conflict(f"the adapter {name!r} is in use; unload it when its answers have ended")
        for context in self._contexts:
            context.drop_adapter(name)
        self._adapters.unload(name)

    def _fail_all(self, error: ModelyardError) -> None:
        for context in self._contexts:
            context.fail_all(error)
