"""What a client's image or sound has to pass before libmtmd decodes it, here or in llama-server.

libmtmd allocates what a file's header says, and the process ends if that fails. It also ignores which side of a photo
is up, and what is transparent: Pillow applies both, if it is installed. A child process of the pool does all of it.
"""

from __future__ import annotations

import io
import struct
from importlib import import_module
from typing import Any

import imagesize

from modelyard.core.errors import InvalidRequest
from modelyard.processes.sandbox import Limits, Stopped, pool, sandboxed

_MAX_PIXELS = 1 << 26  # a small file may hold a picture that fills the memory
_MAX_RATIO = 200  # processors scale the longer side, and nothing remains of the other one
_PNG, _JPEG = b"\x89PNG", b"\xff\xd8\xff"
_KNOWN_IMAGES = (_PNG, _JPEG, b"GIF8", b"BM")  # libmtmd decodes them
_HEAD = 1 << 16  # the bytes of a file in which its metadata is looked for
_ORIENTATION = 0x0112

_MAX_SECONDS, _MIN_SECONDS = 2 * 60 * 60, 0.001  # libmtmd has an assertion against a sound of one sample
_MIN_RATE, _MAX_CHUNKS, _MAX_TAGS = 1000, 10_000, 16
_ADPCM, _EXTENSIBLE = (0x02, 0x11), 0xFFFE


# --- images -----------------------------------------------------------------------------------------------------------


def checked_image(data: bytes) -> bytes:
    """The image in a form that libmtmd reads as a person sees it."""
    try:
        return pool.call(convert, data) or data
    except Stopped as stopped:
        raise invalid("image", f"an image cannot be read: {stopped.why}") from None


def _image_size(data: bytes) -> tuple[int, int]:
    """Zeros if the header does not say it."""
    try:
        width, height = imagesize.get(io.BytesIO(data))
    except Exception:  # whatever a damaged header leads to
        return 0, 0
    return (width, abs(height)) if width > 0 and height != -1 else (0, 0)  # a negative height: a bitmap from its top


def _check_size(width: int, height: int) -> None:
    if width * height > _MAX_PIXELS:
        raise _too_large(f"an image of {width}x{height}")
    if max(width, height) > _MAX_RATIO * min(width, height):
        raise invalid(
            "image",
            f"an image of {width}x{height} is too narrow: its longer side may be {_MAX_RATIO} times the shorter one",
        )


def _too_large(what: str) -> InvalidRequest:
    return invalid("image", f"{what} is too large: at most {_MAX_PIXELS >> 20} million pixels are read")


def _needs_pillow(data: bytes) -> bool:
    """Whether the image may be turned or transparent."""
    if data.startswith(_PNG):
        has_alpha = data[25:26] in (b"\x04", b"\x06")
        return has_alpha or any(name in data[:_HEAD] for name in (b"tRNS", b"eXIf"))
    return data.startswith(_JPEG) and b"Exif\0\0" in data[:_HEAD]


def _pillow() -> Any:
    try:
        return import_module("PIL.Image")
    except ImportError:
        return None


def load_pillow() -> None:
    if _pillow() is not None:
        import_module("PIL.ImageOps")
        _pillow().init()


@sandboxed(Limits(cpu_s=30, memory=1536 << 20), load_pillow)
def convert(data: bytes) -> bytes | None:
    """As PNG; None if libmtmd reads the image as a person sees it."""
    if (image := seen_image(data)) is None:
        return None
    converted = io.BytesIO()
    image.save(converted, "PNG", compress_level=1)
    return converted.getvalue()


def seen_image(data: bytes) -> Any:
    """Upright, on white, as an image of Pillow; None if libmtmd reads it so. Runs in a child of the pool."""
    width, height = _image_size(data)
    _check_size(width, height)
    is_known = width > 0 and data.startswith(_KNOWN_IMAGES)
    if is_known and not _needs_pillow(data):
        return None
    if (pillow := _pillow()) is not None:
        return _seen(data, pillow)
    if is_known:
        return None
    raise invalid(
        "image",
        "an image is neither PNG, JPEG, GIF nor BMP; the server converts others if Pillow is installed there "
        "(pip install 'modelyard[media]')",
    )


