"""Tiny files of qwen35 with an MTP layer whose guesses are known.

Each token's vector is its own dimension, and no layer adds anything to it: the hidden row says which token was read.
The output matrix then gives what follows it. The MTP layer looks at one of its two inputs only:

    hidden   the target's hidden row, of which it makes that of the next token: one row too early or too late is wrong
    token    the token, as the target does: its guess is the target's most likely token
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np

from modelyard.library.cache_dir import cache_dir
from modelyard.library.llama_cpp_package import library_folder
from tests.engines.llama_cpp import architectures

NAME = "qwen35-mtp"
WIDTH = 288
FIRST, COUNT = 3, 260  # tokens that are no markers


def following(token: int) -> int:
    """The token that the model writes after this one."""
    return FIRST + (7 * (token - FIRST) + 11) % COUNT if token >= FIRST else FIRST


def agreeing_model(looks_at: Literal["hidden", "token"] = "hidden", *, sharp: bool = True, name: str = NAME) -> Path:
    """Without `sharp` what follows is a distribution over many tokens. Of another architecture it has no head."""
    version = hashlib.sha256(Path(__file__).read_bytes() + Path(architectures.__file__).read_bytes()).hexdigest()[:12]
    library = library_folder().name
    path = cache_dir() / "test-models" / f"agreeing-{name}-{looks_at}-{sharp}-{version}-{library}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        own = {"embedding_length": WIDTH, "attention.key_length": 32, "attention.value_length": 32}
        prefix = name.removesuffix(architectures.HEADS_SUFFIX)
        facts = {f"{prefix}.{key}": value for key, value in own.items()}
        architectures.write_model(name, partial, facts, _values(looks_at, sharp))
        partial.rename(path)
    return path


def _output_matrix(tokens: int, width: int, *, sharp: bool) -> np.ndarray:
    matrix = np.zeros((tokens, width)) if sharp else np.random.default_rng(1).normal(0, 0.06, (tokens, width))
    for token in range(tokens):
        matrix[following(token), token] += 1.0 if sharp else 0.25
    return matrix


def distribution(token: int, top_k: int) -> dict[int, float]:
    """What follows a token in the file that is not sharp."""
    logits = _output_matrix(FIRST + COUNT, WIDTH, sharp=False)[:, token] * np.sqrt(WIDTH)
    best = np.argsort(-logits)[:top_k]
    shares = np.exp(logits[best]) / np.exp(logits[best]).sum()
    return dict(zip(best.tolist(), shares.tolist(), strict=True))


def _values(looks_at: str, sharp: bool) -> architectures.Values:
    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if "norm" in name or name.endswith("scale.weight"):
            return np.ones(shape)
        adds = "attn_output", "ssm_out", "ffn_down", "ffn_down_exps", "ffn_down_shexp", "proj"
        if name.endswith(".bias") or ("nextn" not in name and name.removesuffix(".weight").endswith(adds)):
            return np.zeros(shape)
        if name == "token_embd.weight":
            return np.eye(*shape)
        if name == "output.weight":
            return _output_matrix(*shape, sharp=sharp)
        if name.endswith("nextn.eh_proj.weight"):
            matrix = np.zeros(shape)
            for token in range(WIDTH):
                if looks_at == "token":
                    matrix[token, token] = 1.0
                elif token < FIRST + COUNT:
                    matrix[following(token), WIDTH + token] = 1.0
            return matrix
        return architectures.random_values(name, shape)

    return values


def agreeing_draft(target: str, path: Path) -> Path:
    """An assistant that is always right, or EAGLE-3 whose first guess is: it knows the token of the row before."""
    step = np.zeros((FIRST + COUNT, WIDTH))
    for token in range(FIRST + COUNT):
        step[following(token), token] = 1.0

    def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
        found = np.zeros(shape)
        if "norm" in name or "scale" in name or "rope_freqs" in name:
            return np.ones(shape)
        if name == "fc.weight":
            found[:, :WIDTH] = np.eye(WIDTH)
        elif name == "token_embd.weight" and target == "gemma4":  # what follows a token, and the output matrix
            found[: FIRST + COUNT, :WIDTH] = step
        elif name == "output.weight":
            found[: FIRST + COUNT] = step[:, : FIRST + COUNT] @ step
        elif name == "nextn.pre_projection.weight":
            found[: FIRST + COUNT, WIDTH:] = step
        elif name == "nextn.post_projection.weight":
            found[:, :WIDTH] = np.eye(WIDTH)
        return found

    return architectures.draft_file(target, path, values, WIDTH)
