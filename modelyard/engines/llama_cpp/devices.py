"""Whether the built library can compute on GPUs, told by its files: nothing of it is loaded to find out.

What `make install` builds computes on CPUs, also on a machine that has GPUs: its models lie in RAM, and are counted
there.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from msgspec import structs

from modelyard.core.engine import AvailableMemory
from modelyard.engines.llama_cpp.verdict import library_folder
from modelyard.plugins import MissingLibrary

_BACKENDS = ("cann", "cuda", "hip", "metal", "musa", "opencl", "sycl", "vulkan")


@cache
def computes_on_gpus(folder: Path) -> bool:
    return any(any(folder.glob(f"*ggml-{backend}*")) for backend in _BACKENDS)


def uses_gpus(layers: int) -> bool:
    """With so many layers to be put there; a library that is not there at all uses none."""
    try:
        return layers != 0 and computes_on_gpus(library_folder())
    except MissingLibrary:
        return False


def seen(machine: AvailableMemory) -> AvailableMemory:
    """The machine as this library sees it."""
    return machine if uses_gpus(-1) else structs.replace(machine, gpus={})
