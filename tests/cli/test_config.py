"""`modelyard check`: the rows that describe a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.cli.config import CacheRow, ModelRow, RouteRow, describe_config
from modelyard.config.load import load_config
from modelyard.config.settings import LoadedConfig

TEXT = """
[models.m]
backend = "fake"
aliases = ["big"]
[models.n]
backend = "fake"
enabled = false
autoload = true
n_ctx = 64
[caches.main]
model = "m"
n_ctx = 100
parallel = 3
[caches.fast]
model = "m"
n_ctx = 50
overflow = "strict"
[[routes]]
match = ["*haiku*", "*mini*"]
endpoint = "/v1/*"
cache = "fast"
[[routes]]
match = "out*"
model = "n"
allow_remote = true
"""


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedConfig:
    (tmp_path / "c.toml").write_text(TEXT)
    return load_config(Path("c.toml"), env={}, cwd=tmp_path)


def test_rows_show_the_effective_configuration(loaded: LoadedConfig) -> None:
    rows = describe_config(loaded)
    assert rows.models == [ModelRow("m", "fake", ("big",), "at start"), ModelRow("n", "fake", (), "on demand")]
    assert rows.caches == [
        CacheRow("main", "m", 100, 3, 300, "clamp"),
        CacheRow("fast", "m", 50, 1, 50, "strict"),
        CacheRow("n", "n", 64, 1, 64, "clamp"),
    ]
    assert rows.routes == [
        RouteRow("*haiku* | *mini*", "/v1/*", "m", "fast", 50),
        RouteRow("out*", "*", "n", "n", 64, allow_remote=True),
        RouteRow("m", "*", "m", "main", 100),
        RouteRow("big", "*", "m", "main", 100),
        RouteRow("n", "*", "n", "n", 64),
    ]
