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


def test_two_spellings_of_one_thing_in_one_file_are_an_error() -> None:
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
def test_an_unknown_key_says_where_it_may_belong(raw: Any, message: str) -> None:
    _, (problem,) = normalize_layer("f", raw)
    assert f"{problem.path}: {problem.message}" == message


def test_a_reference_to_the_schema_is_no_key() -> None:
    layer, problems = normalize_layer("f", {"$schema": "https://x", "http": {}})
    assert (layer.data, problems) == ({"http": {}}, [])


def test_the_named_model_comes_into_being_with_its_tokenizer(tmp_path: Path) -> None:
    raw = {"engine": {"backend": "toy"}, "model": {"model_name": "llama3-8b", "tokenizer_path": "tok"}}
    config = loaded(raw, tmp_path).config
    assert config.default_model == "llama3-8b"
    assert list(config.models) == ["llama3-8b"]
    assert (config.models["llama3-8b"].tokenizer_path, config.models["llama3-8b"].enabled) == ("tok", True)


def test_name_and_tokenizer_may_come_from_different_sources(tmp_path: Path) -> None:
    raw = {"models": {"m": {"backend": "toy", "aliases": ["llama"]}}, "model": {"model_name": "llama"}}
    config = loaded(raw, tmp_path, MODELYARD_MODEL_TOKENIZER_PATH="tok").config
    assert (list(config.models), config.models["m"].tokenizer_path) == (["m"], "tok")


def test_a_tokenizer_of_nobody_is_an_error(tmp_path: Path) -> None:
    raw = {"models": {"a": {"backend": "toy"}, "b": {"backend": "toy"}}, "model": {"tokenizer_path": "tok"}}
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path: whose tokenizer is it"):
        loaded(raw, tmp_path)


def test_models_are_enabled_by_where_they_are_defined(tmp_path: Path) -> None:
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


def test_a_model_without_any_engine_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.m\.backend: no engine is named .* Set backend"):
        loaded({"models": {"m": {"path": "x"}}}, tmp_path)


@pytest.mark.parametrize("raw", [{"models": 5}, {"models": {"m": 5}}, {"caches": []}, {"http": 1}, {"routes": {}}])
def test_a_section_of_the_wrong_kind_is_an_error_with_its_path(raw: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(raw, tmp_path)
    assert error.value.problems[0].path.startswith(next(iter(raw)))
