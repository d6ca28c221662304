"""Loads the weights, with the reason in llama.cpp's own words when that fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from modelyard.core.errors import InvalidRequest
from modelyard.engines.llama_cpp.binding import lib
from modelyard.vocab import llama_log

lib.llama_backend_init()


def load(path: Path, n_gpu_layers: int, use_mmap: bool, on_progress: Callable[[float], None] | None = None) -> Any:
    params = lib.llama_model_default_params()
    params.n_gpu_layers = n_gpu_layers
    params.load_mode = 1 if use_mmap else 0
    report = lib.llama_progress_callback(lambda done, _: _told(on_progress, done))
    params.progress_callback = report
    llama_log.forget()
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise InvalidRequest(f"{path} cannot be loaded: {llama_log.reason()}", code="model_unreadable")
    return model


def _told(on_progress: Callable[[float], None] | None, done: float) -> bool:
    """llama.cpp goes on loading as long as this says True."""
    if on_progress is not None:
        on_progress(done)
    return True
