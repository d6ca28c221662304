"""ExLlamaV3 and torch, imported when a model is loaded: the first import on a machine compiles kernels for minutes."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from modelyard.plugins import MissingLibrary


class Library(Struct, frozen=True):
    exl: Any
    torch: Any


def load() -> Library:
    try:
        import exllamav3
        import torch
    except Exception as error:  # a compiler that is not there, no GPU, versions that do not fit: it raises all kinds
        told = str(error).strip().splitlines()
        raise MissingLibrary(
            f"ExLlamaV3 does not work here: {told[-1] if told else type(error).__name__}. It needs an NVIDIA GPU, a "
            "CUDA build of torch and, to compile itself once, nvcc"
        ) from error
    return Library(exllamav3, torch)
