"""Models of Ollama, LM Studio and the hub's cache: found by name, used in place, and never deleted."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from modelyard.core.errors import NotFound
from modelyard.library import elsewhere, models
from tests.library.files import gguf_bytes

BLOB = "sha256-" + "ab" * 32


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("OLLAMA_MODELS", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def write(path: Path, data: bytes = b"") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data or gguf_bytes())
    return path


def of_ollama(home: Path, name: str = "registry.ollama.ai/library/llama3.2/latest", blob: str = BLOB) -> Path:
    layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": blob.replace("-", ":"), "size": 1}]
    write(home / ".ollama/models/manifests" / name, json.dumps({"schemaVersion": 2, "layers": layers}).encode())
    return write(home / ".ollama/models/blobs" / blob)


def test_nothing_is_found_where_there_is_nothing():
    assert elsewhere.find_models() == []


def test_a_model_of_ollama_is_added_under_its_name_and_its_file_is_not_copied(home: Path):
    blob = of_ollama(home)
    entry = models.pull("llama3.2:latest")
    assert entry.name == "llama3.2"
    assert Path(entry.path).resolve() == blob
    assert os.path.islink(entry.path)
    assert models.file_row(entry.path).quant
    assert models.remove_model("llama3.2") == entry
    assert blob.is_file()
    assert not os.path.lexists(entry.path)


def test_other_registries_and_tags_are_in_the_name_and_damaged_manifests_are_passed_over(home: Path):
    of_ollama(home, "hf.co/owner/repo/Q4_K_M")
    of_ollama(home, "registry.ollama.ai/library/qwen3/8b")
    write(home / ".ollama/models/manifests/registry.ollama.ai/library/bad/latest", b"{")
    assert [model.name for model in elsewhere.find_models()] == ["hf.co/owner/repo:Q4_K_M", "qwen3:8b"]
    assert models.pull("qwen3:8b").source == "Ollama: qwen3:8b"


def test_a_model_of_lm_studio_is_used_where_it_is_with_its_projector(home: Path):
    file = write(home / ".lmstudio/models/unsloth/Tiny-GGUF/Tiny-Q4_K_M.gguf")
    write(home / ".lmstudio/models/unsloth/Tiny-GGUF/mmproj-F16.gguf")
    entry = models.pull("Tiny-Q4_K_M")
    assert (entry.path, entry.source, entry.owned) == (str(file), "unsloth/Tiny-GGUF", False)
    assert entry.projector.endswith("mmproj-F16.gguf")
    models.remove_model("Tiny-Q4_K_M")
    assert file.is_file()


def test_the_cache_of_the_hub_answers_for_its_repository_without_the_network(
    home: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    snapshot = home / ".cache/huggingface/hub/models--owner--Tiny-GGUF/snapshots/0123"
    blob = write(snapshot.parents[1] / "blobs/ffff")
    snapshot.mkdir(parents=True)
    (snapshot / "tiny-Q8_0.gguf").symlink_to(blob)
    (snapshot / "half-Q4_0.gguf").symlink_to(snapshot.parents[1] / "blobs/missing")
    assert [model.name for model in elsewhere.find_models()] == ["tiny-Q8_0"]
    assert models.pull("owner/Tiny-GGUF").path == str(snapshot / "tiny-Q8_0.gguf")


def test_a_split_model_is_one_and_only_if_it_is_complete(home: Path):
    folder = home / ".lmstudio/models/a/b"
    write(folder / "big-00001-of-00002.gguf")
    assert elsewhere.find_models() == []
    write(folder / "big-00002-of-00002.gguf")
    assert [model.name for model in elsewhere.find_models()] == ["big"]


def test_a_folder_of_safetensors_in_the_cache_is_offered_as_a_folder(home: Path):
    snapshot = home / ".cache/huggingface/hub/models--owner--Tiny/snapshots/0123"
    write(snapshot / "config.json", b"{}")
    write(snapshot / "model.safetensors", b"x")
    assert models.pull("Tiny").path == str(snapshot)


def test_an_unknown_name_stays_unknown():
    with pytest.raises(NotFound):
        models.pull("nobody-has-this")
