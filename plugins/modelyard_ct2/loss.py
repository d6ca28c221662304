"""The quality loss of a coarser compute type: the same text, evaluated with the same weights in two formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from modelyard.core.engine import EngineSpec
from modelyard.core.errors import InvalidRequest
from modelyard.core.knobs import Loss
from modelyard_ct2.model_folder import find_folder, read_vocabulary
from modelyard_ct2.options import Ct2Options

_CHUNK = 256  # tokens evaluated together, without context before them; 256 MB of logits with large vocabularies

LogProbs = npt.NDArray[np.float32]


def loss(spec: EngineSpec, reference: EngineSpec, ids: Sequence[int]) -> Loss:
    vocabulary = read_vocabulary(find_folder(spec.options.path))
    chunks = [list(ids[start : start + _CHUNK]) for start in range(0, len(ids), _CHUNK)]
    chunks = [chunk for chunk in chunks if len(chunk) > 1]
    nll = reference_nll = divergence = 0.0
    generator, reference_generator = _load_generator(spec.options), _load_generator(reference.options)
    for chunk in chunks:
        ours, theirs = _log_probs(generator, vocabulary, chunk), _log_probs(reference_generator, vocabulary, chunk)
        rows, targets = np.arange(len(chunk) - 1), np.asarray(chunk[1:])
        nll -= float(ours[rows, targets].sum())
        reference_nll -= float(theirs[rows, targets].sum())
        divergence += float((np.exp(theirs[:-1]) * (theirs[:-1] - ours[:-1])).sum())
    count = sum(len(chunk) - 1 for chunk in chunks)
    return Loss(math.exp(nll / count), math.exp(reference_nll / count), max(0.0, divergence / count))


def _load_generator(options: Ct2Options) -> Any:
    import ctranslate2

    folder = find_folder(options.path)
    try:
        return ctranslate2.Generator(str(folder), device=options.device, compute_type=options.compute_type)
    except (RuntimeError, ValueError) as error:
        raise InvalidRequest(f"{folder} cannot be loaded: {error}", code="model_unreadable") from error


def _log_probs(generator: Any, vocabulary: list[str], ids: Sequence[int]) -> LogProbs:
    import ctranslate2

    output = generator.forward_batch([[vocabulary[id] for id in ids]], return_log_probs=True)
    on_cpu = output.to_device(ctranslate2.Device.cpu).to(ctranslate2.DataType.float32)
    log_probs: LogProbs = np.asarray(on_cpu)[0]
    return log_probs
