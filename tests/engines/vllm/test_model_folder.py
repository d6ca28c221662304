"""Where a model lies on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from modelyard.core.engine import AvailableMemory, CacheInfo, EngineSpec, MemoryEstimate
from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.engines.vllm import estimate, model_folder
from modelyard.engines.vllm.model_folder import check_weights
from modelyard.engines.vllm.options import VllmOptions
from tests.engines.vllm.helpers import weights


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "hub"


def made(place: Path, config: str = "{}") -> Path:
    place.mkdir(parents=True)
    (place / "config.json").write_text(config)
    return place


def test_a_folder_is_found_by_its_path_and_by_its_name_in_the_library(hub: Path, tmp_path: Path) -> None:
    mine, shelf = made(tmp_path / "mine"), made(tmp_path / "cache" / "models" / "org" / "name")
    assert model_folder.find_folder(str(mine)) == mine
    assert model_folder.find_folder("org/name") == shelf


def test_the_hubs_own_cache_is_looked_into_last_and_its_newest_snapshot_taken(hub: Path) -> None:
    old, new = (made(hub / "models--org--name" / "snapshots" / each) for each in "ab")
    os.utime(old, (1, 1))
    assert model_folder.find_folder("org/name") == new
    assert model_folder.resolve_model(VllmOptions(vllm_model="org/name")) == str(new)


def test_what_is_not_here_is_left_to_vllm_and_named_where_it_is_needed(hub: Path) -> None:
    assert model_folder.resolve_model(VllmOptions(vllm_model="org/other")) == "org/other"
    with pytest.raises(NotFound, match="'org/other' is not on this machine"):
        model_folder.require_folder("org/other")


def test_a_model_that_sees_has_its_language_model_inside(tmp_path: Path) -> None:
    place = made(tmp_path / "m", '{"model_type": "vl", "text_config": {"hidden_size": 5}}')
    assert model_folder.read_folder_config(place)["hidden_size"] == 5
    (place / "config.json").write_text("no JSON")
    with pytest.raises(InvalidRequest, match=r"config\.json cannot be read"):
        model_folder.read_folder_config(place)


def test_what_belongs_to_a_model_is_found_as_the_model_is(hub: Path, tmp_path: Path) -> None:
    guesser = made(tmp_path / "cache" / "models" / "small")
    told = VllmOptions(
        vllm_model="org/name",
        vllm_tokenizer="org/elsewhere",
        vllm_speculative_method="draft_model",
        vllm_speculative_model="small",
        vllm_num_speculative_tokens=3,
    )
    assert model_folder.resolve_companions(told).vllm_speculative_model == str(guesser)
    assert model_folder.resolve_companions(told).vllm_tokenizer == "org/elsewhere"


# Weights that are whole, and some that are not.


def test_whole_file_passes(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(weights(10))
    check_weights(tmp_path)


def test_folder_of_another_format_is_left_to_vllm(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    check_weights(tmp_path)


@pytest.mark.parametrize(
    "broken",
    [b"", b"\0" * 8, weights(10)[:-1], weights(10) + b"x", b"\2\0\0\0\0\0\0\0[]", b"\xff" * 40, weights(10)[:12]],
    ids=["empty", "zeros", "cut", "longer", "list", "garbage", "cut head"],
)
def test_broken_file_is_named(tmp_path: Path, broken: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(broken)
    with pytest.raises(InvalidRequest, match=str(file)):
        check_weights(tmp_path)


# What vLLM will take, from a model's folder.

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


def of(model: Path, machine: AvailableMemory = HERE, **options: Any) -> MemoryEstimate:
    return estimate(EngineSpec("m", VllmOptions(vllm_model=str(model), **options), CACHES), machine)


def test_weights_are_the_files_in_the_format_that_is_computed_in(model: Path) -> None:
    assert of(model).weights == of(model, vllm_dtype="bfloat16").weights == 1000
    assert of(model, vllm_dtype="float32").weights == 2000
    assert of(model, vllm_dtype="float32", vllm_quantization="modelopt").weights == 1000
    (model / "pytorch_model.bin").write_bytes(bytes(7777))
    assert of(model).weights == 1000, "the same weights once more"


def test_kv_is_what_the_windows_need_unless_it_is_named(model: Path) -> None:
    token = 2 * 3 * 2 * 16 * 2
    assert of(model).kv == token * 1000 * 3
    assert of(model, vllm_dtype="float32").kv == 2 * token * 1000 * 3
    assert of(model, vllm_kv_cache_dtype="fp8").kv == token // 2 * 1000 * 3
    assert of(model, vllm_kv_cache_memory_bytes=1 << 30).kv == of(model, GPU, vllm_kv_cache_memory_bytes=1 << 30).kv
    assert of(model, vllm_kv_cache_memory_bytes=1 << 30).kv == 1 << 30


def test_a_gpu_is_filled_up_where_nobody_says_how_much(model: Path) -> None:
    assert of(model, GPU).total == int((100 << 30) * 0.9)
    assert of(model, GPU, vllm_gpu_memory_utilization=0.5).total == 50 << 30
    assert of(model, GPU, vllm_gpu_memory_utilization=0.001).kv == of(model).kv
    assert (of(model).device, of(model, GPU).device) == ("cpu", "gpu")


def test_a_checkpoint_that_guesses_counts_while_it_guesses(model: Path) -> None:
    chosen = {"vllm_speculative_model": str(model), "vllm_num_speculative_tokens": 1}
    assert of(model, vllm_speculative_method="mtp", **chosen).weights == 2000
    assert of(model, vllm_speculative_method="off", **chosen).weights == 1000


def test_a_model_that_is_not_here_cannot_be_judged() -> None:
    with pytest.raises(NotFound):
        of(Path("org/none"))
