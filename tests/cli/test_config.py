"""`modelyard check`: problems of interpreters, and the rows that describe a configuration."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from modelyard.cli.config import CacheRow, ModelRow, RouteRow, describe_config, engine_problems
from modelyard.config.load import load_config
from modelyard.config.settings import LoadedConfig
from tests.live_server import demo_config


@pytest.fixture
def lacking(tmp_path: Path) -> str:
    """An interpreter whose environment lacks something."""
    file = tmp_path / "python"
    file.write_text("#!/bin/sh\necho '[[3, 12], [\"zmq\"]]'\n")
    file.chmod(0o755)
    return str(file)


def problems(python: str) -> list[tuple[str, str]]:
    found = engine_problems(load_config(env={}, overrides=demo_config(python=python)).config)
    return [(problem.path, problem.message) for problem in found]


def test_an_interpreter_that_cannot_run_an_engine_is_a_problem(lacking: str) -> None:
    ((path, message),) = problems(lacking)
    assert path == "models.demo.python"
    assert "pip install pyzmq" in message


def test_a_suitable_interpreter_is_no_problem() -> None:
    assert problems(sys.executable) == []


def test_a_missing_interpreter_is_left_to_the_configuration_checks() -> None:
    assert problems("/nowhere/python") == []


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


def test_two_caches_of_a_model_are_not_batched_together(loaded: LoadedConfig) -> None:
    (advice,) = describe_config(loaded).problems
    assert advice.level == "warning"
    assert str(advice) == (
        "models.m: has 2 caches (main, fast): their requests are isolated, so they are not batched together."
    )
