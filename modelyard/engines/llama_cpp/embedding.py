"""Embeddings, in a context that is created on first use. Inputs are read slice by slice between the caches' steps.

llama.cpp pools only what is in one micro-batch. Here it returns the vector of each token, and numpy takes their mean,
the first or the last: a long input is read in slices, so a stream waits for one of them at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from ctypes import create_string_buffer
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.engine import CacheInfo, Embeddings, EngineSpec
from modelyard.core.errors import Internal, InvalidRequest
from modelyard.engines.llama_cpp import loading
from modelyard.engines.llama_cpp.batch import LlamaBatch
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.estimate import ModelShape

MAX_INPUTS = 16  # read together
_MIN_CELLS = 256
_POOLING_TYPES = {"1": "mean", "2": "cls", "3": "last"}  # LLAMA_POOLING_TYPE_…

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
        self._lock = asyncio.Lock()
        self._context = EmbeddingContext(model, spec, shape, attach)

    async def embed(self, batch: Sequence[Sequence[int]]) -> Embeddings:
        """Equal inputs are read once."""
        if not all(batch):
            raise InvalidRequest("an input without tokens has no embedding", param="input")
        if any(min(ids) < 0 or max(ids) >= self._n_vocab for ids in batch):
            raise InvalidRequest(f"an input has token ids outside 0…{self._n_vocab - 1}", param="input")
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
        return [normalize(pool) for pool in pools]

    def close(self) -> None:
        self._context.close()


class EmbeddingContext:
    """Belongs to the engine's thread."""

    def __init__(self, model: Any, spec: EngineSpec, shape: ModelShape | None, attach: Callable[[Any], None]) -> None:
        self._model, self._spec, self._shape, self._attach = model, spec, shape, attach
        self.rows: int = spec.options.n_ubatch
        self._width: int = lib.llama_model_n_embd_out(model)
        self._pooling = spec.options.pooling or _model_pooling(model)
        self._raw: Any = None
        self._cells = 0
        self._batch = LlamaBatch(self.rows)

    def prepare(self, longest: int) -> None:
        """Makes room for the longest input; a context that is too small is replaced."""
        cells = max(self.rows, _MIN_CELLS)
        while cells < longest:
            cells *= 2
        if cells <= self._cells:
            return
        self.close()
        if self._shape is not None:  # the weights are loaded already
            shape, caches = replace(self._shape, weights=0, files=()), {"embeddings": CacheInfo(cells)}
            loading.check_memory(shape, self._spec.model, self._spec.options, caches)
        self._raw = loading.create_embedding_context(self._model, self._spec.options, cells, MAX_INPUTS)
        self._attach(self._raw)
        self._cells = cells

    def read(self, step: list[InputSlice], batch: Sequence[Sequence[int]], pools: list[Vector]) -> None:
        """One decode; adds the tokens' vectors to the pools of their inputs."""
        if step[0].start == 0:
            lib.llama_memory_clear(lib.llama_get_memory(self._raw), False)
        self._batch.clear()
        for sequence, part in enumerate(step):
            ids = np.asarray(batch[part.index][part.start : part.start + part.count], np.int32)
            self._batch.add(ids, part.start, sequence, last=True)
        self._batch.output[: self._batch.size] = 1  # the vector of each token
        code = lib.llama_decode(self._raw, self._batch.raw)
        if code != 0:
            raise Internal(f"llama_decode of an embedding failed with code {code}")
        vectors = np.ctypeslib.as_array(lib.llama_get_embeddings(self._raw), (self._batch.size, self._width))
        at = 0
        for part in step:
            own, at = vectors[at : at + part.count], at + part.count
            if self._pooling == "mean":
                pools[part.index] = pools[part.index] + own.sum(0)
            elif self._pooling == "last":
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


def _model_pooling(model: Any) -> str:
    architecture = _metadata(model, "general.architecture")
    return _POOLING_TYPES.get(_metadata(model, f"{architecture}.pooling_type"), "mean")


def _metadata(model: Any, key: str) -> str:
    buffer = create_string_buffer(128)
    length = lib.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if length >= 0 else ""
