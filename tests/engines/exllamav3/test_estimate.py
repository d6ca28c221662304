"""The memory of a model before it is loaded: its sums."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.core.engine import AvailableMemory, CacheInfo, MemoryEstimate
from modelyard.core.errors import InvalidRequest
from modelyard.engines import exllamav3
from modelyard.engines.exllamav3 import model_folder as folder
from tests.engines.exllamav3.stage import model_folder, spec

HERE = AvailableMemory(1 << 34, {"GPU-1": 1 << 34})


def memory(window: int = 1023, parallel: int = 2, **options: Any) -> MemoryEstimate:
    return exllamav3.estimate(spec({"main": CacheInfo(window, parallel)}, **options), HERE)


def test_weights_are_all_tensors_but_the_embedding_and_lie_on_a_gpu() -> None:
    found = memory()
    assert found.weights == folder.read_model_info(model_folder()).weights
    assert found.device == "gpu"


@pytest.mark.parametrize(("quant", "bits"), [(None, 32), (8, 17), (4, 9), ("8,4", 13)])
def test_kv_is_counted_by_its_bits_with_their_scales(quant: Any, bits: int) -> None:
    assert memory(exllama_cache_quant=quant).kv == 2 * 1024 * 2 * 32 * bits // 8


def test_kv_is_what_the_budget_says_where_there_is_one() -> None:
    assert memory(exllama_cache_size=4096).kv == 2 * memory().kv


def test_longer_chunks_and_more_jobs_take_more() -> None:
    assert memory(exllama_max_chunk_size=256).compute < memory().compute < memory(parallel=8).compute


def test_budget_that_cannot_hold_a_window_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(InvalidRequest, match="exllama_cache_size"):
        memory(exllama_cache_size=256)
