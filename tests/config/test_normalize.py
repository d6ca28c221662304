from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from modelyard.config.load import load_config
from modelyard.config.normalize import normalize_layer
from modelyard.config.problems import ConfigError
from modelyard.config.settings import LoadedConfig
from modelyard.library import model_files


def loaded(raw: Any, folder: Path, **env: str) -> LoadedConfig:
    (folder / "c.json").write_text(json.dumps(raw))
    return load_config(Path("c.json"), env=env, cwd=folder)


def test_two_names_of_one_setting_in_one_file_are_an_error() -> None:
    _, (problem,) = normalize_layer("f", {"http": {"port": 1}, "service": {"port": 2}})
    assert str(problem) == "f: service.port: is given twice: http.port means the same. Keep one of them."
    _, (problem,) = normalize_layer("f", {"models": {"m": {"path": "a", "model_path": "b"}}})
    assert problem.path == "models.m.model_path"
    _, (problem,) = normalize_layer("f", {"models": {"m": {}}, "engine": {"models": {"m": {}}}})
    assert problem.path == "engine.models.m"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"service": {"prot": 1}}, "service.prot: unknown key. Did you mean 'port'?"),
        ({"engine": {"model": {}}}, "engine.model: unknown key. Did you mean 'models'?"),
        ({"model": {"mimo": {"path": "x"}}}, "model.mimo: unknown key. Did you mean 'models.mimo'?"),
        ({"service": 5}, "service: must be a table with host, port, log_level"),
        ({"port": 5}, "port: unknown key. It belongs into [http]."),
        ({"route": []}, "route: unknown key. Did you mean 'routes'?"),
    ],
)
def test_an_unknown_key_gets_a_suggestion(raw: Any, message: str) -> None:
    _, (problem,) = normalize_layer("f", raw)
    assert f"{problem.path}: {problem.message}" == message


def test_the_schema_reference_of_an_editor_is_ignored() -> None:
    layer, problems = normalize_layer("f", {"$schema": "https://x", "http": {}})
    assert (layer.data, problems) == ({"http": {}}, [])


def test_model_name_defines_a_model_with_its_tokenizer(tmp_path: Path) -> None:
    raw = {"engine": {"backend": "toy"}, "model": {"model_name": "llama3-8b", "tokenizer_path": "tok"}}
    config = loaded(raw, tmp_path).config
    assert config.default_model == "llama3-8b"
    assert list(config.models) == ["llama3-8b"]
    assert (config.models["llama3-8b"].tokenizer_path, config.models["llama3-8b"].enabled) == ("tok", True)


def test_name_and_tokenizer_may_come_from_different_sources(tmp_path: Path) -> None:
    raw = {"models": {"m": {"backend": "toy", "aliases": ["llama"]}}, "model": {"model_name": "llama"}}
    config = loaded(raw, tmp_path, MODELYARD_MODEL_TOKENIZER_PATH="tok").config
    assert (list(config.models), config.models["m"].tokenizer_path) == (["m"], "tok")


def test_a_tokenizer_without_a_model_is_an_error(tmp_path: Path) -> None:
    raw = {"models": {"a": {"backend": "toy"}, "b": {"backend": "toy"}}, "model": {"tokenizer_path": "tok"}}
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path: applies to no model"):
        loaded(raw, tmp_path)


def test_the_section_of_a_model_decides_whether_it_is_enabled(tmp_path: Path) -> None:
    raw = {"engine": {"backend": "toy", "models": {"pool": {}, "on": {"enabled": True}}}, "models": {"own": {}}}
    env = {"MODELYARD_ENGINE__MODELS__OWN__REPLICAS": "2", "MODELYARD_MODELS__POOL__REPLICAS": "2"}
    models = loaded(raw, tmp_path, **env).config.models
    assert {name: model.enabled for name, model in models.items()} == {"pool": False, "on": True, "own": True}


@pytest.mark.parametrize("path", ["x/y.gguf", "unsloth/MiMo-V2-Flash-GGUF/UD-Q6_K_XL/", "X.GGUF"])
def test_a_gguf_path_means_llama_cpp(path: str, tmp_path: Path) -> None:
    model = loaded({"models": {"m": {"path": path}}}, tmp_path).config.models["m"]
    assert (model.backend, model.path) == ("llama_cpp", path)


def test_a_folder_that_holds_gguf_means_llama_cpp(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights/a.gguf").touch()
    raw = {"models": {"m": {"path": str(tmp_path / "weights")}}}
    assert loaded(raw, tmp_path).config.models["m"].backend == "llama_cpp"


def test_a_name_in_the_library_means_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.gguf").touch()
    model_files.put_entry(model_files.LibraryEntry("mine", str(tmp_path / "a.gguf")))
    assert loaded({"models": {"m": {"path": "mine"}}}, tmp_path).config.models["m"].backend == "llama_cpp"


def test_a_model_without_an_engine_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))  # a library without models
    with pytest.raises(ConfigError, match=r"models\.m\.backend: no engine is set, .* Set backend"):
        loaded({"models": {"m": {"path": "x"}}}, tmp_path)


@pytest.mark.parametrize("raw", [{"models": 5}, {"models": {"m": 5}}, {"caches": []}, {"http": 1}, {"routes": {}}])
def test_a_section_of_the_wrong_type_is_an_error_with_its_path(raw: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(raw, tmp_path)
    assert error.value.problems[0].path.startswith(next(iter(raw)))
