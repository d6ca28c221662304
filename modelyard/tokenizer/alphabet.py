"""The bytes behind a token's spelling, for the tokenizer families whose decoder works token by token.

- byte level (GPT-2's alphabet): every byte has a printable character of its own, «Ġ» is a space;
- sentencepiece: «▁» is a space, `<0xNN>` one byte where the decoder falls back to bytes;
- anything else: no bytes of its own, only the decoder knows.
"""

from __future__ import annotations

import re
from typing import Any, Literal

Family = Literal["byte_level", "sentencepiece", "other"]

_PRINTABLE = (range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100))
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def _byte_of_character() -> dict[str, int]:
    """Printable Latin-1 stands for itself, the other bytes follow from U+0100 on."""
    own = [byte for run in _PRINTABLE for byte in run]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + n): byte for n, byte in enumerate(others)}


BYTE_OF = _byte_of_character()


def decoder_parts(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]


def family_of(decoder: dict[str, Any] | None) -> Family:
    parts = decoder_parts(decoder)
    types = {part.get("type") for part in parts}
    if types == {"ByteLevel"}:
        return "byte_level"
    if types and types <= _SENTENCEPIECE and all(_turns_only_the_space(part) for part in parts):
        return "sentencepiece"
    return "other"


def _turns_only_the_space(part: dict[str, Any]) -> bool:
    if part["type"] == "Replace":
        return part.get("pattern") == {"String": "▁"} and part.get("content") == " "
    if part["type"] == "Metaspace":
        return bool(part.get("replacement", "▁") == "▁")
    return part["type"] != "Strip" or part.get("content") == " "


def byte_level(spelling: str) -> bytes:
    try:
        return bytes([BYTE_OF[character] for character in spelling])
    except KeyError:  # not in the alphabet: a token that was added as it reads
        return spelling.encode()


def sentencepiece(spelling: str, byte_fallback: bool) -> bytes:
    if byte_fallback and (found := _BYTE.fullmatch(spelling)):
        return bytes.fromhex(found[1])
    return spelling.replace("▁", " ").encode()
