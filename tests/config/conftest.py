"""A build with one engine, `toy`, so that nothing here depends on the engines that really exist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator

from modelyard import plugins
from modelyard.config.load import load_config
from modelyard.config.settings import LoadedConfig
from modelyard.core.engine import EnginePlugin
from modelyard.core.errors import InvalidRequest


class ToyOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    speed: float = Field(default=1.0, gt=0)
    path: str | None = None
    wiring: str = ""

    @field_validator("wiring")
    @classmethod
    def _exists(cls, value: str) -> str:
        if value == "gone.toml":
            raise InvalidRequest("gone.toml cannot be read")
        return value


_NAMES, _LOAD = plugins.names, plugins.load


def _load(package: str, name: str) -> Any:
    if package != "engines":
        return _LOAD(package, name)
    if name == "bare":
        raise plugins.MissingLibrary("bare needs the Python package 'bones'")
    return EnginePlugin(Options=ToyOptions, create=lambda _: None, kv_types=("f16", "q8_0"))  # type: ignore[arg-type,return-value]


@pytest.fixture(autouse=True)
def toy_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "names", lambda package: ("bare", "toy") if package == "engines" else _NAMES(package))
    monkeypatch.setattr(plugins, "load", _load)


@pytest.fixture
def real_build(toy_build: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the engines that are installed."""
    monkeypatch.setattr(plugins, "names", _NAMES)
    monkeypatch.setattr(plugins, "load", _LOAD)


Loader = Callable[..., LoadedConfig]


@pytest.fixture
def toml(tmp_path: Path) -> Loader:
    """Load TOML text as a file named c.toml."""

    def loader(text: str, **env: str) -> LoadedConfig:
        (tmp_path / "c.toml").write_text(text)
        return load_config(Path("c.toml"), env=env, cwd=tmp_path)

    return loader
