"""The engine's options: accepted spellings and refused values."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from modelyard.engines import exllamav3
from modelyard.engines.exllamav3.options import ExllamaOptions


@pytest.mark.parametrize(
    ("value", "parsed"),
    [(None, None), (4, (4, 4)), ("4", (4, 4)), ("8,4", (8, 4)), ([6, 5], (6, 5)), ((2, 8), (2, 8))],
)
def test_cache_quant_accepts_one_number_or_two(value: Any, parsed: Any) -> None:
    assert ExllamaOptions(path="x", exllama_cache_quant=value).exllama_cache_quant == parsed


@pytest.mark.parametrize("value", [1, 9, "f16", "4,4,4", True, 4.5])
def test_unknown_cache_quant_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError):
        ExllamaOptions(path="x", exllama_cache_quant=value)


@pytest.mark.parametrize(
    ("value", "parsed"),
    [(None, None), ("auto", None), ("20,23.5", [20, 23.5]), ([20, 0, 24], [20, 0, 24]), (22, [22])],
)
def test_gpu_split_accepts_a_size_per_gpu(value: Any, parsed: Any) -> None:
    assert ExllamaOptions(path="x", exllama_gpu_split=value).exllama_gpu_split == parsed


@pytest.mark.parametrize(
    "wrong",
    [
        {"exllama_gpu_split": "a lot"},
        {"exllama_gpu_split": [-1]},
        {"exllama_tp_backend": "mpi"},
        {"exllama_max_chunk_size": 1000},
        {"exllama_max_chunk_size": 128},
        {"exllama_cache_size": 100},
        {"exllama_max_batch_size": 0},
        {"exllama_cache": 1},
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ExllamaOptions(path="x", **wrong)


def test_options_survive_a_json_round_trip() -> None:
    options = ExllamaOptions(path="x", exllama_cache_quant="8,4", exllama_gpu_split="20,24")
    assert ExllamaOptions.model_validate_json(options.model_dump_json()) == options


def test_live_overrides_are_fields_with_a_schema() -> None:
    for name, kind in exllamav3.LIVE_OVERRIDES.items():
        assert name == "n_ctx" or name in ExllamaOptions.model_fields
        assert TypeAdapter(kind).json_schema()
