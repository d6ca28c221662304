"""Small real tokenizers, trained on the spot: no hub, no files."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. system user assistant tool",
    "def add(a, b):\n    return a + b  # sums, naïve café, 你好 世界, 👋🏽 emoji\n\n",
    "<p>not a control token</p> {'name': 'x', \"arguments\": [1, 2, 3]}",
] * 8
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


def control_tokens() -> list[AddedToken]:
    return [AddedToken(text, normalized=False, special=True) for text in CONTROLS]


def byte_level(*, prefix_space: bool = False) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=450,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=control_tokens(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKERS])
    return str(tokenizer.to_str())


def metaspace(scheme: str) -> str:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", *fallback], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(control_tokens())
    return edited(str(tokenizer.to_str()), drop=set(fallback))


def legacy_llama() -> str:
    """A space is put before every stretch by the normalizer, and control tokens are searched after it."""
    made = json.loads(metaspace("never"))
    made["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    made["pre_tokenizer"] = None
    return json.dumps(made)


def word_piece() -> str:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    specials = [AddedToken(text, normalized=False, special=True) for text in ("[UNK]", "[CLS]", "[SEP]")]
    tokenizer.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials, show_progress=False)
    )
    return str(tokenizer.to_str())


def unigram() -> str:
    """A tokenizer whose control tokens are also words of its model."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((character, -5.0) for character in "▁</s>abcde"), ("▁abc", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>", normalized=False, special=True)])
    return str(tokenizer.to_str())


def edited(text: str, *, drop: set[str] = frozenset(), **flags: Any) -> str:  # type: ignore[assignment]
    """The same tokenizer with some added tokens dropped and flags of the others set."""
    made = json.loads(text)
    made["added_tokens"] = [token | flags for token in made["added_tokens"] if token["content"] not in drop]
    return json.dumps(made)
