"""llama.cpp itself, straight through its C API: one sequence, a fresh context a text, the best token each time."""

from __future__ import annotations

from typing import Any

import numpy as np
from llama_cpp import llama_cpp as lib

from tests.engines.llama_cpp.stage import UBATCH, model_file


def greedy(texts: list[list[int]], count: int) -> list[list[int]]:
    """The `count` best tokens after each run of token ids."""
    model = lib.llama_model_load_from_file(str(model_file()).encode(), lib.llama_model_default_params())
    try:
        return [_continue(model, list(ids), count) for ids in texts]
    finally:
        lib.llama_model_free(model)


def _continue(model: Any, ids: list[int], count: int) -> list[int]:
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 512, 512, UBATCH
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = 0
    context = lib.llama_init_from_model(model, params)
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    out: list[int] = []
    try:
        for _ in range(count):
            _read(context, ids if not out else out[-1:])
            logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), shape=(n_vocab,))
            out.append(int(logits.argmax()))
    finally:
        lib.llama_free(context)
    return out


def _read(context: Any, ids: list[int]) -> None:
    tokens = (lib.llama_token * len(ids))(*ids)
    assert lib.llama_decode(context, lib.llama_batch_get_one(tokens, len(ids))) == 0
