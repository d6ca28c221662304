"""A GGUF file as a Hugging Face model: its shape, and its weights with the names and the layout of Hugging Face."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.library.gguf import TensorInfo, read_contents
from modelyard.library.model_files import split_parts

Weights = npt.NDArray[np.float32]

_GLOBAL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_BIASES = {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}


class ModelFamily(Struct, frozen=True):
    """`interleaved`: llama.cpp stores the rows of queries and keys in pairs for its rotary embedding; Hugging Face
    expects two halves."""

    architecture: str
    model_type: str
    interleaved: bool = False
    biased: bool = False


_FAMILIES = {
    "llama": ModelFamily("LlamaForCausalLM", "llama", interleaved=True),
    "qwen2": ModelFamily("Qwen2ForCausalLM", "qwen2", biased=True),
}


class TransformerShape(Struct, frozen=True):
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    tied_embeddings: bool  # input and output embeddings are the same tensor


class GgufModel:
    """A GGUF model with all its parts. Weights are read on access."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._tensors: dict[str, tuple[Path, TensorInfo]] = {}
        self.metadata: Mapping[str, Any] = {}
        for part in split_parts(file):
            metadata, tensors = read_contents(part)
            self.metadata = self.metadata or metadata
            self._tensors |= {tensor.name: (part, tensor) for tensor in tensors}
        self.family = _family(file, self.metadata, self._tensors)
        self.shape = _shape(self.metadata, self._tensors)
        self._names = _names(file, self.family, self._tensors)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor by its Hugging Face name, in the order of the file."""
        return {new: self._tensors[old][1].shape for new, old in self._names.items()}

    def __iter__(self) -> Iterator[tuple[str, Weights]]:
        return ((name, self[name]) for name in self._names)

    def __getitem__(self, name: str) -> Weights:
        weights = _dequantize(*self._tensors[self._names[name]])
        if self.family.interleaved and ".q_proj." in name:
            return _deinterleave(weights, self.shape.heads)
        if self.family.interleaved and ".k_proj." in name:
            return _deinterleave(weights, self.shape.kv_heads)
        return weights


def _family(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelFamily:
    name = metadata.get("general.architecture", "")
    if name not in _FAMILIES:
        raise _not_convertible(
            file, f"its architecture is {name!r}, and only {', '.join(_FAMILIES)} can be converted here"
        )
    scaling = metadata.get(f"{name}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise _not_convertible(file, "it uses RoPE scaling, and a GGUF file does not contain the formula")
    return _FAMILIES[name]


def _not_convertible(file: Path, reason: str) -> Unsupported:
    return Unsupported(
        f"{file} cannot be converted: {reason}. Convert the original model instead, with ct2-transformers-converter",
        code="model_not_convertible",
    )


def _shape(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[Path, TensorInfo]]) -> TransformerShape:
    prefix = metadata["general.architecture"] + "."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    vocab, width = tensors["token_embd.weight"][1].shape
    heads = values["attention.head_count"]
    return TransformerShape(
        layers=values["block_count"],
        hidden_size=width,
        heads=heads,
        kv_heads=values.get("attention.head_count_kv", heads),
        head_dim=values.get("attention.key_length", width // heads),
        intermediate_size=values["feed_forward_length"],
        vocab_size=vocab,
        context_length=values["context_length"],
        rms_norm_eps=round(values["attention.layer_norm_rms_epsilon"], 12),
        rope_theta=values.get("rope.freq_base", 10000.0),
        tied_embeddings="output.weight" not in tensors,
    )


def _names(file: Path, family: ModelFamily, tensors: Mapping[str, Any]) -> dict[str, str]:
    """Names in the file by Hugging Face names. An unknown tensor means that the model is not supported."""
    known = _LAYER | (_BIASES if family.biased else {})
    found = {}
    for old in tensors:
        block, _, rest = old.removeprefix("blk.").partition(".")
        new = f"model.layers.{block}.{known[rest]}" if old.startswith("blk.") and rest in known else _GLOBAL.get(old)
        if new is None:
            raise _not_convertible(file, f"its tensor {old} is unknown")
        found[new] = old
    return found


def _dequantize(file: Path, tensor: TensorInfo) -> Weights:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(tensor.kind)
    block, size = GGML_QUANT_SIZES[kind]
    *rows, columns = tensor.shape
    shape = (*rows, columns // block * size)
    raw = np.fromfile(file, np.uint8, prod(shape), offset=tensor.offset)  # mapped, a truncated file would kill us
    if raw.size != prod(shape):
        raise InvalidRequest(f"{file} ends in the middle of the tensor {tensor.name}", code="model_unreadable")
    return np.array(dequantize(raw.reshape(shape), kind), np.float32)


def _deinterleave(weights: Weights, heads: int) -> Weights:
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
