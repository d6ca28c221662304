"""The memory estimate, from the headers of the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec, MemoryEstimate
from modelyard.engines import llama_cpp
from modelyard.engines.llama_server import Options, estimate
from modelyard.library.default_model import fetch

CACHES = {"main": CacheInfo(1024, 2), "fast": CacheInfo(512, 1)}
HERE = AvailableMemory(1 << 40)


def of(machine: AvailableMemory = HERE, **options: Any) -> MemoryEstimate:
    return estimate(EngineSpec("m", Options(path=str(fetch()), **options), CACHES), machine)


def test_estimate_is_that_of_llama_cpp_with_one_cache_of_all_slots() -> None:
    options = llama_cpp.Options(path=str(fetch()), flash_attn="auto")
    assert of(llama_server_n_gpu_layers="all") == llama_cpp.estimate(
        EngineSpec("m", options, {"all": CacheInfo(1024, 3)}), HERE
    )


def test_draft_model_adds_its_weights_and_cache() -> None:
    one, two = of(), of(llama_server_draft_model_path=str(fetch()))
    assert (two.weights, two.kv, two.compute) == (2 * one.weights, 2 * one.kv, 2 * one.compute)


def test_projector_adds_its_size(tmp_path: Path) -> None:
    (tmp_path / "mmproj.gguf").write_bytes(bytes(1000))
    assert of(llama_server_mmproj_path=str(tmp_path / "mmproj.gguf")).weights == of().weights + 1000
    assert of(llama_server_mmproj_path=str(tmp_path / "none.gguf")) == of()


def test_layers_decide_the_device() -> None:
    gpu = AvailableMemory(1 << 40, {"GPU-1": 1 << 40})
    assert [of(gpu, llama_server_n_gpu_layers=n).device for n in ("-1", "all", "auto", "20", "0")] == [
        *["gpu"] * 4,
        "cpu",
    ]
    assert of().device == "cpu"


@pytest.mark.parametrize(
    ("option", "layers"), [("20", (20, 31)), ("all", (31, 31)), ("0", (0, 31)), ("auto", (0, 0)), (None, (0, 0))]
)
def test_layers_on_the_gpu_are_reported_if_the_options_say_them(option: str | None, layers: tuple[int, int]) -> None:
    found = of(AvailableMemory(1 << 40, {"GPU-1": 1 << 40}), llama_server_n_gpu_layers=option)
    assert (found.gpu_layers, found.layers) == layers
