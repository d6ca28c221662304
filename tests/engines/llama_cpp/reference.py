"""llama.cpp through its C API, without the engine: one sequence and a fresh context per text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from modelyard.engines.llama_cpp.binding import lib
from modelyard.tokenizer import llama_log
from tests.engines.llama_cpp.helpers import UBATCH

Logits = npt.NDArray[np.float32]


def greedy(file: Path, texts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The `count` best tokens after each run of token ids."""
    with _loaded(file) as model:
        return [_continue(model, list(ids), count) for ids in texts]


def logprobs(file: Path, ids: list[int], chunkings: Sequence[Sequence[int]]) -> Logits:
    """Of the token after `ids`, a row for each chunking; the last number of a chunking is repeated."""
    with _loaded(file) as model:
        return np.stack([_normal(_read_in_chunks(model, ids, sizes)) for sizes in chunkings])


def _continue(model: Any, ids: list[int], count: int) -> list[int]:
    out: list[int] = []
    with _context(model, UBATCH) as context:
        for _ in range(count):
            out.append(int(_read(context, ids if not out else out[-1:]).argmax()))
    return out


def _read_in_chunks(model: Any, ids: list[int], sizes: Sequence[int]) -> Logits:
    left, at = list(sizes), 0
    with _context(model, 512) as context:
        while at < len(ids):
            size = left.pop(0) if len(left) > 1 else left[0]
            logits, at = _read(context, ids[at : at + size]), at + size
        return logits.copy()


def _read(context: Any, ids: list[int]) -> Logits:
    """The logits after the last of them."""
    tokens = (lib.llama_token * len(ids))(*ids)
    assert lib.llama_decode(context, lib.llama_batch_get_one(tokens, len(ids))) == 0
    vocab = lib.llama_model_get_vocab(lib.llama_get_model(context))
    return np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), shape=(lib.llama_vocab_n_tokens(vocab),))


def _normal(logits: Logits) -> Logits:
    shifted: Logits = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


@contextmanager
def _loaded(file: Path) -> Iterator[Any]:
    llama_log.clear()
    model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
    try:
        yield model
    finally:
        lib.llama_model_free(model)


@contextmanager
def _context(model: Any, ubatch: int) -> Iterator[Any]:
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 512, 512, ubatch
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = 1  # as the engine has it on a CPU
    context = lib.llama_init_from_model(model, params)
    try:
        yield context
    finally:
        lib.llama_free(context)
