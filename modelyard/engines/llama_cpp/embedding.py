"""Embeddings in a context of their own, made on first use, read slice by slice between the steps of the caches.

llama.cpp can pool by itself only what lies in one micro-batch. Here it gives the vector of each token, and mean, first
or last are taken of them in numpy: a long input is read in slices, so that streams wait for one of them at most.
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
from modelyard.engines.llama_cpp.binding import LlamaBatch, lib
from modelyard.engines.llama_cpp.estimate import ModelShape

MAX_INPUTS = 16  # inputs read together
_POOLINGS = {"1": "mean", "2": "cls", "3": "last"}  # llama.cpp's LLAMA_POOLING_TYPE_…

Vector = npt.NDArray[np.float32]
Order = Callable[[Callable[[], None]], Awaitable[None]]  # has a deed done by the engine's thread


class InputSlice(Struct, frozen=True):
    """`count` tokens of an input from `start` on."""

    index: int
    start: int
    count: int


def plan_embedding_steps(lengths: Sequence[int], rows: int, places: int = MAX_INPUTS) -> list[list[InputSlice]]:
    """Steps of at most `rows` tokens. Short inputs share one; a long input has steps of its own, in order."""
    steps: list[list[InputSlice]] = []
    left = 0
    for index, length in enumerate(lengths):
        if length > left or len(steps[-1]) == places:
            steps += [[InputSlice(index, start, min(rows, length - start))] for start in range(0, length, rows)]
            left = rows - length
        else:
            steps[-1].append(InputSlice(index, 0, length))
            left -= length
    return steps


class Embedder:
    """Takes batches on the loop and has them read by the engine's thread, one step an order. One batch at a time: they
    share a context."""

    def __init__(
        self, model: Any, spec: EngineSpec, shape: ModelShape | None, order: Order, attach: Callable[[Any], None]
    ) -> None:
        self._order = order
        self._n_vocab: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._reader = EmbeddingContext(
            model, spec.options.n_ubatch, spec.options.pooling, _maker(model, spec, shape, attach)
        )
        self._turn = asyncio.Lock()

    async def embed(self, batch: Sequence[Sequence[int]]) -> Embeddings:
        """Equal inputs are read once."""
        self._check(batch)
        places: dict[tuple[int, ...], int] = {}
        for ids in batch:
            places.setdefault(tuple(ids), len(places))
        async with self._turn:
            vectors = await self._read(list(places))
        return Embeddings([vectors[places[tuple(ids)]] for ids in batch], sum(map(len, batch)))

    async def _read(self, inputs: list[tuple[int, ...]]) -> list[list[float]]:
        lengths = [len(ids) for ids in inputs]
        await self._order(partial(self._reader.prepare, max(lengths, default=0)))
        pools = self._reader.empty(len(inputs))
        for step in plan_embedding_steps(lengths, self._reader.rows):
            await self._order(partial(self._reader.read, step, inputs, pools))
        return [normalize(pool) for pool in pools]

    def _check(self, batch: Sequence[Sequence[int]]) -> None:
        if not all(batch):
            raise InvalidRequest("an input without tokens has no embedding", param="input")
        if any(min(ids) < 0 or max(ids) >= self._n_vocab for ids in batch):
            raise InvalidRequest(f"an input holds token ids outside 0…{self._n_vocab - 1}", param="input")

    def close(self) -> None:
        self._reader.close()


def _maker(
    model: Any, spec: EngineSpec, shape: ModelShape | None, attach: Callable[[Any], None]
) -> Callable[[int], Any]:
    """`attach` gives the context the threads that it shares with the caches."""

    def make(cells: int) -> Any:
        if shape is not None:  # the weights are here already
            loading.check_memory(
                replace(shape, weights=0, files=()), spec.model, spec.options, {"embeddings": CacheInfo(cells)}
            )
        raw = loading.create_embedding_context(model, spec.options, cells, MAX_INPUTS)
        attach(raw)
        return raw

    return make


class EmbeddingContext:
    """The context and what it is made with. Belongs to the engine's thread. `make` gets the cells it must have."""

    def __init__(self, model: Any, rows: int, pooling: str | None, make: Callable[[int], Any]) -> None:
        self.rows = rows
        self._make = make
        self._width: int = lib.llama_model_n_embd_out(model)
        self._pooling = pooling or _of_model(model)
        self._raw: Any = None
        self._cells = 0
        self._batch = LlamaBatch(rows)

    def prepare(self, longest: int) -> None:
        """A context that holds the longest input; one that is too small makes room for a larger one."""
        cells = max(self.rows, 256)
        while cells < longest:
            cells *= 2
        if cells > self._cells:
            self.close()
            self._raw = self._make(cells)
            self._cells = cells

    def read(self, step: list[InputSlice], batch: Sequence[Sequence[int]], pools: list[Vector]) -> None:
        """One decode; `pools` holds what each input comes to so far."""
        if step[0].start == 0:
            lib.llama_memory_clear(lib.llama_get_memory(self._raw), False)
        self._batch.clear()
        for place, piece in enumerate(step):
            ids = np.asarray(batch[piece.index][piece.start : piece.start + piece.count], np.int32)
            self._batch.add(ids, piece.start, place, last=True)
        self._batch.output[: self._batch.size] = 1  # each token's vector
        code = lib.llama_decode(self._raw, self._batch.raw)
        if code != 0:
            raise Internal(f"llama_decode answered {code} to an embedding")
        self._pool(step, pools)

    def _pool(self, step: list[InputSlice], pools: list[Vector]) -> None:
        rows = np.ctypeslib.as_array(lib.llama_get_embeddings(self._raw), (self._batch.size, self._width))
        at = 0
        for piece in step:
            own, at = rows[at : at + piece.count], at + piece.count
            if self._pooling == "mean":
                pools[piece.index] = pools[piece.index] + own.sum(0)
            elif self._pooling == "last":
                pools[piece.index] = own[-1].copy()
            elif piece.start == 0:
                pools[piece.index] = own[0].copy()

    def empty(self, count: int) -> list[Vector]:
        return [np.zeros(self._width, np.float32)] * count

    def close(self) -> None:
        raw, self._raw, self._cells = self._raw, None, 0
        if raw is not None:
            lib.llama_free(raw)


def normalize(vector: Vector) -> list[float]:
    """Of length 1: the mean is a sum brought to length."""
    length = float(np.linalg.norm(vector))
    unit_long: list[float] = (vector / (length or 1.0)).tolist()
    return unit_long


def _of_model(model: Any) -> str:
    return _POOLINGS.get(_told(model, f"{_told(model, 'general.architecture')}.pooling_type"), "mean")


def _told(model: Any, key: str) -> str:
    buffer = create_string_buffer(128)
    found = lib.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if found >= 0 else ""