def _seen(data: bytes, pillow: Any) -> Any:
    try:
        image = pillow.open(io.BytesIO(data))
        _check_size(*image.size)
        upright = import_module("PIL.ImageOps").exif_transpose(image)
        shown = _on_white(upright, pillow)
        is_same = image.getexif().get(_ORIENTATION, 1) in (0, 1) and shown is upright
        return None if is_same and data.startswith(_KNOWN_IMAGES) else shown.convert("RGB")
    except (InvalidRequest, MemoryError):
        raise
    except pillow.DecompressionBombError:
        raise _too_large("an image") from None
    except Exception as error:  # whatever damaged data leads to, in one of Pillow's many decoders
        raise invalid(
            "image", "an image cannot be read: its data is damaged, or of a kind that is not known"
        ) from error


def _on_white(image: Any, pillow: Any) -> Any:
    """The same image if nothing of it is transparent."""
    if not image.has_transparency_data:
        return image
    layer = image.convert("RGBA")
    if layer.getextrema()[3][0] == 255:
        return image
    return pillow.alpha_composite(pillow.new("RGBA", layer.size, "white"), layer)


# --- sounds -----------------------------------------------------------------------------------------------------------


def checked_audio(data: bytes) -> bytes:
    """libmtmd takes everything else for an image."""
    start = _after_tags(data)
    magic = data[start : start + 4]
    is_wave = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    is_flac = magic == b"fLaC"
    is_mp3 = (start > 0 and magic != b"OggS") or (data[:1] == b"\xff" and data[1:2] >= b"\xe0")
    if len(data) < 12 or not (is_wave or is_mp3 or is_flac):
        raise invalid("audio", "an audio part is neither WAV, MP3 nor FLAC")
    try:
        length = _wave_length(data) if is_wave else _flac_length(data, start) if is_flac else None
    except struct.error:
        raise invalid("audio", "an audio part cannot be read: its header is damaged") from None
    if length is not None:
        check_length(*length)
    return data


def check_length(samples: int, rate: int) -> None:
    if rate < _MIN_RATE:
        raise invalid("audio", f"an audio part has a sample rate of {rate} Hz; at least {_MIN_RATE} Hz are read")
    if samples > _MAX_SECONDS * rate:
        hours = _MAX_SECONDS // 3600
        raise invalid("audio", f"an audio part is {samples / rate:.0f} s long; at most {hours} hours are read")
    if samples < _MIN_SECONDS * rate:
        raise invalid("audio", "an audio part holds no sound, or does not say how long it is")


def _after_tags(data: bytes) -> int:
    """Where the sound begins after ID3 tags, which may also be before FLAC."""
    at = 0
    for _ in range(_MAX_TAGS):
        if data[at : at + 3] != b"ID3" or len(data) < at + 10:
            break
        size = 0
        for byte in data[at + 6 : at + 10]:
            size = size << 7 | byte & 0x7F
        at += 10 + size + (10 if data[at + 5] & 0x10 else 0)
    return at


def _wave_length(data: bytes) -> tuple[int, int]:
    """Samples of one channel, and samples per second. A size that is beyond the file's end means the rest of it."""
    at, form, rate, frame, counted = 12, 0, 0, 1, 0
    for _ in range(_MAX_CHUNKS):
        if at + 8 > len(data):
            break
        name, size = struct.unpack_from("<4sI", data, at)
        at += 8
        if name == b"fmt ":
            form, channels, rate, _, frame, bits = struct.unpack_from("<HHIIHH", data, at)
            if form == _EXTENSIBLE:
                (form,) = struct.unpack_from("<H", data, at + 24)
            if bits % 8 == 0:
                frame = channels * bits // 8
        elif name == b"fact":
            (counted,) = struct.unpack_from("<I", data, at)
        elif name == b"data":
            size = min(size, len(data) - at)
            # Compressed: half a byte for each sample, or as many as the file says.
            return (max(counted, 2 * size) if form in _ADPCM else size // max(1, frame)), rate
        at += size + size % 2
    raise struct.error("no data")


def _flac_length(data: bytes, start: int) -> tuple[int, int]:
    """Of the first block, which is always there. A stream without a length has zero samples, and is not read."""
    (packed,) = struct.unpack_from(">Q", data, start + 18)
    return packed & (1 << 36) - 1, packed >> 44


def invalid(kind: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, code=f"invalid_{kind}", param="messages")
