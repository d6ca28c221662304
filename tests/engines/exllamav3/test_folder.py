"""What is read of a model's folder, and how broken ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from modelyard.core.errors import InvalidRequest, NotFound
from modelyard.engines.exllamav3 import model_folder
from tests.engines.exllamav3.stage import CONFIG, write_model, write_weights


def test_shape_is_told_by_the_config_and_the_heads_of_the_files(tmp_path: Path) -> None:
    shape = model_folder.read_model_info(write_model(tmp_path / "m"))
    assert (shape.layers, shape.width, shape.inner, shape.vocab, shape.trained) == (2, 64, 128, 4096, 8192)
    assert shape.kv_width == 2 * 16
    assert (shape.embedding, shape.weights) == (2 * 4096 * 64, 2 * (4 * 8 * 64 + 4 * 256 * 96))
    assert shape.ends == (2, 0, 13, 14)


def test_weights_of_several_files_are_added_up(tmp_path: Path) -> None:
    where = write_model(tmp_path / "m")
    before = model_folder.read_model_info(where).weights
    write_weights(where / "model-00002.safetensors", {"more": ("F16", (8, 8))})
    assert model_folder.read_model_info(where).weights == before + 128


def test_config_of_a_wrapped_language_model_is_read_inside(tmp_path: Path) -> None:
    where = write_model(tmp_path / "m")
    (where / "config.json").write_text(json.dumps({"architectures": ["X"], "text_config": CONFIG | {"head_dim": 32}}))
    (where / "generation_config.json").unlink()
    shape = model_folder.read_model_info(where)
    assert (shape.kv_width, shape.ends) == (64, (2,))


def test_path_may_name_the_folder_or_its_config(tmp_path: Path) -> None:
    where = write_model(tmp_path / "m")
    assert model_folder.find_folder(str(where)) == model_folder.find_folder(str(where / "config.json")) == where
    with pytest.raises(NotFound, match=r"config\.json"):
        model_folder.find_folder(str(tmp_path / "other"))


def _without_weights(where: Path) -> None:
    (where / "model.safetensors").unlink()


def _longer(where: Path) -> None:
    with (where / "model.safetensors").open("ab") as file:
        file.write(b"x")


def _endless_head(where: Path) -> None:
    (where / "model.safetensors").write_bytes(b"\xff" * 64)


def _no_config(where: Path) -> None:
    (where / "config.json").write_text("{")


def _no_width(where: Path) -> None:
    (where / "config.json").write_text(json.dumps({"num_attention_heads": 4}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_without_weights, "no .safetensors"),
        (_longer, "not as long as its head says"),
        (_endless_head, "longer than the format allows"),
        (_no_config, "config.json cannot be read"),
        (_no_width, "hidden_size"),
    ],
)
def test_broken_folder_is_refused_with_the_reason(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    where = write_model(tmp_path / "m")
    damage(where)
    with pytest.raises(InvalidRequest, match=words) as caught:
        model_folder.read_model_info(where)
    assert caught.value.code == "model_unreadable"


def test_every_marker_is_special_to_grammars_and_white_space_is_not(tmp_path: Path) -> None:
    where = write_model(tmp_path / "m")
    told = json.loads((where / "tokenizer.json").read_text())
    told["added_tokens"][5]["special"] = False
    told["added_tokens"].append({"id": 4096, "content": "   ", "special": False})
    (where / "tokenizer.json").write_text(json.dumps(told))
    kept = json.loads(model_folder.tokenizer_text(where))["added_tokens"]
    assert [token["special"] for token in kept] == [True] * (len(kept) - 1) + [False]
