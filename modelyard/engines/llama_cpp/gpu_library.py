"""Chooses the prebuilt llama.cpp library for this machine's GPU, fetches it, and tries it before it is used.

    Mac      Metal
    NVIDIA   CUDA 13 ─→ CUDA 12, by the code that each has ─→ Vulkan
    others   Vulkan

A library is used only after it has decoded a model on the GPU in a child process. Else the next one is tried; what
remains is a build on this machine, or the CPU. Each step is reported in one sentence.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from modelyard.core.errors import ModelyardError
from modelyard.engines.llama_cpp import selftest
from modelyard.engines.llama_cpp.selftest import SelfTest
from modelyard.libllama import VULKAN_MANIFEST
from modelyard.library.cuda_package import CUDA_BUILDS, fetch_cuda, misfit
from modelyard.library.llama_cpp_package import Variant, fetch, packages_for, this_platform, use_library
from modelyard.library.progress import ProgressReporter
from modelyard.telemetry.gpus import EGL_MANIFEST, FoundGpus, NvidiaDriver, find_gpus

TITLES: dict[Variant, str] = {
    "cpu": "the library for CPUs",
    "cuda": "the CUDA 13 library",
    "cuda12": "the CUDA 12 library",
    "vulkan": "the Vulkan library",
    "metal": "the Metal library",
}
BUILD_COMMAND = "CMAKE_ARGS=-DGGML_CUDA=ON modelyard setup --build"


class Candidate(Struct, frozen=True):
    """A library and why this machine cannot use it; None: it can be tried."""

    variant: Variant
    misfit: str | None = None


def candidates(found: FoundGpus, place: str | None = None) -> list[Candidate]:
    """The libraries for the GPUs of this machine, the best first. None without a GPU."""
    place = place or this_platform()
    listed = list(_candidates(found))
    return [c if packages_for(c.variant, place) else Candidate(c.variant, f"there is none for {place}") for c in listed]


def _candidates(found: FoundGpus) -> Iterator[Candidate]:
    if found.apple is not None:
        yield Candidate("metal")
        return
    if not isinstance(found.nvidia, str) and found.nvidia.gpus:
        for build in CUDA_BUILDS:
            reasons = [misfit(build, gpu.compute_capability, found.nvidia.cuda) for gpu in found.nvidia.gpus]
            yield Candidate(build.variant, next(filter(None, reasons), None))
    if found.vulkan_gpus:
        yield Candidate("vulkan")
    elif found.nvidia_gpus or found.without_driver:
        reason = found.vulkan if isinstance(found.vulkan, str) else "Vulkan finds no GPU"
        yield Candidate("vulkan", reason)


def fetch_variant(variant: Variant, progress: ProgressReporter | None = None, *, egl: bool = False) -> Path:
    """The folder of a library, downloaded if necessary. With `egl` Vulkan starts NVIDIA's driver without X11."""
    for build in CUDA_BUILDS:
        if build.variant == variant:
            return fetch_cuda(build, progress)
    folder = fetch(packages_for(variant)[0], progress)
    if egl and variant == "vulkan":
        (folder / VULKAN_MANIFEST).write_text(json.dumps(EGL_MANIFEST), "utf-8")
    return folder


Report = Callable[[str], None]
Fetcher = Callable[..., Path]
Examiner = Callable[[Path], SelfTest]


def install(
    report: Report,
    progress: ProgressReporter | None = None,
    variants: tuple[Variant, ...] | None = None,
    found: FoundGpus | None = None,
    fetcher: Fetcher = fetch_variant,
    examine: Examiner = lambda folder: selftest.examine_library(folder=folder, gpu=True),
) -> Path | None:
    """Fetch and use the first library that decodes on this machine's GPU; None: there is none. `variants` are tried
    whatever was found."""
    found = found or find_gpus()
    listed = candidates(found) if variants is None else [Candidate(variant) for variant in variants]
    for candidate in listed:
        title = TITLES[candidate.variant]
        if candidate.misfit is not None:
            report(f"{title} is skipped: {candidate.misfit}")
            continue
        try:
            folder = fetcher(candidate.variant, progress, egl=found.needs_egl)
        except ModelyardError as error:
            report(f"{title} is skipped: {error.message}")
            continue
        result = examine(folder)
        if result.fault is None:
            use_library(folder)
            report(f"{title} is used: it decoded on {', '.join(result.gpus)} in {result.seconds:.1f} s")
            return folder
        report(f"{title} is skipped: {result.fault.rstrip('.')}")
    if listed:
        report(no_library(found))
    return None


_VLLM_MEMORY, _VLLM_CAPABILITY = 16 << 30, (8, 0)  # from here on a model for many users fits, in bf16


def many_users_hint(found: FoundGpus) -> str | None:
    """Which engine serves many users on this machine's GPU, where it is not this one."""
    gpus = found.nvidia.gpus if isinstance(found.nvidia, NvidiaDriver) else ()
    if not any(gpu.memory >= _VLLM_MEMORY and gpu.compute_capability >= _VLLM_CAPABILITY for gpu in gpus):
        return None
    return (
        "for tens of answers at once vLLM (backend vllm, safetensors) writes about twice as fast as llama.cpp; for a "
        "few people llama.cpp is as fast"
    )


def no_library(found: FoundGpus, which: Callable[[str], str | None] = shutil.which) -> str:
    """What remains if no prebuilt library uses the GPU."""
    if found.nvidia_gpus and which("nvcc"):
        return f"no prebuilt library uses this GPU: the CPU is used. This machine has nvcc: `{BUILD_COMMAND}`"
    return "no prebuilt library uses this GPU: the CPU is used"
