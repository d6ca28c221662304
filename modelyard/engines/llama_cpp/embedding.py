"""Embeddings and scores, in a context that is created on first use. Inputs are read between the caches' steps.

llama.cpp pools only what is in one micro-batch.

    causal        a long input is read in slices, so a stream waits for one of them at most; llama.cpp returns the
                  vector of each token, and numpy takes their mean, the first or the last
    not causal    every token attends to all others: an input is read in one micro-batch, which grows with the longest
                  one; llama.cpp pools
    rank          the score comes from the last token read, or from the whole of an input that is not causal; llama.cpp
                  computes it from the vector
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.engine import CacheInfo, Embeddings, EngineSpec
from modelyard.core.errors import ContextOverflow, Internal, InvalidRequest, Unsupported
from modelyard.engines.llama_cpp import loading
from modelyard.engines.llama_cpp.batch import LlamaBatch
from modelyard.engines.llama_cpp.binding import lib, short
from modelyard.engines.llama_cpp.model_shape import ModelShape
from modelyard.engines.llama_cpp.options import Options
from modelyard.library.gguf import ModelPurpose, Pooling

MAX_INPUTS = 16  # read together
_MIN_CELLS = 256

Vector = npt.NDArray[np.float32]
RunOnThread = Callable[[Callable[[], None]], Awaitable[None]]


class InputSlice(Struct, frozen=True):
    """`count` tokens of an input from `start` on."""

    index: int
    start: int
    count: int


def plan_embedding_steps(lengths: Sequence[int], rows: int, max_inputs: int = MAX_INPUTS) -> list[list[InputSlice]]:
    """Steps of at most `rows` tokens. Short inputs share one; a long input has its own steps, in order."""
    steps: list[list[InputSlice]] = []
    room = 0
    for index, length in enumerate(lengths):
        if length > room or len(steps[-1]) == max_inputs:
            steps += [[InputSlice(index, start, min(rows, length - start))] for start in range(0, length, rows)]
            room = rows - length
        else:
            steps[-1].append(InputSlice(index, 0, length))
            room -= length
    return steps


class Embedder:
    """Runs batches step by step on the engine's thread. One batch at a time: they share a context."""

    def __init__(
        self,
        model: Any,
        spec: EngineSpec,
        shape: ModelShape | None,
        run_on_thread: RunOnThread,
        attach: Callable[[Any], None],
    ) -> None:
        self._run_on_thread = run_on_thread
        self._n_vocab: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._window = max((info.window for info in spec.caches.values()), default=0)
        self._lock = asyncio.Lock()
        self._context = EmbeddingContext(model, spec, shape, attach)

    async def embed(self, batch: Sequence[Sequence[int]]) -> Embeddings:
        """Equal inputs are read once."""
        if not all(batch):
            raise InvalidRequest("an input without tokens has no embedding", param="input")
        if any(min(ids) < 0 or max(ids) >= self._n_vocab for ids in batch):
            raise InvalidRequest(f"an input has token ids outside 0…{self._n_vocab - 1}", param="input")
        if (longest := max(map(len, batch), default=0)) > self._window:
            raise ContextOverflow(longest, self._window)
        inputs: dict[tuple[int, ...], int] = {}
        for ids in batch:
            inputs.setdefault(tuple(ids), len(inputs))
        async with self._lock:
            vectors = await self._read(list(inputs))
        return Embeddings([vectors[inputs[tuple(ids)]] for ids in batch], sum(map(len, batch)))

    async def _read(self, inputs: list[tuple[int, ...]]) -> list[list[float]]:
        lengths = [len(ids) for ids in inputs]
        await self._run_on_thread(partial(self._context.prepare, max(lengths, default=0)))
        pools = self._context.empty_pools(len(inputs))
        for step in plan_embedding_steps(lengths, self._context.rows):
            await self._run_on_thread(partial(self._context.read, step, inputs, pools))
        return [pool.tolist() if self._context.pooling == "rank" else normalize(pool) for pool in pools]

    def close(self) -> None:
        self._context.close()


