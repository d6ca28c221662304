"""A GGUF file's vocabulary as a Hugging Face folder has it: tokenizer.json, its settings, the chat template. Pure.

Byte-level BPE only. How text is cut into words before that goes by a name in the file, one of `_CUTS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from modelyard.core.errors import Unsupported

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>")


def _bytes(*, by_words: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": by_words}


def _split(digits: str) -> dict[str, Any]:
    words = rf"[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return {
        "type": "Split",
        "pattern": {"Regex": f"{_CONTRACTIONS}|{words}"},
        "behavior": "Isolated",
        "invert": False,
    }


_CUTS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_bytes(by_words=True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _bytes(by_words=True)],
    "qwen2": [_split(r"\p{N}"), _bytes(by_words=False)],
    "llama-bpe": [_split(r"\p{N}{1,3}"), _bytes(by_words=False)],
}


def files(about: Mapping[str, Any], context: int) -> Iterator[tuple[str, bytes]]:
    """Name and content of each."""
    yield "tokenizer.json", _json(_tokenizer(about))
    yield "tokenizer_config.json", _json(_config(about, context))
    yield "generation_config.json", _json(_generation(about))
    if template := about.get("tokenizer.chat_template"):
        yield "chat_template.jinja", template.encode()


def named(about: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, `unk_token` and `pad_token`, as far as the file names them."""
    tokens = about["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: about.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[id] for name, id in ids.items() if id is not None}


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=2)


def _tokenizer(about: Mapping[str, Any]) -> dict[str, Any]:
    model, cut = about.get("tokenizer.ggml.model"), about.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or cut not in _CUTS:
        raise Unsupported(
            f"a tokenizer of the kind {model} ({cut}) cannot be written as a tokenizer.json here; known are byte-level "
            f"ones cut as {', '.join(_CUTS)}. Convert the original model instead, with ct2-transformers-converter",
            code="model_not_convertible",
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(_added(about)),
        "normalizer": {"type": "NFC"} if cut == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _CUTS[cut]},
        "post_processor": _begin(about),
        "decoder": _bytes(by_words=True),
        "model": _merging(about, ignore_merges=cut == "llama-bpe"),
    }


def _merging(about: Mapping[str, Any], *, ignore_merges: bool) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": {token: id for id, token in enumerate(about["tokenizer.ggml.tokens"])},
        "merges": about["tokenizer.ggml.merges"],
    }


def _added(about: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    tokens = about["tokenizer.ggml.tokens"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for id, kind in enumerate(about.get("tokenizer.ggml.token_type", ())):
        if kind in (_CONTROL, _USER_DEFINED):
            yield {"id": id, "content": tokens[id], **plain, "special": kind == _CONTROL}


def _begin(about: Mapping[str, Any]) -> dict[str, Any] | None:
    if not about.get("tokenizer.ggml.add_bos_token"):
        return None
    id = about["tokenizer.ggml.bos_token_id"]
    text = about["tokenizer.ggml.tokens"][id]
    first = {"SpecialToken": {"id": text, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [id], "tokens": [text]}},
    }


def _config(about: Mapping[str, Any], context: int) -> dict[str, Any]:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(about.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    } | named(about)
    template = about.get("tokenizer.chat_template")
    return config | ({"chat_template": template} if template else {})


def _generation(about: Mapping[str, Any]) -> dict[str, Any]:
    """Every token that may end an answer: the file's own, and those of its family."""
    ids = {token: id for id, token in enumerate(about["tokenizer.ggml.tokens"])}
    ends = {ids[text] for text in _TURN_ENDS if text in ids} | {about.get("tokenizer.ggml.eos_token_id")}
    first = about.get("tokenizer.ggml.bos_token_id")
    return {"bos_token_id": first, "eos_token_id": sorted(id for id in ends if id is not None)}
