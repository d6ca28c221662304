"""A library that computes on CPUs counts no GPU; one with a GPU's backend gets a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec
from modelyard.engines import llama_cpp
from modelyard.engines.llama_cpp.library import visible_memory
from tests.engines.llama_cpp.stage import model_file

MACHINE = AvailableMemory(1 << 34, {"GPU-0": 1 << 34})


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    (tmp_path / "libggml-cpu.so").touch()
    return tmp_path


def test_a_library_for_cpus_does_not_see_the_machines_gpus(library: Path) -> None:
    assert not llama_cpp.own_process({})
    assert visible_memory(MACHINE) == AvailableMemory(1 << 34)
    spec = EngineSpec("m", llama_cpp.Options(path=str(model_file())), {"main": CacheInfo(512)})
    assert llama_cpp.estimate(spec, MACHINE).device == "cpu"


@pytest.mark.parametrize("file", ["libggml-cuda.so", "libggml-vulkan.so.0", "libggml-metal.dylib"])
def test_a_library_with_a_gpus_backend_does(library: Path, file: str) -> None:
    (library / file).touch()
    assert visible_memory(MACHINE) is MACHINE
    spec = EngineSpec("m", llama_cpp.Options(path=str(model_file())), {"main": CacheInfo(512)})
    assert llama_cpp.estimate(spec, MACHINE).device == "gpu"


@pytest.mark.parametrize(
    ("fields", "own"),
    [({}, True), ({"n_gpu_layers": 4}, True), ({"n_gpu_layers": 0}, False), ({"gguf_n_gpu_layers": 0}, False)],
)
def test_a_model_on_a_gpu_gets_a_process_of_its_own(library: Path, fields: dict[str, Any], own: bool) -> None:
    (library / "libggml-cuda.so").touch()
    assert llama_cpp.own_process(fields) is own
