"""What a KV cache of rounded numbers costs: a text read token by token through two contexts on the same weights.

Both are told the same text, so neither can wander off; what differs is only what they make of it. It is meant for a
process of its own (`tune/child.py`): the weights are loaded, used and freed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from modelyard.core.engine import EngineSpec
from modelyard.core.errors import Unavailable
from modelyard.core.knobs import Loss
from modelyard.engines.llama_cpp import files, loading
from modelyard.engines.llama_cpp.binding import LlamaBatch, lib
from modelyard.engines.llama_cpp.sampler import logits_row

Odds = npt.NDArray[np.float32]
_AT_ONCE = 64  # rows whose logits are held at a time: 64 MB with the largest vocabularies
_ROOM = 8


def loss(spec: EngineSpec, reference: EngineSpec, ids: Sequence[int]) -> Loss:
    model = loading.load_model(files.find(spec.options.path), spec.options, lambda _: True)
    contexts: list[Any] = []
    try:
        contexts.append(_context(model, spec, len(ids)))
        contexts.append(_context(model, reference, len(ids)))
        ours, theirs = (_odds(model, context, ids) for context in contexts)
        return _compared(ours, theirs, ids)
    finally:
        for context in contexts:
            lib.llama_free(context)
        lib.llama_model_free(model)


def _context(model: Any, spec: EngineSpec, count: int) -> Any:
    name, info = next(iter(spec.caches.items()))
    small = replace(info, window=count + _ROOM, parallel=1, n_batch=_AT_ONCE, n_ubatch=_AT_ONCE)
    return loading.create_context(model, name, small, spec.options)


def _odds(model: Any, context: Any, ids: Sequence[int]) -> Iterator[Odds]:
    """Log probabilities of every next token after each of the text's."""
    batch, size = LlamaBatch(_AT_ONCE), lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    for start in range(0, len(ids), _AT_ONCE):
        piece = np.asarray(ids[start : start + _AT_ONCE], np.int32)
        batch.clear()
        batch.add(piece, start, 0, last=True, guessed=len(piece) - 1)
        if (code := lib.llama_decode(context, batch.raw)) != 0:
            raise Unavailable(f"the text could not be read: llama_decode answered {code}")
        yield np.stack([log_probabilities(logits_row(context, row, size)) for row in range(len(piece))])


def log_probabilities(logits: npt.NDArray[Any]) -> Odds:
    wide = logits.astype(np.float32)
    wide -= wide.max()
    return np.asarray(wide - np.log(np.exp(wide).sum()))


def _compared(ours: Iterator[Odds], theirs: Iterator[Odds], ids: Sequence[int]) -> Loss:
    surprise = surprise_before = apart = 0.0
    at = 0
    for mine, before in zip(ours, theirs, strict=True):
        apart += float((np.exp(before) * (before - mine)).sum())
        nexts = np.asarray(ids[at + 1 : at + 1 + len(mine)])
        rows = np.arange(len(nexts))
        surprise -= float(mine[rows, nexts].sum())
        surprise_before -= float(before[rows, nexts].sum())
        at += len(mine)
    count = len(ids) - 1
    return Loss(math.exp(surprise / count), math.exp(surprise_before / count), max(0.0, apart / len(ids)))
