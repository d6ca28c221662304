"""The settings in effect, their sources, and nothing secret."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from modelyard.config.effective import effective_settings
from modelyard.config.load import load_config
from modelyard.config.problems import format_path


def settings(folder: Path, *, defaults: bool = False, **env: str) -> dict[str, tuple[Any, str]]:
    env = {"XDG_CONFIG_HOME": str(folder / "home"), **env}
    loaded = load_config(env=env, cwd=folder, overrides={"http": {"workers": 2}})
    found = effective_settings(loaded, defaults=defaults)
    return {format_path(s.path): (s.value, s.source.removeprefix(f"{folder}/")) for s in found}


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_each_value_has_the_source_that_won(tmp_path: Path) -> None:
    write(tmp_path, "home/modelyard/modelyard.toml", "[http]\nport = 1\nhost = '::1'\n[log]\nlevel = 'debug'\n")
    write(tmp_path, "modelyard.toml", "[http]\nport = 2\n[models.m]\nbackend = 'toy'\nspeed = 2\n")
    found = settings(tmp_path, MODELYARD_LOG_LEVEL="error")
    assert found["http.host"] == ("::1", "home/modelyard/modelyard.toml")
    assert found["http.port"] == (2, "modelyard.toml")
    assert found["log.level"] == ("error", "environment MODELYARD_LOG_LEVEL")
    assert found["http.workers"] == (2, "command line")
    assert found["models.m.speed"] == (2, "modelyard.toml")
    assert found["models.m.enabled"] == (True, "derived")
    assert "http.keepalive_s" not in found


def test_defaults_are_shown_on_request(tmp_path: Path) -> None:
    assert settings(tmp_path, defaults=True)["http.keepalive_s"] == (5.0, "default")


def test_secrets_are_masked_and_variables_are_named(tmp_path: Path) -> None:
    text = "[[keys]]\nname = 'a'\nkey = 'very-secret-key'\n[models.m]\nbackend = 'toy'\nwiring = 'https://u:pass-word@h/'\n"
    write(tmp_path, "modelyard.toml", text)
    found = settings(tmp_path, MODELYARD_API_KEY="another-secret")
    assert found["keys"][0][0]["key"] == "***"
    assert found["keys"][0][1]["env"] == "MODELYARD_API_KEY"
    assert "secret" not in repr(found)
    assert "pass-word" not in repr(found)


def test_pool_settings_are_shown_under_our_names(tmp_path: Path) -> None:
    write(tmp_path, "config/settings.json", '{"service": {"port": 9}, "engine": {"models": {"m": {"backend": "toy"}}}}')
    found = settings(tmp_path)
    assert found["http.port"] == (9, "config/settings.json")
    assert found["models.m.backend"] == ("toy", "config/settings.json")
