"""The folder of an EXL3 model: what is read from it, how broken folders are refused, and the memory estimate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import modelyard_exllamav3 as exllamav3
from modelyard.core.engine import AvailableMemory, CacheInfo, MemoryEstimate
from modelyard.core.errors import InvalidRequest, NotFound
from modelyard_exllamav3.model_folder import find_folder, read_model_info, read_tokenizer
from tests.engines.exllamav3.helpers import CONFIG, N_VOCAB, model_folder, spec, write_model, write_weights


def test_model_info_comes_from_the_config_and_the_headers_of_the_weight_files(tmp_path: Path) -> None:
    info = read_model_info(write_model(tmp_path / "m"))
    assert (info.layers, info.hidden_size, info.intermediate_size) == (2, 64, 128)
    assert (info.n_vocab, info.trained_length) == (N_VOCAB, 8192)
    assert info.kv_width == 2 * 16
    assert (info.embedding, info.weights) == (2 * N_VOCAB * 64, 2 * (4 * 8 * 64 + 4 * 256 * 96))
    assert info.eos_ids == (2, 0, 13, 14)


def test_weights_of_several_files_are_summed(tmp_path: Path) -> None:
    where = write_model(tmp_path / "m")
    before = read_model_info(where).weights
    write_weights(where / "model-00002.safetensors", {"more": ("F16", (8, 8))})
    assert read_model_info(where).weights == before + 128


def test_config_of_a_multimodal_model_is_read_from_its_text_config(tmp_path: Path) -> None:
    where = write_model(tmp_path / "m")
    (where / "config.json").write_text(json.dumps({"architectures": ["X"], "text_config": CONFIG | {"head_dim": 32}}))
    (where / "generation_config.json").unlink()
    info = read_model_info(where)
    assert (info.kv_width, info.eos_ids) == (64, (2,))


def test_path_is_the_folder_or_its_config_file(tmp_path: Path) -> None:
    where = write_model(tmp_path / "m")
    assert find_folder(str(where)) == find_folder(str(where / "config.json")) == where
    with pytest.raises(NotFound, match=r"config\.json"):
        find_folder(str(tmp_path / "other"))


def _remove_weights(where: Path) -> None:
    (where / "model.safetensors").unlink()


def _append_a_byte(where: Path) -> None:
    with (where / "model.safetensors").open("ab") as file:
        file.write(b"x")


def _huge_header(where: Path) -> None:
    (where / "model.safetensors").write_bytes(b"\xff" * 64)


def _truncate_config(where: Path) -> None:
    (where / "config.json").write_text("{")


def _drop_hidden_size(where: Path) -> None:
    (where / "config.json").write_text(json.dumps({"num_attention_heads": 4}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove_weights, "no .safetensors"),
        (_append_a_byte, "and should have"),
        (_huge_header, "header of 18446744073709551615 bytes is not possible"),
        (_truncate_config, "config.json cannot be read"),
        (_drop_hidden_size, "hidden_size"),
    ],
)
def test_broken_folder_is_refused_with_a_reason(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    where = write_model(tmp_path / "m")
    damage(where)
    with pytest.raises(InvalidRequest, match=message) as caught:
        read_model_info(where)
    assert caught.value.code == "model_unreadable"


def test_control_tokens_are_special_for_grammars_and_white_space_is_not(tmp_path: Path) -> None:
    where = write_model(tmp_path / "m")
    tokenizer = json.loads((where / "tokenizer.json").read_text())
    tokenizer["added_tokens"][5]["special"] = False
    tokenizer["added_tokens"].append({"id": N_VOCAB, "content": "   ", "special": False})
    (where / "tokenizer.json").write_text(json.dumps(tokenizer))
    tokens = json.loads(read_tokenizer(where))["added_tokens"]
    assert [token["special"] for token in tokens] == [True] * (len(tokens) - 1) + [False]


# --- the memory estimate --------------------------------------------------------------------------------------------

HERE = AvailableMemory(1 << 34, {"GPU-1": 1 << 34})


def memory(window: int = 1023, parallel: int = 2, **options: Any) -> MemoryEstimate:
    return exllamav3.estimate(spec({"main": CacheInfo(window, parallel)}, **options), HERE)


def test_weights_on_the_gpu_are_all_tensors_except_the_embedding() -> None:
    found = memory()
    assert found.weights == read_model_info(model_folder()).weights
    assert found.device == "gpu"


@pytest.mark.parametrize(("quant", "bits"), [(None, 32), (8, 17), (4, 9), ("8,4", 13)])
def test_kv_memory_follows_its_bits_and_their_scales(quant: Any, bits: int) -> None:
    assert memory(exllama_cache_quant=quant).kv == 2 * 1024 * 2 * 32 * bits // 8


def test_kv_memory_follows_exllama_cache_size() -> None:
    assert memory(exllama_cache_size=4096).kv == 2 * memory().kv


def test_longer_chunks_and_more_jobs_need_more_memory() -> None:
    assert memory(exllama_max_chunk_size=256).compute < memory().compute < memory(parallel=8).compute


def test_estimate_refuses_a_cache_size_below_one_window() -> None:
    with pytest.raises(InvalidRequest, match="exllama_cache_size"):
        memory(exllama_cache_size=256)
