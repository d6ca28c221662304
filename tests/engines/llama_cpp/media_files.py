"""Small pictures and sounds, and the library that reads them."""

from __future__ import annotations

import hashlib
import io
import math
import struct
import wave
from functools import cache
from typing import Literal

from PIL import Image, ImageDraw

from modelyard.core.engine import Media
from modelyard.library import media_build
from modelyard.library.llama_cpp_package import library_folder


@cache
def require_libmtmd() -> None:
    """Compiled at its first use, as `modelyard setup --media` does."""
    media_build.build(library_folder())


def picture(seed: int, size: tuple[int, int] = (64, 48), format: str = "PNG") -> bytes:
    image = Image.new("RGB", size, (seed * 37 % 256, seed * 91 % 256, 200))
    ImageDraw.Draw(image).ellipse((5 + seed, 5, 40, 40), fill=(255 - seed * 20 % 256, 30, seed * 60 % 256))
    data = io.BytesIO()
    image.save(data, format)
    return data.getvalue()


def sound(seed: int, seconds: float = 0.5) -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16000)
        values = (int(8000 * math.sin(2 * math.pi * 200 * seed * at / 16000)) for at in range(int(16000 * seconds)))
        file.writeframes(b"".join(struct.pack("<h", value) for value in values))
    return data.getvalue()


def media(kind: Literal["image", "audio"], seed: int = 1) -> Media:
    return as_media(kind, picture(seed) if kind == "image" else sound(seed))


def as_media(kind: Literal["image", "audio"], data: bytes) -> Media:
    return Media(kind, hashlib.sha256(data).hexdigest(), data, 0)
