from __future__ import annotations

from typing import Any

import pytest
from tokenizers import pre_tokenizers

from modelyard.tokenizer import alphabet


def test_the_alphabet_has_a_character_for_each_byte() -> None:
    assert sorted(alphabet.BYTE_OF.values()) == list(range(256))
    assert set(alphabet.BYTE_OF) == set(pre_tokenizers.ByteLevel.alphabet())


def test_spellings_become_bytes() -> None:
    assert alphabet.byte_level("Ġfox") == b" fox"
    assert alphabet.byte_level("｜x") == "｜x".encode()
    assert alphabet.sentencepiece("▁fox", True) == b" fox"
    assert alphabet.sentencepiece("<0xE2>", True) == b"\xe2"
    assert alphabet.sentencepiece("<0xE2>", False) == b"<0xE2>"


@pytest.mark.parametrize(
    ("decoder", "family"),
    [
        (None, "other"),
        ({"type": "ByteLevel"}, "byte_level"),
        ({"type": "WordPiece"}, "other"),
        ({"type": "Metaspace", "replacement": "▁"}, "sentencepiece"),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}, "sentencepiece"),
        ({"type": "Replace", "pattern": {"String": "_"}, "content": " "}, "other"),
        ({"type": "Sequence", "decoders": []}, "other"),
    ],
)
def test_the_family_is_told_by_the_decoder(decoder: dict[str, Any] | None, family: str) -> None:
    assert alphabet.family_of(decoder) == family
