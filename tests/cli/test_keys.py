"""`modelyard keys`: on the file while no server runs, and over the admin API of one that does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import Result
from typer.testing import CliRunner

from modelyard.cli.app import app
from tests.live_server import demo_config, live_server


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "modelyard.toml"
    file.write_text(f'[http]\nport = 9\n[accounts]\npath = "{tmp_path / "accounts.sqlite"}"\n')
    return file


@pytest.fixture(autouse=True)
def _no_server(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELYARD_HTTP__PORT", "9")  # nothing listens there


def invoke(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments], env=env)


def test_keys_are_created_listed_and_revoked_without_a_server(config: Path) -> None:
    file = ("--config", str(config))
    refused = invoke("create", "team", *file)
    assert refused.exit_code == 1
    assert "admin key first" in refused.stderr
    boss = invoke("create", "boss", "--admin", *file)
    assert boss.exit_code == 0, boss.stderr
    assert boss.stdout.startswith("my-")
    assert boss.stdout.count("\n") == 1, "a script takes the secret from stdout"
    made = invoke("create", "team", "--model", "qwen*", "--token-budget", "1000", "--expires", "2100-01-01", *file)
    assert made.exit_code == 0
    listed: Any = json.loads(invoke("list", "--json", *file).stdout)
    assert [(key["name"], key["models"], key["token_budget"]) for key in listed["data"]] == [
        ("boss", [], None),
        ("team", ["qwen*"], 1000),
    ]
    shown = invoke("list", *file).stdout
    assert "1000 tokens/month" in shown
    assert "2100-01-01" in shown
    assert invoke("revoke", "team", *file).exit_code == 0
    assert "team" not in invoke("list", *file).stdout
    assert "revoked" in invoke("list", "--revoked", *file).stdout
    assert invoke("revoke", "team", *file).exit_code == 1


def test_a_bad_value_is_refused_with_its_name(config: Path) -> None:
    refused = invoke("create", "boss", "--admin", "--expires", "soon", "--config", str(config))
    assert refused.exit_code == 2
    assert "expires" in refused.stderr


def test_a_running_server_obeys_at_once(tmp_path: Path) -> None:
    settings = {**demo_config(), "accounts": {"path": str(tmp_path / "a.sqlite")}}
    with live_server({**settings, "keys": [{"name": "boss", "key": "boss-secret", "admin": True}]}) as server:
        at = ("--url", server.url, "--key", "boss-secret")
        secret = invoke("create", "team", *at).stdout.strip()
        headers = {"authorization": f"Bearer {secret}"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
        assert "team" in invoke("list", *at).stdout
        assert invoke("revoke", "team", *at).exit_code == 0
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 401
        assert invoke("revoke", "boss", *at).exit_code == 1, "it is in the configuration"


def test_the_keys_of_a_cluster_are_a_file(tmp_path: Path) -> None:
    assert invoke("cluster", str(tmp_path / "a.keys")).exit_code == 0
    assert (tmp_path / "a.keys").is_file()
