"""Where a model lies on this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.engines.vllm import model_folder
from modelyard.engines.vllm.options import VllmOptions


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