def choose_pooling(purpose: ModelPurpose, options: Options) -> Pooling:
    """The setting, else as the file says; a file that does not say gets the mean."""
    if purpose.pooling == "rank":
        return "rank"
    pooling = options.pooling or purpose.pooling or "mean"
    if pooling == "none":
        raise Unsupported(
            "the model's file pools nothing, so a text has no single vector; set pooling of this model to mean, cls "
            "or last",
            code="embeddings_unsupported",
        )
    return pooling


class EmbeddingContext:
    """Belongs to the engine's thread."""

    def __init__(self, model: Any, spec: EngineSpec, shape: ModelShape | None, attach: Callable[[Any], None]) -> None:
        self._model, self._spec, self._shape, self._attach = model, spec, shape, attach
        self._purpose = shape.purpose if shape is not None else ModelPurpose()
        self.pooling: Pooling = "none"
        self.rows: int = spec.options.n_ubatch
        self._raw: Any = None
        self._cells = 0
        self._batch = LlamaBatch(self.rows)
        self._compute = lib.llama_encode if lib.llama_model_has_encoder(model) else lib.llama_decode

    @property
    def _is_pooled(self) -> bool:
        """Whether llama.cpp pools. It also applies the layers that some models have behind the pooling."""
        return self.pooling == "rank" or not self._purpose.causal

    @property
    def _width(self) -> int:
        count = lib.llama_model_n_cls_out(self._model) if self.pooling == "rank" else 0
        return int(count or lib.llama_model_n_embd_out(self._model))

    def prepare(self, longest: int) -> None:
        """Makes room for the longest input; a context that is too small is replaced."""
        options: Options = self._spec.options
        self.pooling = choose_pooling(self._purpose, options)
        cells = max(options.n_ubatch, _MIN_CELLS)
        while cells < longest:
            cells *= 2
        if cells <= self._cells:
            return
        self.close()
        self.rows = options.n_ubatch if self._purpose.causal else cells
        options = options.model_copy(update={"n_ubatch": self.rows})
        if self._shape is not None:  # the weights are loaded already
            shape, caches = replace(self._shape, weights=0, files=()), {"embeddings": CacheInfo(cells)}
            loading.check_memory(shape, self._spec.model, options, caches)
        pooling = self.pooling if self._is_pooled else "none"
        self._raw = loading.create_embedding_context(self._model, options, cells, MAX_INPUTS, pooling)
        self._attach(self._raw)
        self._cells, self._batch = cells, LlamaBatch(self.rows)

    def read(self, step: list[InputSlice], batch: Sequence[Sequence[int]], pools: list[Vector]) -> None:
        """One decode; adds the tokens' vectors to the pools of their inputs."""
        if step[0].start == 0:
            lib.llama_memory_clear(lib.llama_get_memory(self._raw), False)
        self._batch.clear()
        for sequence, part in enumerate(step):
            ids = np.asarray(batch[part.index][part.start : part.start + part.count], np.int32)
            self._batch.add(ids, part.start, sequence, last=True)
        self._batch.output[: self._batch.size] = 1  # the vector of each token
        code = self._compute(self._raw, self._batch.raw)
        if code != 0:
            raise Internal(f"llama_decode of an embedding failed with code {code}")
        if self._is_pooled:
            for sequence, part in enumerate(step):  # the last slice of an input has the final value
                own = short.get_embeddings_seq(self._raw, sequence)
                pools[part.index] = np.ctypeslib.as_array(own, (self._width,)).copy()
            return
        vectors = np.ctypeslib.as_array(lib.llama_get_embeddings(self._raw), (self._batch.size, self._width))
        at = 0
        for part in step:
            own, at = vectors[at : at + part.count], at + part.count
            if self.pooling == "mean":
                pools[part.index] = pools[part.index] + own.sum(0)
            elif self.pooling == "last":
                pools[part.index] = own[-1].copy()
            elif part.start == 0:
                pools[part.index] = own[0].copy()

    def empty_pools(self, count: int) -> list[Vector]:
        return [np.zeros(self._width, np.float32)] * count

    def close(self) -> None:
        raw, self._raw, self._cells = self._raw, None, 0
        if raw is not None:
            lib.llama_free(raw)


def normalize(vector: Vector) -> list[float]:
    """To length 1; so a sum serves as the mean."""
    length = float(np.linalg.norm(vector))
    normalized: list[float] = (vector / (length or 1.0)).tolist()
    return normalized
