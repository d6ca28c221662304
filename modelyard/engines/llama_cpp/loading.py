"""Loads the weights, with the reason in llama.cpp's own words when that fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelyard.core.errors import InvalidRequest
from modelyard.engines.llama_cpp.binding import lib

_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_lines: deque[str] = deque(maxlen=50)


def _listen(level: int, text: bytes | None, _: Any) -> None:
    """llama.cpp says why a file is bad only here."""
    if level >= _ERROR and text:
        _lines.append(text.decode("utf-8", "replace").strip())


_listener = lib.llama_log_callback(_listen)  # held for good: C keeps its address
lib.llama_backend_init()
lib.llama_log_set(_listener, None)


def load(path: Path, n_gpu_layers: int, use_mmap: bool, on_progress: Callable[[float], None] | None = None) -> Any:
    params = lib.llama_model_default_params()
    params.n_gpu_layers = n_gpu_layers
    params.load_mode = 1 if use_mmap else 0
    report = lib.llama_progress_callback(lambda done, _: _told(on_progress, done))
    params.progress_callback = report
    _lines.clear()
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise InvalidRequest(f"{path} cannot be loaded: {reason()}", code="model_unreadable")
    return model


def reason() -> str:
    told = [line for line in _lines if "error loading model" in line or "failed" in line]
    return (told or list(_lines) or ["llama.cpp gave no reason"])[0]


def _told(on_progress: Callable[[float], None] | None, done: float) -> bool:
    """llama.cpp goes on loading as long as this says True."""
    if on_progress is not None:
        on_progress(done)
    return True
