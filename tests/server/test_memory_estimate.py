"""The memory estimate of a model before it is loaded."""

from __future__ import annotations

from typing import Any

from modelyard.config.load import load_config
from modelyard.config.settings import Config
from modelyard.core.engine import AvailableMemory, MemoryEstimate
from modelyard.library import default_model
from modelyard.server.memory_estimate import ModelMemory, describe_memory, estimate_all

GIB = 2**30
HERE = AvailableMemory(ram_free=8 * GIB)


def config(**models: dict[str, Any]) -> Config:
    return load_config(env={}, overrides={"models": models}).config


def test_every_model_is_estimated_in_order() -> None:
    estimate = list(estimate_all(config(b={"backend": "fake"}, a={"backend": "fake"}), HERE))
    assert [each.model for each in estimate] == ["b", "a"]
    assert all(each.memory is not None for each in estimate)


def test_the_default_model_needs_its_file_and_its_caches() -> None:
    size = default_model.fetch().stat().st_size
    built_in = load_config(env={}).config
    (estimate,) = estimate_all(built_in, HERE)
    assert estimate.memory is not None
    assert size <= estimate.memory.weights < 1.5 * size  # on a CPU with AMX the tied output matrix is a copy
    # 30 layers × 2 × 192 numbers of two bytes a token; `main` has as many conversations as this machine's memory allows
    conversations = [int(built_in.caches[name].parallel) for name in ("main", "fast")]
    assert estimate.memory.kv == 30 * 2 * 192 * 2 * 8192 * sum(conversations)


def test_a_model_without_its_file_has_an_unknown_estimate() -> None:
    (estimate,) = estimate_all(config(gone={"backend": "llama_cpp", "path": "/no/such/file.gguf"}), HERE)
    assert estimate.memory is None
    assert "/no/such/file.gguf" in estimate.note
    assert describe_memory(estimate, HERE).startswith("unknown: ")


def test_the_description_names_the_parts_and_the_free_memory() -> None:
    taken = ModelMemory("m", MemoryEstimate(weights=3 * GIB, kv=GIB, compute=512 * 2**20))
    assert describe_memory(taken, HERE) == (
        "about 4.5 GiB (weights 3.0 GiB, KV caches 1.0 GiB, compute buffers 512 MiB); free now: 8.0 GiB of RAM"
    )
    beside = AvailableMemory(ram_free=GIB, gpus={"GPU-1": 2 * GIB, "GPU-2": GIB})
    assert describe_memory(taken, beside).endswith("free now: 1.0 GiB of RAM, 3.0 GiB of GPU memory")


def test_a_model_without_local_memory_is_described_as_such() -> None:
    assert describe_memory(ModelMemory("far", MemoryEstimate()), HERE) == "none in this process"
