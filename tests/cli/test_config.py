"""`modelyard check`: the rows that describe a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelyard.cli.config import CacheRow, ModelRow, RouteRow, describe_config
from modelyard.config.load import load_config
from modelyard.config.settings import LoadedConfig
from modelyard.core.errors import NotFound

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


@pytest.mark.parametrize("backend", ["openai_remote", "litellm"])
@pytest.mark.parametrize(("settings", "window"), [("", None), ("n_ctx = 9000", 9000)])
def test_the_window_of_a_remote_model_is_unknown_unless_it_is_set(
    tmp_path: Path, backend: str, settings: str, window: int | None
) -> None:
    fields = {"openai_remote": 'remote_base_url = "http://a/v1"\nremote_model = "x"', "litellm": 'litellm_model = "x"'}
    text = f'[models.far]\nbackend = "{backend}"\n{fields[backend]}\n{settings}\n'
    (tmp_path / "c.toml").write_text(text + '[[routes]]\nmatch = "*"\nmodel = "far"\n')
    rows = describe_config(load_config(Path("c.toml"), env={}, cwd=tmp_path))
    assert [(row.window, row.tokens) for row in rows.caches] == [(window, window)]
    assert {row.window for row in rows.routes} == {window}


REMOTE = {"backend": "openai_remote", "remote_base_url": "http://a/v1", "remote_model": "x"}


@pytest.mark.parametrize(
    ("models", "answers"),
    [
        ({"far": REMOTE, "a": {"backend": "fake"}, "b": {"backend": "fake"}}, "a"),
        ({"a": {"backend": "fake", "enabled": False}, "b": {"backend": "fake"}}, "b"),
        ({"a": {"backend": "fake", "enabled": False}}, "a"),
        ({"a": {"backend": "fake", "enabled": False}, "b": {"backend": "fake", "enabled": False}}, None),
        ({"far": REMOTE}, None),
    ],
)
def test_a_request_without_a_model_goes_to_the_first_one_of_this_machine(
    models: dict[str, Any], answers: str | None
) -> None:
    router = load_config(env={}, overrides={"models": models}).config.router()
    if answers is None:
        with pytest.raises(NotFound):
            router.resolve("default", "/completion")
    else:
        assert router.resolve("default", "/completion").model == answers
