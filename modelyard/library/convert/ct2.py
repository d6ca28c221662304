"""Writes a CTranslate2 folder, through CTranslate2's own description of a decoder: neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from ctranslate2.specs import common_spec, transformer_spec

from modelyard.library.convert.gguf_model import GgufModel
from modelyard.library.convert.hf import OnTensor
from modelyard.library.convert.tokenizer import named

TYPES = ("int8", "int8_float32", "int8_float16", "int16", "float16", "float32")  # bfloat16 would need torch


class _Filling:
    def __init__(self, source: GgufModel, on_tensor: OnTensor) -> None:
        self._source, self._on_tensor = source, on_tensor
        self._known = source.sizes.keys()

    def __call__(self, name: str) -> Any:
        weights = self._source[name]
        self._on_tensor(weights.size)
        return weights

    def fused(self, layer: str, kind: str) -> Any:
        """Queries, keys and values, which CTranslate2 computes in one go."""
        names = [f"{layer}.self_attn.{x}_proj.{kind}" for x in "qkv"]
        return np.concatenate([self(name) for name in names]) if names[0] in self._known else None


def write(source: GgufModel, folder: Path, quantization: str, on_tensor: OnTensor) -> None:
    spec = _empty(source)
    _fill(spec.decoder, source, _Filling(source, on_tensor))
    spec.register_vocabulary(_words(source))
    names = named(source.metadata)
    spec.config.bos_token = names.get("bos_token", "")
    spec.config.eos_token = names.get("eos_token", "")
    spec.config.unk_token = names.get("unk_token", "")
    spec.config.layer_norm_epsilon = source.shape.epsilon
    spec.validate()
    spec.optimize(quantization)
    spec.save(str(folder))


def _empty(source: GgufModel) -> Any:
    shape = source.shape
    return transformer_spec.TransformerDecoderModelSpec.from_config(
        shape.layers,
        shape.heads,
        activation=common_spec.Activation.SWISH,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,  # all of a head
        rotary_interleave=False,
        rotary_base=shape.rope_base,
        num_heads_kv=None if shape.kv_heads == shape.heads else shape.kv_heads,
        head_dim=None if shape.head_width * shape.heads == shape.width else shape.head_width,
        quant_type=common_spec.Quantization.CT2,
    )


def _fill(decoder: Any, source: GgufModel, take: _Filling) -> None:
    decoder.scale_embeddings = False
    decoder.embeddings.weight = take("model.embed_tokens.weight")
    decoder.layer_norm.gamma = take("model.norm.weight")
    decoder.projection.weight = decoder.embeddings.weight if source.shape.tied else take("lm_head.weight")
    for number, layer in enumerate(decoder.layer):
        _fill_layer(layer, f"model.layers.{number}", take)


def _fill_layer(layer: Any, name: str, take: _Filling) -> None:
    attention, ffn = layer.self_attention, layer.ffn
    attention.layer_norm.gamma = take(f"{name}.input_layernorm.weight")
    attention.linear[0].weight = take.fused(name, "weight")
    if (bias := take.fused(name, "bias")) is not None:
        attention.linear[0].bias = bias
    attention.linear[1].weight = take(f"{name}.self_attn.o_proj.weight")
    ffn.layer_norm.gamma = take(f"{name}.post_attention_layernorm.weight")
    ffn.linear_0.weight = take(f"{name}.mlp.gate_proj.weight")
    ffn.linear_0_noact.weight = take(f"{name}.mlp.up_proj.weight")
    ffn.linear_1.weight = take(f"{name}.mlp.down_proj.weight")


def _words(source: GgufModel) -> list[str]:
    """One for each row: models have more rows than their vocabularies have words."""
    words = source.tokens
    return words + [f"<extra_id_{n}>" for n in range(source.shape.vocab - len(words))]
