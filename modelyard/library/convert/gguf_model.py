"""A GGUF file as a Hugging Face model: its shape, and its weights under the other world's names and in its layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from modelyard.core.errors import Unsupported
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
    """`interleaved`: llama.cpp stores the rows of queries and keys in pairs for its rotation, and they are to be put
    back into two halves."""

    architecture: str
    model_type: str
    interleaved: bool = False
    biased: bool = False


_FAMILIES = {
    "llama": ModelFamily("LlamaForCausalLM", "llama", interleaved=True),
    "qwen2": ModelFamily("Qwen2ForCausalLM", "qwen2", biased=True),
}


class ModelShape(Struct, frozen=True):
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    inner: int
    vocab: int
    context: int
    epsilon: float
    rope_base: float
    tied: bool  # words in and words out are one table


class GgufModel:
    """One GGUF model, whole. Nothing of its weights is in memory until it is asked for."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._places: dict[str, tuple[Path, TensorInfo]] = {}
        self.metadata: Mapping[str, Any] = {}
        for part in split_parts(file):
            metadata, places = read_contents(part)
            self.metadata = self.metadata or metadata
            self._places |= {place.name: (part, place) for place in places}
        self.family = _family(file, self.metadata, self._places)
        self.shape = _shape(self.metadata, self._places)
        self._names = _names(file, self.family, self._places)

    @property
    def tokens(self) -> list[str]:
        return list(self.metadata["tokenizer.ggml.tokens"])

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, by its new name, in the file's order."""
        return {new: self._places[old][1].shape for new, old in self._names.items()}

    def __iter__(self) -> Iterator[tuple[str, Weights]]:
        return ((name, self[name]) for name in self._names)

    def __getitem__(self, name: str) -> Weights:
        file, place = self._places[self._names[name]]
        weights = _dequantized(file, place)
        if self.family.interleaved and ".q_proj." in name:
            return _in_halves(weights, self.shape.heads)
        if self.family.interleaved and ".k_proj." in name:
            return _in_halves(weights, self.shape.kv_heads)
        return weights


def _family(file: Path, about: Mapping[str, Any], places: Mapping[str, Any]) -> ModelFamily:
    name = about.get("general.architecture", "")
    if name not in _FAMILIES:
        raise _cannot(file, f"its architecture is {name!r} and only {', '.join(_FAMILIES)} can be converted here")
    scaling = about.get(f"{name}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in places:
        raise _cannot(file, "its positions are scaled, and a GGUF file does not tell by which formula")
    return _FAMILIES[name]


def _cannot(file: Path, why: str) -> Unsupported:
    return Unsupported(
        f"{file} cannot be converted: {why}. Convert the original model instead, with ct2-transformers-converter",
        code="model_not_convertible",
    )


def _shape(about: Mapping[str, Any], places: Mapping[str, tuple[Path, TensorInfo]]) -> ModelShape:
    family = about["general.architecture"]
    number = {key.removeprefix(f"{family}."): value for key, value in about.items() if key.startswith(f"{family}.")}
    vocab, width = places["token_embd.weight"][1].shape
    heads = number["attention.head_count"]
    return ModelShape(
        layers=number["block_count"],
        width=width,
        heads=heads,
        kv_heads=number.get("attention.head_count_kv", heads),
        head_width=number.get("attention.key_length", width // heads),
        inner=number["feed_forward_length"],
        vocab=vocab,
        context=number["context_length"],
        epsilon=round(number["attention.layer_norm_rms_epsilon"], 12),
        rope_base=number.get("rope.freq_base", 10000.0),
        tied="output.weight" not in places,
    )


def _names(file: Path, family: ModelFamily, places: Mapping[str, Any]) -> dict[str, str]:
    """New name → name in the file. A tensor that nobody would read is a model that nobody understood."""
    known = _LAYER | (_BIASES if family.biased else {})
    found = {}
    for old in places:
        block, _, rest = old.removeprefix("blk.").partition(".")
        new = f"model.layers.{block}.{known[rest]}" if old.startswith("blk.") and rest in known else _GLOBAL.get(old)
        if new is None:
            raise _cannot(file, f"nothing is known of its tensor {old}")
        found[new] = old
    return found


def _dequantized(file: Path, place: TensorInfo) -> Weights:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(place.kind)
    block, size = GGML_QUANT_SIZES[kind]
    *rows, columns = place.shape
    raw = np.memmap(file, np.uint8, "r", place.offset, (*rows, columns // block * size))
    return np.array(dequantize(raw, kind), np.float32)  # a copy: what is not quantized is still the read-only file


def _in_halves(weights: Weights, heads: int) -> Weights:
    rows, columns = weights.shape
    pairs = weights.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
