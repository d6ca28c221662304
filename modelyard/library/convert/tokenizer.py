"""Converts the vocabulary of a GGUF file to tokenizer.json, its configuration and the chat template. Pure.

Byte-level BPE only. The pre-tokenizer is selected by its name in the file (`_PRE_TOKENIZERS`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from modelyard.core.errors import Unsupported

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(digits: str) -> dict[str, Any]:
    words = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return {
        "type": "Split",
        "pattern": {"Regex": f"{_CONTRACTIONS}|{words}"},
        "behavior": "Isolated",
        "invert": False,
    }


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
