"""The order in which libraries for a GPU are tried, and the sentence for each step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from modelyard.core.errors import Unavailable
from modelyard.engines.llama_cpp import gpu_library, setup
from modelyard.engines.llama_cpp.gpu_library import Candidate, candidates, fetch_variant, install, no_library
from modelyard.engines.llama_cpp.selftest import BrokenLibrary, SelfTest, explain_failure
from modelyard.libllama import VULKAN_MANIFEST
from modelyard.library.llama_cpp_package import Variant, chosen_library, library_folder
from modelyard.telemetry.gpus import AppleGpu, FoundGpus, NvidiaDriver, NvidiaGpu, VulkanGpu

LOADER = "there is no Vulkan loader (libvulkan.so.1)"
RADEON = VulkanGpu(name="Radeon", vendor="amd", kind="discrete", memory=1, api=(1, 3))
SOFTWARE = VulkanGpu(name="llvmpipe", vendor="other", kind="cpu", memory=1, api=(1, 3))


def nvidia(capability: tuple[int, int], cuda: tuple[int, int], *vulkan: VulkanGpu) -> FoundGpus:
    gpu = NvidiaGpu(name="card", compute_capability=capability, memory=1, free=1)
    return FoundGpus(nvidia=NvidiaDriver(version="1", cuda=cuda, gpus=(gpu,)), vulkan=vulkan or LOADER)


H200 = nvidia((9, 0), (13, 0))
NOTHING = FoundGpus(nvidia="there is no NVIDIA driver", vulkan=LOADER)


def names(found: FoundGpus, place: str = "linux-x64") -> list[tuple[Variant, bool]]:
    return [(candidate.variant, candidate.misfit is None) for candidate in candidates(found, place)]


def test_the_libraries_are_tried_from_the_fastest_to_the_most_portable() -> None:
    assert names(nvidia((8, 9), (13, 0), RADEON)) == [("cuda", True), ("cuda12", True), ("vulkan", True)]
    assert names(H200) == [("cuda", False), ("cuda12", True), ("vulkan", False)]
    assert names(FoundGpus(nvidia="", vulkan=(RADEON,))) == [("vulkan", True)]
    assert names(FoundGpus(nvidia="", vulkan=(SOFTWARE,))) == []
    assert names(FoundGpus(nvidia="", vulkan=LOADER, pci=("amd",))) == [("vulkan", False)]
    assert names(NOTHING) == []
    apple = FoundGpus(nvidia="", vulkan=LOADER, apple=AppleGpu(name="Apple GPU", memory=1))
    assert names(apple, "mac-arm64") == [("metal", True)]
    assert candidates(H200, "linux-arm64")[1] == Candidate("cuda12", "there is none for linux-arm64")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path))
    monkeypatch.setattr(gpu_library, "this_platform", lambda: "linux-x64")
    return tmp_path / "llama_cpp"


def trial(found: FoundGpus, cache: Path, faults: dict[str, str | None]) -> tuple[Path | None, list[str], list[str]]:
    """`faults`: variant → what its self-test finds; a variant that is missing cannot be fetched."""
    lines, fetched = list[str](), list[str]()

    def fetch(variant: Variant, *_: object, egl: bool) -> Path:
        fetched.append(variant)
        if variant not in faults:
            raise Unavailable("the registry cannot be reached")
        (cache / variant).mkdir(parents=True, exist_ok=True)
        return cache / variant

    def examine(folder: Path) -> SelfTest:
        return SelfTest(faults[folder.name], ("GPU0: card",), 1.5)

    return install(lines.append, None, None, found, fetch, examine), lines, fetched


def test_on_an_h200_the_newest_library_is_not_even_fetched(cache: Path) -> None:
    folder, lines, fetched = trial(H200, cache, {"cuda12": None})
    assert folder == chosen_library() == cache / "cuda12"
    assert fetched == ["cuda12"]
    assert lines == [
        "the CUDA 13 library is skipped: it has no machine code for compute capability 9.0, and its PTX needs a driver "
        "for CUDA 13.1 (this one runs CUDA 13.0)",
        "the CUDA 12 library is used: it decoded on GPU0: card in 1.5 s",
    ]


def test_a_library_that_dies_at_the_first_decode_is_passed_over(cache: Path) -> None:
    errors = (
        "ggml_cuda_compute_forward: MUL_MAT failed\nCUDA error: the provided PTX was compiled with an unsupported\n"
    )
    fault = explain_failure(-6, 1.0, "stage decoding a tiny model on CUDA0\n", errors)
    assert fault is not None
    assert "died while decoding a tiny model on CUDA0: CUDA error: the provided PTX was" in fault
    folder, lines, fetched = trial(nvidia((8, 9), (13, 0), RADEON), cache, {"cuda": fault, "vulkan": None})
    assert folder == cache / "vulkan"
    assert fetched == ["cuda", "cuda12", "vulkan"]
    assert lines[0] == f"the CUDA 13 library is skipped: {fault.rstrip('.')}"
    assert lines[1] == "the CUDA 12 library is skipped: the registry cannot be reached"


def test_without_a_working_library_the_cpu_is_used_and_a_build_is_offered(cache: Path) -> None:
    folder, lines, _ = trial(H200, cache, {"cuda12": "it finds no GPU"})
    assert folder is None
    assert chosen_library() is None
    assert lines[-1].startswith("no prebuilt library uses this GPU: the CPU is used")
    assert "CMAKE_ARGS=-DGGML_CUDA=ON modelyard setup --build" in no_library(H200, lambda _: "/usr/bin/nvcc")
    assert "setup" not in no_library(H200, lambda _: None)


def test_a_machine_without_a_gpu_hears_nothing(cache: Path) -> None:
    assert trial(NOTHING, cache, {}) == (None, [], [])


def test_a_driver_that_starts_only_through_egl_gets_its_manifest_beside_the_library(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "vulkan").mkdir(parents=True)
    monkeypatch.setattr(gpu_library, "fetch", lambda *_: cache / "vulkan")
    monkeypatch.setattr(gpu_library, "packages_for", lambda *_: ["package"])
    assert fetch_variant("vulkan") == cache / "vulkan"
    assert not (cache / "vulkan" / VULKAN_MANIFEST).exists()
    fetch_variant("vulkan", egl=True)
    assert json.loads((cache / "vulkan" / VULKAN_MANIFEST).read_text())["ICD"]["library_path"] == "libEGL_nvidia.so.0"


def test_the_manifest_beside_a_library_is_given_to_vulkans_loader(tmp_path: Path) -> None:
    for file in library_folder().iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / VULKAN_MANIFEST).write_text("{}")
    script = (
        "import os; from modelyard import libllama; found = libllama.load().gpu_devices()\n"
        "print(os.environ['VK_ADD_DRIVER_FILES'], len(found))"
    )
    env = {"LLAMA_CPP_LIB_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == str(tmp_path / VULKAN_MANIFEST)


def test_setup_prefers_a_library_for_the_gpu(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_library, "install", lambda *_: cache / "cuda12")
    monkeypatch.setattr(setup, "fetch", lambda *_: pytest.fail("the library for CPUs was fetched"))
    assert setup.set_up() == cache / "cuda12"


def test_a_library_that_was_asked_for_and_does_not_work_changes_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "packages_for", lambda _: ["package"])

    def refuse(report: gpu_library.Report, *_: object) -> None:
        report("the CUDA 13 library is skipped: it finds no GPU.")

    monkeypatch.setattr(gpu_library, "install", refuse)
    with pytest.raises(BrokenLibrary, match=r"it finds no GPU\. The library in use has not changed\.$"):
        setup.set_up_variant("cuda")
    assert chosen_library() is None
    monkeypatch.setattr(setup, "packages_for", lambda _: [])
    with pytest.raises(Unavailable, match=r"no prebuilt llama\.cpp library \(metal\) for "):
        setup.set_up_variant("metal")
