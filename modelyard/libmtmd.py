"""libmtmd, llama.cpp's library for images and audio, through ctypes: what we use of mtmd.h, declared here.

It is beside libllama if `modelyard setup --media` or `--build` has compiled it; the prebuilt packages have none. It is
linked to that libllama, and `load()` opens it once per process. Like libllama's, its structs are those of the pinned
release.
"""

from __future__ import annotations

import ctypes
import re
import threading
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_void_p,
)
from pathlib import Path
from typing import Any

from modelyard import libllama
from modelyard.library.llama_cpp_package import library_folder
from modelyard.plugins import MissingLibrary

TEXT_CHUNK, IMAGE_CHUNK, AUDIO_CHUNK = 0, 1, 2  # mtmd_input_chunk_type

mtmd_progress_callback = CFUNCTYPE(c_bool, c_float, c_void_p)


class mtmd_context_params(Structure):  # noqa: N801 the names of mtmd.h
    _fields_ = (
        ("use_gpu", c_bool),
        ("device", c_void_p),
        ("print_timings", c_bool),
        ("n_threads", c_int),
        ("image_marker", c_char_p),
        ("media_marker", c_char_p),
        ("flash_attn_type", c_int),
        ("warmup", c_bool),
        ("image_min_tokens", c_int),
        ("image_max_tokens", c_int),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("batch_max_tokens", c_int32),
        ("progress_callback", mtmd_progress_callback),
        ("progress_callback_user_data", c_void_p),
    )


class mtmd_input_part(Structure):  # noqa: N801
    _fields_ = (("text", c_void_p), ("bitmap", c_void_p))


class mtmd_decoder_pos(Structure):  # noqa: N801
    _fields_ = (("t", c_uint32), ("x", c_uint32), ("y", c_uint32), ("z", c_uint32))


class mtmd_helper_init_opt(Structure):  # noqa: N801 the options of a video, which we do not read
    _fields_ = (("fps_target", c_float), ("ffmpeg_bin_dir", c_char_p), ("timestamp_interval_ms", c_int64))


class mtmd_helper_bitmap_wrapper(Structure):  # noqa: N801
    _fields_ = (("bitmap", c_void_p), ("video_ctx", c_void_p))


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "mtmd_log_set": (None, [libllama.llama_log_callback, c_void_p]),
    "mtmd_helper_log_set": (None, [libllama.llama_log_callback, c_void_p]),
    "mtmd_context_params_default": (mtmd_context_params, []),
    "mtmd_init_from_file": (c_void_p, [c_char_p, c_void_p, mtmd_context_params]),
    "mtmd_free": (None, [c_void_p]),
    "mtmd_support_vision": (c_bool, [c_void_p]),
    "mtmd_support_audio": (c_bool, [c_void_p]),
    "mtmd_decode_use_mrope": (c_bool, [c_void_p]),
    "mtmd_decode_use_non_causal": (c_bool, [c_void_p, c_void_p]),
    "mtmd_helper_init_opt_default": (mtmd_helper_init_opt, []),
    "mtmd_helper_bitmap_init_from_buf": (
        mtmd_helper_bitmap_wrapper,
        [c_void_p, c_char_p, c_size_t, c_bool, mtmd_helper_init_opt],
    ),
    "mtmd_get_audio_sample_rate": (c_int, [c_void_p]),
    "mtmd_bitmap_init": (c_void_p, [c_uint32, c_uint32, c_char_p]),
    "mtmd_bitmap_init_from_audio": (c_void_p, [c_size_t, c_char_p]),
    "mtmd_bitmap_get_nx": (c_uint32, [c_void_p]),
    "mtmd_bitmap_get_ny": (c_uint32, [c_void_p]),
    "mtmd_bitmap_get_data": (c_void_p, [c_void_p]),
    "mtmd_bitmap_get_n_bytes": (c_size_t, [c_void_p]),
    "mtmd_bitmap_free": (None, [c_void_p]),
    "mtmd_input_chunks_init": (c_void_p, []),
    "mtmd_input_chunks_size": (c_size_t, [c_void_p]),
    "mtmd_input_chunks_get": (c_void_p, [c_void_p, c_size_t]),
    "mtmd_input_chunks_free": (None, [c_void_p]),
    "mtmd_tokenize_from_parts": (
        c_int32,
        [c_void_p, c_void_p, POINTER(POINTER(mtmd_input_part)), c_size_t, c_bool],
    ),
    "mtmd_input_chunk_get_type": (c_int, [c_void_p]),
    "mtmd_input_chunk_get_tokens_text": (POINTER(c_int32), [c_void_p, POINTER(c_size_t)]),
    "mtmd_input_chunk_get_tokens_image": (c_void_p, [c_void_p]),
    "mtmd_input_chunk_get_n_tokens": (c_size_t, [c_void_p]),
    "mtmd_input_chunk_get_n_pos": (c_int32, [c_void_p]),
    "mtmd_helper_image_get_decoder_pos": (None, [c_void_p, c_int32, POINTER(mtmd_decoder_pos)]),
    "mtmd_encode_chunk": (c_int32, [c_void_p, c_void_p]),
    "mtmd_get_output_embd": (POINTER(c_float), [c_void_p]),
}


class LibMtmd:
    """The loaded library: its functions by their names in mtmd.h. All calls release the GIL."""

    mtmd_input_part = mtmd_input_part
    mtmd_decoder_pos = mtmd_decoder_pos

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            raw = ctypes.CDLL(str(path))
        except OSError as error:
            raise MissingLibrary(f"{path} cannot be loaded: {error}") from error
        for name, declaration in _FUNCTIONS.items():
            setattr(self, name, libllama.declared(raw, name, declaration))
        params = self.mtmd_context_params_default()
        if (params.batch_max_tokens, params.image_min_tokens, params.image_max_tokens) != (1024, -1, -1):
            raise MissingLibrary(f"{path} is a release of libmtmd that this program does not know: build it again")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is not declared in modelyard/libmtmd.py")


# --- loading ----------------------------------------------------------------------------------------------------------

NOT_BUILT = "Images and audio need libmtmd, which is not built yet: `modelyard setup --media` compiles it."
_FILE = re.compile(r"(?:lib)?mtmd\.(?:so|dylib|dll)(?:\.[\d.]+)?")
_lock = threading.Lock()
_loaded: LibMtmd | None = None


def find_library(folder: Path | None = None) -> Path | None:
    """libmtmd's file beside the library that this machine loads, or in the folder. None: it was not built."""
    try:
        folder = folder or library_folder()
    except MissingLibrary:
        return None
    names = sorted((file.name for file in folder.glob("*mtmd*") if _FILE.fullmatch(file.name)), key=len)
    return folder / names[0] if names else None


def load() -> LibMtmd:
    global _loaded  # noqa: PLW0603
    with _lock:
        if _loaded is None:
            path = find_library(libllama.load().folder)
            if path is None:
                raise MissingLibrary(NOT_BUILT)
            _loaded = LibMtmd(path)
        return _loaded
