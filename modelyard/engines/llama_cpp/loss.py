"""How much a quantized KV cache changes the output: a text is read through two contexts on the same weights.

Both read the same text, so only their predictions differ. Run it in a separate process: it loads and frees the weights.
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
from modelyard.engines.llama_cpp import loading
from modelyard.engines.llama_cpp.batch import LlamaBatch
from modelyard.engines.llama_cpp.binding import lib
from modelyard.engines.llama_cpp.logits import logits_row
from modelyard.library.model_files import locate_model_file

LogProbabilities = npt.NDArray[np.float32]

_ROWS = 64  # whose logits are held at a time: 64 MB with the largest vocabularies
_SPARE_CELLS = 8


def loss(spec: EngineSpec, reference: EngineSpec, ids: Sequence[int]) -> Loss:
    model = loading.load_model(locate_model_file(spec.options.path), spec.options, lambda _: True)
    contexts: list[Any] = []
    try:
        contexts.append(_create_context(model, spec, len(ids)))
        contexts.append(_create_context(model, reference, len(ids)))
        tested, expected = (_predictions(model, context, ids) for context in contexts)
        return _compare(tested, expected, ids)
    finally:
        for context in contexts:
            lib.llama_free(context)
        lib.llama_model_free(model)


def _create_context(model: Any, spec: EngineSpec, count: int) -> Any:
    name, info = next(iter(spec.caches.items()))
    small = replace(info, window=count + _SPARE_CELLS, parallel=1, n_batch=_ROWS, n_ubatch=_ROWS)
    return loading.create_context(model, name, small, spec.options)


def _predictions(model: Any, context: Any, ids: Sequence[int]) -> Iterator[LogProbabilities]:
    """Of every next token after each token of the text, in chunks of rows."""
    batch, n_vocab = LlamaBatch(_ROWS), lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    for start in range(0, len(ids), _ROWS):
        chunk = np.asarray(ids[start : start + _ROWS], np.int32)
        batch.clear()
        batch.add(chunk, start, 0, last=True, drafted=len(chunk) - 1)
        if (code := lib.llama_decode(context, batch.raw)) != 0:
            raise Unavailable(f"the text could not be read: llama_decode failed with code {code}")
        yield np.stack([log_probabilities(logits_row(context, row, n_vocab)) for row in range(len(chunk))])


def log_probabilities(logits: npt.NDArray[Any]) -> LogProbabilities:
    shifted = logits.astype(np.float32)
    shifted -= shifted.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def _compare(tested: Iterator[LogProbabilities], expected: Iterator[LogProbabilities], ids: Sequence[int]) -> Loss:
    tested_nll = expected_nll = divergence = 0.0
    at = 0
    for mine, reference in zip(tested, expected, strict=True):
        divergence += float((np.exp(reference) * (reference - mine)).sum())
        next_ids = np.asarray(ids[at + 1 : at + 1 + len(mine)])
        rows = np.arange(len(next_ids))
        tested_nll -= float(mine[rows, next_ids].sum())
        expected_nll -= float(reference[rows, next_ids].sum())
        at += len(mine)
    count = len(ids) - 1
    return Loss(math.exp(tested_nll / count), math.exp(expected_nll / count), max(0.0, divergence / len(ids)))
