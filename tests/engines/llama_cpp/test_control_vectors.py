"""Control vectors on an unquantized model of two layers: only the second one can get a direction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from modelyard.core.engine import CacheInfo, Chunk
from modelyard.core.errors import InvalidRequest
from modelyard.engines.llama_cpp import Options
from modelyard.engines.llama_cpp.adapters import read_directions
from tests.engines.llama_cpp.exact_models import exact_model, write
from tests.engines.llama_cpp.helpers import id_prompt, running
from tests.engines.reading import accepted, assert_alike, ids, logprobs, read

TALK = [(7 * n) % 250 + 1 for n in range(40)]
WIDTH = 64


def direction(seed: int) -> Any:
    return np.random.default_rng(seed).normal(0, 0.5, WIDTH).astype(np.float32)


def vector_file(path: Path, **directions: Any) -> str:
    tensors = {f"direction.{name.removeprefix('layer')}": data for name, data in directions.items()}
    write(path, {"general.architecture": "controlvector"}, tensors)
    return str(path)


async def answered(*vectors: Any, **options: Any) -> list[Chunk]:
    caches = {"main": CacheInfo(256, 2)}
    async with running(caches, path=str(exact_model()), control_vectors=list(vectors), **options) as engine:
        return await read(engine.generate(id_prompt(TALK, max_tokens=8)))


def differ(one: list[Chunk], other: list[Chunk]) -> bool:
    return ids(one) != ids(other) or abs(logprobs(one)[0].logprob - logprobs(other)[0].logprob) > 0.05


async def test_a_control_vector_changes_answers_by_its_scale(tmp_path: Path) -> None:
    file = vector_file(tmp_path / "kind.gguf", layer1=direction(1))
    plain, kind = await answered(), await answered(file)
    assert differ(kind, plain)
    assert differ(await answered({"path": file, "scale": -1.0}), kind)
    assert_alike(await answered({"path": file, "scale": 0.0}), plain)


async def test_several_control_vectors_are_added_up(tmp_path: Path) -> None:
    one = vector_file(tmp_path / "one.gguf", layer1=direction(1))
    two = vector_file(tmp_path / "two.gguf", layer1=direction(2))
    total = vector_file(tmp_path / "total.gguf", layer1=0.5 * direction(1) - 2 * direction(2))
    assert_alike(await answered({"path": one, "scale": 0.5}, {"path": two, "scale": -2.0}), await answered(total))


async def test_only_the_layers_of_the_range_get_it(tmp_path: Path) -> None:
    file = vector_file(tmp_path / "kind.gguf", layer1=direction(1))
    assert_alike(await answered(file, control_vector_layers=(1, 1)), await answered(file))
    assert_alike(await answered(file, control_vector_layers=(2, 9)), await answered())


async def test_every_cache_has_it_and_saved_kv_of_another_vector_is_not_restored(tmp_path: Path) -> None:
    file = vector_file(tmp_path / "kind.gguf", layer1=direction(1))
    caches = {"main": CacheInfo(256, 2), "fast": CacheInfo(128, 1)}
    usual: dict[str, Any] = {"path": str(exact_model()), "kv_store": str(tmp_path / "kv")}
    async with running(caches, control_vectors=[file], **usual) as engine:
        found = [await read(engine.generate(id_prompt(TALK, max_tokens=8, cache=name))) for name in caches]
    assert_alike(found[0], found[1])
    for vectors, cached in (([file], len(TALK) - 1), ([{"path": file, "scale": 2.0}], 0), ([], 0)):
        async with running(caches, control_vectors=vectors, **usual) as engine:
            assert accepted(await read(engine.generate(id_prompt(TALK)))).cached_tokens == cached


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_layer_that_the_file_lacks_gets_nothing(tmp_path: Path) -> None:
    found = read_directions(Path(vector_file(tmp_path / "some.gguf", layer3=direction(3), layer1=direction(1))))
    assert found.shape == (3, WIDTH)
    assert (found[0] == direction(1)).all()
    assert not found[1].any()
    assert (found[2] == direction(3)).all()


@pytest.mark.parametrize(
    ("directions", "reason"),
    [
        ({}, "it has no directions"),
        ({"layer0": direction(0)}, "'direction.0' is not a direction"),
        ({"layerx": direction(0)}, "'direction.x' is not a direction"),
        ({"layer1": np.zeros((2, WIDTH), np.float32)}, "'direction.1' is not a direction"),
        ({"layer1": direction(1), "layer2": direction(2)[:8]}, "different lengths: [8, 64]"),
    ],
)
def test_a_file_without_directions_is_refused(directions: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_directions(Path(vector_file(tmp_path / "bad.gguf", **directions)))
    assert reason in refused.value.message
    assert str(tmp_path / "bad.gguf") in refused.value.message


def test_a_file_that_ends_early_or_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = Path(vector_file(tmp_path / "cut.gguf", layer1=direction(1)))
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(InvalidRequest, match=r"it ends inside direction.1"):
        read_directions(file)
    file.write_bytes(b"hello")
    with pytest.raises(InvalidRequest, match="it is not a GGUF file"):
        read_directions(file)


@pytest.mark.parametrize("directions", [{"layer1": np.zeros(32, np.float32)}, {"layer3": direction(1)}])
async def test_a_vector_of_another_model_is_refused_when_it_is_loaded(
    directions: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match="and the model has 64 in 2") as refused:
        await answered(vector_file(tmp_path / "other.gguf", **directions))
    assert refused.value.code == "control_vector_unusable"


@pytest.mark.parametrize("layers", [(0, 2), (3, 2)])
def test_a_range_of_layers_begins_with_one(layers: tuple[int, int]) -> None:
    with pytest.raises(ValidationError, match="a first and a last layer from 1 on"):
        Options(path="x", control_vector_layers=layers)
