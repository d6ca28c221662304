"""The recipes: every configuration loads, the own file gets its name, and the remote model needs no header."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import httpx
import pytest

from modelyard.config.load import load_config
from tests.cli_process import run
from tests.docs.pages import DOCS, blocks
from tests.library.files import write_gguf
from tests.live_server import demo_config, live_server

CONFIGS = [tomllib.loads(text) for text in blocks("recipes.md", "toml")]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_configuration_is_valid(config: dict[str, object]):
    assert load_config(env={"TEAM_KEY": "s3cret-team-key"}, overrides=config).config


def test_the_own_file_is_in_the_library_under_its_name(tmp_path: Path):
    write_gguf(tmp_path / "model.gguf")
    shown, env = "", {"MODELYARD_CACHE": str(tmp_path / "cache"), "MODELYARD_LIBRARY": "true"}
    for line in blocks("recipes.md", "console")[0].splitlines():
        done = run(*shlex.split(line)[1:], cwd=tmp_path, **env)
        assert done.returncode == 0, done.stderr
        shown = done.stdout
    assert re.search(r"^mine\b", shown, re.MULTILINE)


def test_the_remote_model_answers_without_a_header(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("EXAMPLE_API_KEY", "x")
    (config,) = [config for config in CONFIGS if "far" in config.get("models", {})]
    with live_server(demo_config()) as upstream:
        config["models"]["far"] |= {"remote_base_url": f"{upstream.url}/v1", "remote_model": "m"}
        with live_server(config) as server:
            body = {"model": "far", "messages": [{"role": "user", "content": "hi"}]}
            assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20).status_code == 200


def test_the_readme_links_the_recipes():
    assert "docs/recipes.md" in (DOCS.parent / "README.md").read_text()
