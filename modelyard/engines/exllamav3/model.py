"""The loaded model: its weights, a generator for each cache, and ExLlamaV3's own objects for a job. Thread only."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelyard.core.engine import CacheInfo, EngineSpec
from modelyard.core.errors import InvalidRequest
from modelyard.engines.exllamav3 import call
from modelyard.engines.exllamav3.call import Call
from modelyard.engines.exllamav3.folder import Shape
from modelyard.engines.exllamav3.job import Job
from modelyard.engines.exllamav3.lane import Deed, Lane
from modelyard.engines.exllamav3.library import Library
from modelyard.engines.exllamav3.options import Options
from modelyard.engines.token_dispatch import TokenDispatch


class Loaded:
    """Caches are made before the weights are loaded: that is when their pages are laid out on the GPUs."""

    def __init__(
        self,
        library: Library,
        where: Path,
        shape: Shape,
        spec: EngineSpec,
        dispatch: TokenDispatch,
        tell: Callable[[float], None],
    ) -> None:
        self._library, self._shape = library, shape
        self._options: Options = spec.options
        self.lanes: dict[str, Lane] = {}
        self._sampler = _telling(library.exl.CustomSampler)
        exl, options = library.exl, self._options
        config = exl.Config.from_directory(str(where))
        self._raw = exl.Model.from_config(config)
        self._tokenizer = exl.Tokenizer.from_config(config)
        try:
            tokens = call.cache_tokens(options, spec.caches)
            caches = {name: self._cache(name, info, tokens[name]) for name, info in spec.caches.items()}
            most = max((call.batch(options, info) for info in spec.caches.values()), default=1)
            called = call.load_arguments(options, most, tokens.values())
            self._load(called, tell)
            self._warm_up(list(caches.values()), called)
            for name, info in spec.caches.items():
                called = call.generator_arguments(options, info, tokens[name])
                generator = exl.Generator(model=self._raw, cache=caches[name], tokenizer=self._tokenizer, **called)
                self.lanes[name] = Lane(info, generator, self._job, dispatch)
        except BaseException:
            self.close()
            raise

    def _cache(self, name: str, info: CacheInfo, tokens: int) -> Any:
        exl, quant = self._library.exl, call.quant_of(name, info, self._options)
        called: Call = {"max_num_tokens": tokens, "max_batch_size": call.batch(self._options, info)}
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

    def _job(self, job: Job, sampled: Deed) -> Any:
        exl, torch, prompt = self._library.exl, self._library.torch, job.prompt
        ends = self._shape.ends if job.filter is not None and job.filter.ends_the_job else ()
        return exl.Job(
            input_ids=torch.tensor([job.ids], dtype=torch.long),
            sampler=self._sampler(sampled, [self._step(*step) for step in call.sampler_steps(prompt.sampling)]),
            filters=[job.filter] if job.filter is not None else [],
            identifier=job,
            **call.job_arguments(prompt, job.most, self._options, ends),
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
