"""The catalogue: its form, what its names mean, and which model suits which machine."""

from __future__ import annotations

import pytest

from modelyard.library import catalogue, models
from modelyard.library.hub import HubReference, parse_reference
from modelyard.library.variants import MemoryBudget, quality_rank
from modelyard.router.settings import DecodingSettings
from modelyard.scanner import formats
from tests.library.files import gguf_bytes
from tests.library.web import serve_hub

GIB = 1 << 30
LISTED = list(catalogue.catalogue().values())


@pytest.mark.parametrize("model", LISTED, ids=lambda model: model.name)
def test_every_row_can_be_used(model: catalogue.CatalogueModel):
    family, colon, tag = model.name.partition(":")
    assert family
    assert colon
    assert tag
    assert model.name == model.name.lower()
    assert parse_reference(model.repo) == HubReference(model.repo)
    assert model.format in formats.names()
    assert model.uses
    assert all(size > 0 and quality_rank(quant)[0] < quality_rank("unknown")[0] for quant, size in model.sizes.items())
    assert model.window >= 2048
    assert 0 < model.active < 1000
    DecodingSettings.model_validate(model.sampling, strict=True)
    if "code" in model.uses:
        assert model.tools
        assert model.window > 100_000


def test_every_family_has_one_default():
    families = {model.name.partition(":")[0] for model in LISTED}
    for family in families:
        defaults = [model for model in LISTED if model.name.startswith(f"{family}:") and model.default]
        assert len(defaults) == 1, family


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("qwen3:8b", "qwen3:8b"),
        ("Qwen3:8B", "qwen3:8b"),
        ("llama3.2", "llama3.2:3b"),
        ("llama3.2:latest", "llama3.2:3b"),
        ("gemma4", "gemma4:e4b"),
        ("gpt-oss:20b", "gpt-oss:20b"),
        ("qwen3:9b", None),
        ("qwen", None),
        ("", None),
    ],
)
def test_a_name_means_a_model(name: str, meant: str | None):
    found = catalogue.find(name)
    assert (found.name if found else None) == meant


def test_a_quantization_may_follow_as_a_second_tag():
    assert catalogue.find_reference("qwen3:8b:Q8_0") == HubReference("unsloth/Qwen3-8B-GGUF", "Q8_0")
    assert catalogue.find_reference("qwen3:8b:") is None


@pytest.mark.parametrize(("ram", "gpu"), [(4, 0), (8, 0), (16, 0), (32, 0), (64, 0), (16, 8), (32, 24), (128, 80)])
def test_a_suggestion_fits_the_machine(ram: int, gpu: int):
    budget = MemoryBudget(int(0.7 * ram * GIB), int(0.9 * gpu * GIB))
    for use in ("chat", "code", "vision", "embedding"):
        found = catalogue.suggest(use, budget)
        if found is None:
            assert use in ("code", "vision")
            assert ram < 16
        else:
            assert use in found.uses
            assert found.needs(use) <= max(budget.ram, budget.gpu)


def test_a_slow_model_is_not_suggested_for_a_cpu_however_large_its_memory():
    found = catalogue.suggest("chat", MemoryBudget(512 * GIB))
    assert found is not None
    assert found.active <= 5


def test_a_pulled_name_is_the_name_of_the_model_and_a_wrong_one_gets_a_hint(monkeypatch: pytest.MonkeyPatch):
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.repos["bartowski/Llama-3.2-3B-Instruct-GGUF"] = {"Llama-3.2-3B-Instruct-Q4_K_M.gguf": gguf_bytes()}
        entry = models.pull("llama3.2")
        assert (entry.name, entry.source, entry.quant) == ("llama3.2", "bartowski/Llama-3.2-3B-Instruct-GGUF", "Q4_K_M")
        assert models.pull("llama3.2:3b") == entry  # the same files: nothing is fetched twice
    with pytest.raises(models.NotFound, match=r"Did you mean qwen3:8b"):
        models.pull("qwen33:8b")
