"""Images and sounds of clients become pixels and samples in a child process of the pool: the files are untrusted, and a
fault of a decoder ends its process.

libmtmd decodes images there as it would here. It decodes a sound only with a loaded model, so the package miniaudio
does: the library of this name is also inside libmtmd, and the samples differ by 2e-5 at most.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from modelyard import libmtmd
from modelyard.engines import media_checks
from modelyard.engines.media_checks import checked_audio, invalid
from modelyard.plugins import MissingLibrary
from modelyard.processes.sandbox import Limits, Stopped, pool, sandboxed

_DAMAGED = "its data is damaged, or of a kind that is not known"


def decoded_image(data: bytes) -> tuple[int, int, bytes]:
    """Width, height, and three bytes for each pixel."""
    width, height, pixels = _in_child("an image", "image", decode_image, data)
    if min(width, height) < 1 or len(pixels) != 3 * width * height:  # libmtmd believes the numbers of a broken child
        raise invalid("image", f"an image cannot be read: {_DAMAGED}")
    return width, height, pixels


def decoded_audio(data: bytes, rate: int) -> bytes:
    """Samples of one channel, as floats of four bytes."""
    if find_spec("miniaudio") is None:
        raise invalid(
            "audio", "a sound cannot be read here yet: install the extra on the server (pip install 'modelyard[media]')"
        )
    samples: bytes = _in_child("an audio part", "audio", decode_audio, data, rate)
    return samples


def _in_child(what: str, kind: str, function: Any, *args: object) -> Any:
    try:
        return pool.call(function, *args)
    except Stopped as stopped:
        raise invalid(kind, f"{what} cannot be read: {stopped.why}") from None


# --- in a child of the pool -------------------------------------------------------------------------------------------


@cache
def _library() -> libmtmd.LibMtmd:
    """Without llama.cpp's devices, which take memory and time, and are not needed for it."""
    path = libmtmd.find_library()
    if path is None:
        raise MissingLibrary("libmtmd is not there any more: `modelyard setup --media` compiles it")
    return libmtmd.LibMtmd(path)


def _load_image_decoders() -> None:
    _library()
    media_checks.load_pillow()


@sandboxed(Limits(cpu_s=5, memory=1536 << 20), _load_image_decoders)
def decode_image(data: bytes) -> tuple[int, int, bytes]:
    if (image := media_checks.seen_image(data)) is not None:
        return (*image.size, image.tobytes())
    mtmd = _library()
    found = mtmd.mtmd_helper_bitmap_init_from_buf(None, data, len(data), False, mtmd.mtmd_helper_init_opt_default())
    if not found.bitmap:
        raise invalid("image", f"an image cannot be read: {_DAMAGED}")
    pixels = ctypes.string_at(mtmd.mtmd_bitmap_get_data(found.bitmap), mtmd.mtmd_bitmap_get_n_bytes(found.bitmap))
    return mtmd.mtmd_bitmap_get_nx(found.bitmap), mtmd.mtmd_bitmap_get_ny(found.bitmap), pixels


def _load_audio_decoder() -> None:
    import_module("miniaudio")


@sandboxed(Limits(cpu_s=60, wall_s=120, memory=1536 << 20), _load_audio_decoder)
def decode_audio(data: bytes, rate: int) -> bytes:
    checked_audio(data)
    miniaudio = import_module("miniaudio")
    try:
        sound = miniaudio.decode(data, miniaudio.SampleFormat.FLOAT32, nchannels=1, sample_rate=rate)
    except miniaudio.MiniaudioError:
        raise invalid("audio", f"an audio part cannot be read: {_DAMAGED}") from None
    samples: bytes = sound.samples.tobytes()
    media_checks.check_length(len(samples) // 4, rate)
    return samples
