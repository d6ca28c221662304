"""Files that libmtmd would read wrongly, or not survive."""

from __future__ import annotations

import io
import struct
import wave
from typing import Any

import pytest
from PIL import Image

from modelyard.core.errors import InvalidRequest
from modelyard.engines import media_checks
from modelyard.engines.media_checks import checked_audio, checked_image, convert


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    data = io.BytesIO()
    image.save(data, format, **options)
    return data.getvalue()


def refusal(check: Any, data: bytes) -> str:
    with pytest.raises(InvalidRequest) as raised:
        check(data)
    return raised.value.message


def shown(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(checked_image(data)))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP"])
def test_what_libmtmd_decodes_is_left_as_it_is(format: str) -> None:
    data = encoded(Image.new("RGB", (8, 4)), format)
    assert checked_image(data) is data


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_a_photo_that_was_taken_upright_is_seen_upright(format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    assert shown(encoded(Image.new("RGB", (8, 4)), format, exif=exif)).size == (4, 8)
    exif[0x0112] = 1
    assert shown(encoded(Image.new("RGB", (8, 4)), format, exif=exif)).size == (8, 4)


@pytest.mark.parametrize(("mode", "color"), [("RGBA", (0, 0, 0, 0)), ("LA", (0, 0))])
def test_what_is_transparent_is_white(mode: str, color: tuple[int, ...]) -> None:
    for format in ("PNG", "WEBP"):
        assert shown(encoded(Image.new(mode, (8, 4), color), format)).getpixel((1, 1)) == (255, 255, 255)


def test_an_opaque_image_with_an_alpha_channel_is_not_encoded_again() -> None:
    data = encoded(Image.new("RGBA", (8, 4), (1, 2, 3, 255)), "PNG")
    assert checked_image(data) is data


@pytest.mark.parametrize("format", ["ICO", "TGA", "TIFF", "WEBP"])
def test_other_formats_are_converted(format: str) -> None:
    assert shown(encoded(Image.new("RGB", (16, 16), (9, 9, 9)), format)).getpixel((1, 1)) == (9, 9, 9)


TGA = struct.pack("<BBBHHBHHHHBB", 0, 0, 10, 0, 0, 0, 0, 0, 26000, 26000, 24, 0)
BMP = b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 20000, -20000, 1, 24, 0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("data", [TGA, BMP])
def test_a_small_file_with_a_huge_image_is_refused_by_its_header(data: bytes) -> None:
    assert "too large: at most 64 million pixels" in refusal(checked_image, data)


def test_an_image_like_a_line_is_refused_in_plain_words() -> None:
    data = encoded(Image.new("RGB", (2, 402)), "PNG")
    assert refusal(checked_image, data) == (
        "an image of 2x402 is too narrow: its longer side may be 200 times the shorter one"
    )


@pytest.mark.parametrize(
    "data", [b"<svg width='9' height='9'></svg>", b"<html>", encoded(Image.new("L", (9, 9)), "WEBP")[:40]]
)
def test_what_is_no_image_is_refused_in_plain_words(data: bytes) -> None:
    assert refusal(checked_image, data) == (
        "an image cannot be read: its data is damaged, or of a kind that is not known"
    )


def test_without_pillow_known_formats_are_read_and_others_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("RGBA", (8, 4)), "PNG")
    monkeypatch.setattr(media_checks, "_pillow", lambda: None)
    assert convert(data) is None
    for other in (TGA, b"RIFF1234WEBP"):
        assert "pip install 'modelyard[media]'" in refusal(convert, other)


def sound(samples: int, rate: int = 16000) -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(1)
        file.setframerate(rate)
        file.writeframes(b"\x80" * samples)
    return data.getvalue()


def compressed(samples: int) -> bytes:
    """A WAV file of ADPCM that says how many samples it has."""
    head = struct.pack("<HHIIHH", 2, 1, 16000, 8000, 256, 4)
    chunks = ((b"fmt ", head), (b"fact", struct.pack("<I", samples)), (b"data", bytes(512)))
    return b"RIFF\0\0\0\0WAVE" + b"".join(name + struct.pack("<I", len(body)) + body for name, body in chunks)


def flac(samples: int, rate: int = 16000) -> bytes:
    return b"fLaC\x80\0\0\x22" + bytes(10) + (rate << 44 | 15 << 36 | samples).to_bytes(8, "big") + bytes(16)


@pytest.mark.parametrize("data", [sound(100), sound(100)[:40] + b"\xff" * 4 + bytes(99), compressed(900), flac(16000)])
def test_a_sound_is_read_if_its_length_is_known(data: bytes) -> None:
    assert checked_audio(data) is data


TAG = b"ID3\x04\0\0\0\0\0\x05 tag "


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (sound(10**6, 1), "a sample rate of 1 Hz"),
        (sound(8 * 10**6, 1000), "8000 s long"),
        (compressed(2**32 - 1), "s long"),
        (flac(2**36 - 1), "s long"),
        (TAG + flac(2**36 - 1), "s long"),
        (sound(1), "holds no sound"),
        (flac(0), "holds no sound"),
        (sound(9)[:30], "its header is damaged"),
        (b"fLaC" + bytes(9), "its header is damaged"),
        (TAG + b"OggS" + bytes(99), "neither WAV, MP3 nor FLAC"),
    ],
)
def test_a_sound_that_would_end_the_process_is_refused(data: bytes, reason: str) -> None:
    assert reason in refusal(checked_audio, data)
