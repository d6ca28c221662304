"""The folder of a model that vLLM runs: where it is, whether it is complete, and how much memory it needs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec, MemoryEstimate
from modelyard.core.errors import InvalidRequest, NotFound
from modelyard_vllm import estimate
from modelyard_vllm.model_folder import (
    check_weights,
    find_folder,
    read_config,
    require_folder,
    resolve_companions,
    resolve_model,
)
from modelyard_vllm.options import VllmOptions
from tests.engines.vllm.helpers import weights


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "hub"


def create_folder(folder: Path, config: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    return folder


def test_folder_is_found_by_its_path_and_by_its_name_in_the_library(hub: Path, tmp_path: Path) -> None:
    own, stored = create_folder(tmp_path / "mine"), create_folder(tmp_path / "cache" / "models" / "org" / "name")
    assert find_folder(str(own)) == own
    assert find_folder("org/name") == stored


def test_hub_cache_is_searched_last_and_its_newest_snapshot_is_used(hub: Path) -> None:
    old, new = (create_folder(hub / "models--org--name" / "snapshots" / each) for each in "ab")
    os.utime(old, (1, 1))
    assert find_folder("org/name") == new
    assert resolve_model(VllmOptions(vllm_model="org/name")) == str(new)


def test_model_that_is_not_here_is_left_to_vllm_or_refused_by_name(hub: Path) -> None:
    assert resolve_model(VllmOptions(vllm_model="org/other")) == "org/other"
    with pytest.raises(NotFound, match="'org/other' is not on this machine"):
        require_folder("org/other")


def test_config_of_a_multimodal_model_is_read_from_its_text_config(tmp_path: Path) -> None:
    folder = create_folder(tmp_path / "m", '{"model_type": "vl", "text_config": {"hidden_size": 5}}')
    assert read_config(folder)["hidden_size"] == 5
    (folder / "config.json").write_text("no JSON")
    with pytest.raises(InvalidRequest, match=r"config\.json cannot be read"):
        read_config(folder)


def test_tokenizer_and_draft_model_are_found_like_the_model(hub: Path, tmp_path: Path) -> None:
    draft = create_folder(tmp_path / "cache" / "models" / "small")
    options = VllmOptions(
        vllm_model="org/name",
        vllm_tokenizer="org/elsewhere",
        vllm_speculative_method="draft_model",
        vllm_speculative_model="small",
        vllm_num_speculative_tokens=3,
    )
    assert resolve_companions(options).vllm_speculative_model == str(draft)
    assert resolve_companions(options).vllm_tokenizer == "org/elsewhere"


# --- weights ----------------------------------------------------------------------------------------------------------


def test_complete_file_passes(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(weights(10))
    check_weights(tmp_path)


def test_other_formats_are_left_to_vllm(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    check_weights(tmp_path)


@pytest.mark.parametrize(
    "broken",
    [b"", b"\0" * 8, weights(10)[:-1], weights(10) + b"x", b"\2\0\0\0\0\0\0\0[]", b"\xff" * 40, weights(10)[:12]],
    ids=["empty", "zeros", "cut", "longer", "list", "garbage", "cut head"],
)
def test_broken_file_is_refused_by_name(tmp_path: Path, broken: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(broken)
    with pytest.raises(InvalidRequest, match=str(file)):
        check_weights(tmp_path)


# --- the memory estimate ----------------------------------------------------------------------------------------------

CACHES = {"main": CacheInfo(1000, 2), "fast": CacheInfo(500, 1)}
HERE = AvailableMemory(1 << 40)
GPU = AvailableMemory(1 << 40, {"GPU-1": 100 << 30})
SHAPE = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 100,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    return tmp_path


def estimated(model: Path, machine: AvailableMemory = HERE, **options: Any) -> MemoryEstimate:
    return estimate(EngineSpec("m", VllmOptions(vllm_model=str(model), **options), CACHES), machine)


def test_weights_are_the_files_in_the_number_format_of_the_computation(model: Path) -> None:
    assert estimated(model).weights == estimated(model, vllm_dtype="bfloat16").weights == 1000
    assert estimated(model, vllm_dtype="float32").weights == 2000
    assert estimated(model, vllm_dtype="float32", vllm_quantization="modelopt").weights == 1000
    (model / "pytorch_model.bin").write_bytes(bytes(7777))
    assert estimated(model).weights == 1000, "the same weights in another format"


def test_kv_is_what_the_windows_need_unless_its_size_is_set(model: Path) -> None:
    token = 2 * 3 * 2 * 16 * 2
    assert estimated(model).kv == token * 1000 * 3
    assert estimated(model, vllm_dtype="float32").kv == 2 * token * 1000 * 3
    assert estimated(model, vllm_kv_cache_dtype="fp8").kv == token // 2 * 1000 * 3
    assert (
        estimated(model, vllm_kv_cache_memory_bytes=1 << 30).kv
        == estimated(model, GPU, vllm_kv_cache_memory_bytes=1 << 30).kv
    )
    for machine in (HERE, GPU):
        assert estimated(model, machine, vllm_kv_cache_memory_bytes=1 << 30).kv == 1 << 30


def test_gpu_share_is_filled_with_kv_unless_its_size_is_set(model: Path) -> None:
    assert estimated(model, GPU).total == int((100 << 30) * 0.9)
    assert estimated(model, GPU, vllm_gpu_memory_utilization=0.5).total == 50 << 30
    assert estimated(model, GPU, vllm_gpu_memory_utilization=0.001).kv == estimated(model).kv
    assert (estimated(model).device, estimated(model, GPU).device) == ("cpu", "gpu")


def test_draft_checkpoint_counts_only_if_it_is_used(model: Path) -> None:
    draft = {"vllm_speculative_model": str(model), "vllm_num_speculative_tokens": 1}
    assert estimated(model, vllm_speculative_method="mtp", **draft).weights == 2000
    assert estimated(model, vllm_speculative_method="off", **draft).weights == 1000


def test_model_that_is_not_here_has_no_estimate() -> None:
    with pytest.raises(NotFound):
        estimated(Path("org/none"))
