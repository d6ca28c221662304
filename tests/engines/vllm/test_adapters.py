"""LoRA adapters by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.core.errors import InvalidRequest, NotFound, Unsupported
from modelyard.engines.vllm.request import LoraAdapters
from tests.engines.vllm.stage import adapter


@pytest.fixture
def adapters(tmp_path: Path) -> LoraAdapters:
    return LoraAdapters({"law": str(adapter(tmp_path / "law"))})


def test_adapter_is_known_by_its_name(adapters: LoraAdapters) -> None:
    worn = adapters.worn((("law", 1.0),))
    assert worn is not None
    assert (worn.name, worn.number) == ("law", 1)
    assert adapters.worn(()) is None


def test_namesake_is_another_to_vllm(adapters: LoraAdapters, tmp_path: Path) -> None:
    """Else it would be given the KV of the one before it."""
    first = adapters.worn((("law", 1.0),))
    adapters.load(f"law={adapter(tmp_path / 'other')}")
    second = adapters.worn((("law", 1.0),))
    assert first is not None
    assert second is not None
    assert first.known_as != second.known_as
    assert first.number != second.number


def test_unloaded_adapter_is_unknown(adapters: LoraAdapters) -> None:
    adapters.unload("law")
    with pytest.raises(NotFound, match="law"):
        adapters.worn((("law", 1.0),))
    with pytest.raises(NotFound):
        adapters.unload("law")


def test_several_at_once_and_half_strengths_are_refused(adapters: LoraAdapters) -> None:
    with pytest.raises(Unsupported, match="one adapter"):
        adapters.worn((("law", 1.0), ("law", 1.0)))
    with pytest.raises(Unsupported, match="full strength"):
        adapters.worn((("law", 0.5),))


def test_folder_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=str(tmp_path)):
        LoraAdapters({"law": str(tmp_path)})


def test_model_that_was_loaded_without_room_for_adapters_says_so(tmp_path: Path) -> None:
    none = LoraAdapters({})
    for act in (lambda: none.worn((("law", 1.0),)), lambda: none.load(f"law={adapter(tmp_path / 'law')}")):
        with pytest.raises(Unsupported, match="lora setting"):
            act()


def test_order_without_a_name_is_refused(adapters: LoraAdapters) -> None:
    with pytest.raises(InvalidRequest, match="name=folder"):
        adapters.load("law")
