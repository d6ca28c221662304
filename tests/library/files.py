"""Small GGUF files with a valid header and no usable weights."""

from __future__ import annotations

import struct
from pathlib import Path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def number(name: str, value: int) -> bytes:
    return text(name) + struct.pack("<II", 4, value)


def gguf_bytes(*, quant: int = 15, template: str | None = None) -> bytes:
    """Architecture "toy", 2 layers, 512 tokens of context, a vocabulary, two tensors with 600 elements in all."""
    entries = [
        text("general.architecture") + struct.pack("<I", 8) + text("toy"),
        text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
        text("tokenizer.ggml.scores") + struct.pack("<IIQ2f", 9, 6, 2, 0.0, 1.0),
        number("general.file_type", quant),
        number("toy.context_length", 512),
        number("toy.block_count", 2),
    ]
    if template is not None:
        entries.append(text("tokenizer.chat_template") + struct.pack("<I", 8) + text(template))
    tensors = [
        text("one") + struct.pack("<IQQIQ", 2, 10, 50, 0, 0),
        text("two") + struct.pack("<IQIQ", 1, 100, 0, 2000),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
    return head + b"".join(entries) + b"".join(tensors) + b"\0" * 64


def write_gguf(path: Path, *, quant: int = 15, template: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gguf_bytes(quant=quant, template=template))
    return path
