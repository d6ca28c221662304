"""Writes the files of a Hugging Face or CTranslate2 folder: tokenizer, chat template, configuration and weights."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from modelyard.core.errors import Unsupported
from modelyard_convert.gguf_model import GgufModel, Weights

# --- tokenizer and chat template --------------------------------------------------------------------------------------
#
# Byte-level BPE only. The file names its pre-tokenizer.

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(digits: str) -> dict[str, Any]:
    words = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    pattern = {"Regex": f"{_CONTRACTIONS}|{words}"}
    return {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}


_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_byte_level(use_regex=True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    "qwen2": [_split(r"\p{N}"), _byte_level(use_regex=False)],
    "llama-bpe": [_split(r"\p{N}{1,3}"), _byte_level(use_regex=False)],
}


def tokenizer_files(metadata: Mapping[str, Any], context: int) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the files."""
    yield "tokenizer.json", _json(_tokenizer(metadata))
    yield "tokenizer_config.json", _json(_config(metadata, context))
    yield "generation_config.json", _json(_generation(metadata))
    if template := metadata.get("tokenizer.chat_template"):
        yield "chat_template.jinja", template.encode()


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, `unk_token` and `pad_token`, if the file has them."""
    tokens = metadata["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[id] for name, id in ids.items() if id is not None}


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def _tokenizer(metadata: Mapping[str, Any]) -> dict[str, Any]:
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise Unsupported(
            f"a tokenizer of the type {model} ({pre}) cannot be converted here; supported is byte-level BPE with the "
            f"pre-tokenizers {', '.join(_PRE_TOKENIZERS)}. Convert the original model instead, with "
            "ct2-transformers-converter",
            code="model_not_convertible",
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added_tokens(metadata)),
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": _post_processor(metadata),
        "decoder": _byte_level(use_regex=True),
        "model": _bpe_model(metadata, ignore_merges=pre == "llama-bpe"),
    }


def _bpe_model(metadata: Mapping[str, Any], *, ignore_merges: bool) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])},
        "merges": metadata["tokenizer.ggml.merges"],
    }


def _added_tokens(metadata: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    tokens = metadata["tokenizer.ggml.tokens"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for id, kind in enumerate(metadata.get("tokenizer.ggml.token_type", ())):
        if kind in (_CONTROL, _USER_DEFINED):
            yield {"id": id, "content": tokens[id], **plain, "special": kind == _CONTROL}


def _post_processor(metadata: Mapping[str, Any]) -> dict[str, Any] | None:
    if not metadata.get("tokenizer.ggml.add_bos_token"):
        return None
    id = metadata["tokenizer.ggml.bos_token_id"]
    text = metadata["tokenizer.ggml.tokens"][id]
    first = {"SpecialToken": {"id": text, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]}},
    }


def _config(metadata: Mapping[str, Any], context: int) -> dict[str, Any]:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    } | special_tokens(metadata)
    template = metadata.get("tokenizer.chat_template")
    return config | ({"chat_template": template} if template else {})


def _generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """All tokens that may end a reply: the one of the file, and those of its family."""
    ids = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ends = {ids[text] for text in _TURN_ENDS if text in ids} | {metadata.get("tokenizer.ggml.eos_token_id")}
    first = metadata.get("tokenizer.ggml.bos_token_id")
    return {"bos_token_id": first, "eos_token_id": sorted(id for id in ends if id is not None)}


OnTensor = Callable[[int], None]  # called with the number of elements of each converted tensor

# --- Hugging Face -----------------------------------------------------------------------------------------------------

_SAFETENSORS_TYPES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}


def write_hf(model: GgufModel, folder: Path, dtype: str, on_tensor: OnTensor) -> None:
    """config.json, and the weights as safetensors with one tensor in memory at a time."""
    (folder / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(_hf_config(model, dtype)), indent=2))
    with (folder / "model.safetensors").open("wb") as out:
        out.write(_safetensors_header(model, dtype))
        for _, weights in model:
            out.write(_to_bytes(weights, dtype))
            on_tensor(weights.size)


def _hf_config(model: GgufModel, dtype: str) -> dict[str, Any]:
    shape, metadata = model.shape, model.metadata
    return {
        "architectures": [model.family.architecture],
        "model_type": model.family.model_type,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tied_embeddings,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
        "torch_dtype": dtype,
        "use_cache": True,
    }


def _safetensors_header(model: GgufModel, dtype: str) -> bytes:
    """Names, types and offsets as JSON after its length; spaces align the data to 8 bytes."""
    kind, size = _SAFETENSORS_TYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in model.shapes.items():
        end = start + prod(shape) * size
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _to_bytes(weights: Weights, dtype: str) -> bytes:
    if dtype != "bfloat16":
        return weights.astype(dtype).tobytes()
    bits = weights.view(np.uint32)  # bfloat16 is the upper half, rounded to nearest, ties to even
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


# --- CTranslate2 ------------------------------------------------------------------------------------------------------


def write_ct2(model: GgufModel, folder: Path, quantization: str, on_tensor: OnTensor) -> None:
    """Uses CTranslate2's model specification, which needs neither torch nor transformers."""
    from ctranslate2.specs import common_spec, transformer_spec

    shape = model.shape
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        shape.layers,
        shape.heads,
        activation=common_spec.Activation.SWISH,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=0,  # the whole head
        rotary_interleave=False,
        rotary_base=shape.rope_theta,
        num_heads_kv=None if shape.kv_heads == shape.heads else shape.kv_heads,
        head_dim=None if shape.head_dim * shape.heads == shape.hidden_size else shape.head_dim,
        quant_type=common_spec.Quantization.CT2,
    )
    _set_weights(spec.decoder, model, on_tensor)
    # A model may have more rows than its vocabulary has tokens.
    tokens = list(model.metadata["tokenizer.ggml.tokens"])
    spec.register_vocabulary(tokens + [f"<extra_id_{n}>" for n in range(shape.vocab_size - len(tokens))])
    names = special_tokens(model.metadata)
    spec.config.bos_token = names.get("bos_token", "")
    spec.config.eos_token = names.get("eos_token", "")
    spec.config.unk_token = names.get("unk_token", "")
    spec.config.layer_norm_epsilon = shape.rms_norm_eps
    spec.validate()
    spec.optimize(quantization)
    spec.save(str(folder))


