"""What a compute type of coarser numbers costs: the same text read through the same weights in two formats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from modelyard.core.engine import EngineSpec
from modelyard.core.errors import InvalidRequest
from modelyard.core.knobs import Loss
from modelyard.engines.ct2 import model_folder
from modelyard.engines.ct2.options import Ct2Options

_AT_ONCE = 256  # tokens of the text that are read without what stood before them: 256 MB with large vocabularies

Odds = npt.NDArray[np.float32]


def loss(spec: EngineSpec, reference: EngineSpec, ids: Sequence[int]) -> Loss:
    words = model_folder.read_vocabulary(model_folder.find_folder(spec.options.path))
    pieces = [list(ids[start : start + _AT_ONCE]) for start in range(0, len(ids), _AT_ONCE)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    surprise = surprise_before = apart = 0.0
    ours, theirs = _generator(spec.options), _generator(reference.options)
    for piece in pieces:
        mine, before = _odds(ours, words, piece), _odds(theirs, words, piece)
        rows, nexts = np.arange(len(piece) - 1), np.asarray(piece[1:])
        surprise -= float(mine[rows, nexts].sum())
        surprise_before -= float(before[rows, nexts].sum())
        apart += float((np.exp(before[:-1]) * (before[:-1] - mine[:-1])).sum())
    count = sum(len(piece) - 1 for piece in pieces)
    return Loss(math.exp(surprise / count), math.exp(surprise_before / count), max(0.0, apart / count))


def _generator(options: Ct2Options) -> Any:
    import ctranslate2

    where = model_folder.find_folder(options.path)
    try:
        return ctranslate2.Generator(str(where), device=options.device, compute_type=options.compute_type)
    except (RuntimeError, ValueError) as error:
        raise InvalidRequest(f"{where} cannot be loaded: {error}", code="model_unreadable") from error


def _odds(generator: Any, words: list[str], ids: Sequence[int]) -> Odds:
    import ctranslate2

    told = generator.forward_batch([[words[i] for i in ids]], return_log_probs=True)
    odds: Odds = np.asarray(told.to_device(ctranslate2.Device.cpu).to(ctranslate2.DataType.float32))[0]
    return odds
