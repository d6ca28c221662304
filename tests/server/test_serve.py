"""What `modelyard serve` fetches before it starts, and which files it watches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from modelyard.config.load import load_config
from modelyard.config.settings import Config, engine_options
from modelyard.library.progress import ProgressReporter
from modelyard.processes.ports import PortUnusable
from modelyard.server.serve import prepare, second_listener, watched_files
from modelyard_vllm import tokenizer_path
from tests.launch.test_launch import free_port
from tests.library.web import Hub, serve_hub

REPO = "maker/Folder"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with serve_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        running.repos[REPO] = {"config.json": b"{}", "model.safetensors": b"01234", "tokenizer.json": b"{}"}
        yield running


def config(**model: object) -> Config:
    return load_config(env={}, overrides={"models": {"m": model}}).config


def quiet() -> ProgressReporter:
    return ProgressReporter(write_line=lambda line: None)


@pytest.mark.parametrize("field", ["path", "vllm_model"])
@pytest.mark.parametrize("backend", ["vllm", "vllm_serve"])
def test_a_hub_id_of_an_enabled_model_is_fetched_once(hub: Hub, backend: str, field: str):
    loaded = config(backend=backend, **{field: REPO})
    prepare(loaded, quiet())
    assert len(hub.downloads) == 3
    prepare(loaded, quiet())
    assert len(hub.downloads) == 3
    options = engine_options(loaded.models["m"])
    assert (tokenizer_path(options) / "model.safetensors").is_file()  # type: ignore[arg-type]


def test_a_model_that_is_loaded_later_is_not_fetched_at_the_start(hub: Hub):
    prepare(config(backend="vllm", path=REPO, enabled=False, autoload=True), quiet())
    assert hub.requested == []


def test_a_model_that_cannot_be_fetched_does_not_stop_the_others(hub: Hub, caplog: pytest.LogCaptureFixture):
    prepare(config(backend="vllm", path="maker/Nothing"), quiet())
    assert "the hub has no repository 'maker/Nothing'" in caplog.text


def test_every_file_that_is_looked_for_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    named = [str(file.relative_to(tmp_path)) for file in watched_files(None)]
    assert named == ["home/modelyard/modelyard.toml", "config/settings.json", "config/local.json", "modelyard.toml"]
    assert watched_files(Path("mine.toml")) == (tmp_path / "mine.toml",)


def test_a_second_port_is_listened_on_only_if_it_is_set_and_another_one() -> None:
    port = free_port()
    (bound,) = second_listener(Config.model_validate({"http": {"ollama_port": port}}), shared=False)
    with bound:
        assert bound.getsockname()[1] == port
        with pytest.raises(PortUnusable, match=f"port {port} on 127.0.0.1 is in use"):
            second_listener(Config.model_validate({"http": {"ollama_port": port}}), shared=False)
    for http in ({}, {"port": port, "ollama_port": port}):
        assert second_listener(Config.model_validate({"http": http}), shared=False) == []