def _set_weights(decoder: Any, model: GgufModel, on_tensor: OnTensor) -> None:
    def tensor(name: str) -> Any:
        weights = model[name]
        on_tensor(weights.size)
        return weights

    def fused_qkv(layer: str, kind: str) -> Any:
        names = [f"{layer}.self_attn.{x}_proj.{kind}" for x in "qkv"]
        return np.concatenate([tensor(name) for name in names]) if names[0] in model.shapes else None

    decoder.scale_embeddings = False
    decoder.embeddings.weight = tensor("model.embed_tokens.weight")
    decoder.layer_norm.gamma = tensor("model.norm.weight")
    decoder.projection.weight = decoder.embeddings.weight if model.shape.tied_embeddings else tensor("lm_head.weight")
    for number, layer in enumerate(decoder.layer):
        name, attention, ffn = f"model.layers.{number}", layer.self_attention, layer.ffn
        attention.layer_norm.gamma = tensor(f"{name}.input_layernorm.weight")
        attention.linear[0].weight = fused_qkv(name, "weight")
        if (bias := fused_qkv(name, "bias")) is not None:
            attention.linear[0].bias = bias
        attention.linear[1].weight = tensor(f"{name}.self_attn.o_proj.weight")
        ffn.layer_norm.gamma = tensor(f"{name}.post_attention_layernorm.weight")
        ffn.linear_0.weight = tensor(f"{name}.mlp.gate_proj.weight")
        ffn.linear_0_noact.weight = tensor(f"{name}.mlp.up_proj.weight")
        ffn.linear_1.weight = tensor(f"{name}.mlp.down_proj.weight")
