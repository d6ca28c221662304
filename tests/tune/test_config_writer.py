"""A recommendation in the user's own files: only the keys that change, with a backup."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modelyard.config.load import load_config
from modelyard.core.errors import Conflict, Unavailable
from modelyard.tune.optimize import apply, overridden

USER_TOML = """\
# mine
[models.m]
backend = "llama_cpp"
path = "/nowhere/m.gguf"   # here
gguf_flash_attn = "off"    # by its old name

[caches.main]
model = "m"
n_ctx = 4096
cache_type_k = "f16"
"""


def written(folder: Path, text: str, changes, name: str = "modelyard.toml", model: str = "m") -> tuple[Path, Path]:
    file = folder / name
    file.write_text(text)
    done = apply(load_config(file, env={}), changes, {model: "llama_cpp"})
    assert list(done) == [file]
    return file, done[file]


def test_comments_and_order_stay_and_a_backup_is_kept(tmp_path: Path):
    file, backup = written(tmp_path, USER_TOML, {("models", "m", "n_threads"): 2})
    assert backup.read_text() == USER_TOML
    assert file.read_text() == USER_TOML.replace(
        '"off"    # by its old name\n', '"off"    # by its old name\nn_threads = 2\n'
    )
    assert backup.name == "modelyard.bak.toml"
    assert load_config(backup, env={}).config.models.keys() == {"m"}


def test_a_key_is_changed_under_its_name_in_the_file(tmp_path: Path):
    changes = {("models", "m", "flash_attn"): "on", ("caches", "main", "type_k"): "q8_0"}
    file, _ = written(tmp_path, USER_TOML, changes)
    assert file.read_text() == USER_TOML.replace('"off"', '"on"').replace('"f16"', '"q8_0"')


def test_a_key_under_options_is_changed_there(tmp_path: Path):
    text = '[models.m]\nbackend = "llama_cpp"\npath = "/x.gguf"\n[models.m.options]\nn_threads = 1\n'
    file, _ = written(tmp_path, text, {("models", "m", "n_threads"): 4})
    assert file.read_text() == text.replace("n_threads = 1", "n_threads = 4")


def test_a_configuration_in_another_vocabulary_keeps_its_own_names(tmp_path: Path):
    text = json.dumps({"engine": {"models": {"m": {"backend": "llama_cpp", "model_path": "/x.gguf"}}}}, indent=4)
    file, _ = written(tmp_path, text, {("models", "m", "n_threads"): 4}, "settings.json")
    assert json.loads(file.read_text()) == {
        "engine": {"models": {"m": {"backend": "llama_cpp", "model_path": "/x.gguf", "n_threads": 4}}}
    }


def test_a_second_run_does_not_overwrite_the_first_backup(tmp_path: Path):
    file, first = written(tmp_path, USER_TOML, {("models", "m", "n_threads"): 2})
    done = apply(load_config(file, env={}), {("models", "m", "n_threads"): 3}, {"m": "llama_cpp"})
    assert first.read_text() == USER_TOML
    assert "n_threads = 2" in done[file].read_text()


def test_the_built_in_model_is_written_completely(tmp_path: Path):
    """A file that names a model replaces the built-in configuration, so a part of it would not be a model."""
    before = load_config(env={}, cwd=tmp_path).config
    file, _ = written(tmp_path, "[http]\nport = 8001\n", {("models", "smollm2", "n_threads"): 2}, model="smollm2")
    after = load_config(file, env={}).config
    assert after.models["smollm2"].options == {"n_threads": 2}
    assert after.models["smollm2"].path == before.models["smollm2"].path
    assert after.caches == before.caches
    assert after.routes == before.routes
    assert after.http.port == 8001


def test_applying_without_a_file_is_refused(tmp_path: Path):
    with pytest.raises(Conflict, match="no configuration file"):
        apply(load_config(env={}, cwd=tmp_path), {("models", "smollm2", "n_threads"): 2}, {"smollm2": "llama_cpp"})


def test_the_file_that_has_the_key_is_changed(tmp_path: Path):
    base, local = tmp_path / "config" / "settings.json", tmp_path / "config" / "local.json"
    base.parent.mkdir()
    base.write_text('{"models": {"m": {"backend": "llama_cpp", "path": "/x.gguf"}}}')
    local.write_text('{"models": {"m": {"n_threads": 1}}}')
    loaded = load_config(env={}, cwd=tmp_path)
    done = apply(loaded, {("models", "m", "n_threads"): 2, ("models", "m", "n_ubatch"): 64}, {"m": "llama_cpp"})
    assert list(done) == [local]
    assert json.loads(local.read_text()) == {"models": {"m": {"n_threads": 2, "n_ubatch": 64}}}
    assert base.read_text() == '{"models": {"m": {"backend": "llama_cpp", "path": "/x.gguf"}}}'


def test_a_full_disk_leaves_the_file_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "modelyard.toml"
    file.write_text(USER_TOML)
    monkeypatch.setattr("modelyard.config.file_editor.shutil.copy2", full)
    with pytest.raises(Unavailable, match="No space left"):
        apply(load_config(file, env={}), {("models", "m", "n_threads"): 2}, {"m": "llama_cpp"})
    assert [path.name for path in tmp_path.iterdir()] == ["modelyard.toml"]


def test_a_value_overridden_by_the_environment_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    changes = {("models", "m", "n_threads"): 2}
    file, _ = written(tmp_path, USER_TOML, changes)
    assert overridden(file, changes, {"m": "llama_cpp"}) == []
    monkeypatch.setenv("MODELYARD_MODELS__M__N_THREADS", "1")
    assert overridden(file, changes, {"m": "llama_cpp"}) == ["models.m.n_threads"]


def test_the_file_keeps_its_permissions(tmp_path: Path):
    file = tmp_path / "modelyard.toml"
    file.write_text(USER_TOML)
    file.chmod(0o600)
    apply(load_config(file, env={}), {("models", "m", "n_threads"): 2}, {"m": "llama_cpp"})
    assert file.stat().st_mode & 0o777 == 0o600
