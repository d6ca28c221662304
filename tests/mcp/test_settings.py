from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from modelyard.config.load import load_config
from modelyard.config.problems import ConfigError
from modelyard.config.secrets import config_secrets
from modelyard.mcp.settings import McpSettings
from tests.live_server import demo_config


def test_mcp_is_off_by_default() -> None:
    assert not McpSettings().is_on
    assert McpSettings(allow_urls=["*.example.com"]).is_on


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ({}, "either command, url or builtin"),
        ({"command": "x", "url": "http://a/"}, "either command, url or builtin"),
        ({"command": "x", "headers": {"a": "b"}}, "headers belongs to url"),
        ({"url": "http://a/", "args": ["x"]}, "args belongs to command"),
        ({"url": "ftp://a/"}, "is not an http"),
        ({"command": "x", "shell": True}, "shell"),
        ({"builtin": "fetch", "url": "http://a/"}, "either command, url or builtin"),
        ({"url": "http://a/", "token_env": "T", "oauth": {}}, "either oauth or token_env"),
        ({"url": "http://a/", "oauth": {"grant": "client_credentials"}}, "needs client_id"),
    ],
)
def test_a_server_that_makes_no_sense_is_refused(server: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        McpSettings.model_validate({"servers": {"a": server}})


def test_names_and_hosts_are_checked() -> None:
    with pytest.raises(ValidationError, match="letters, digits"):
        McpSettings.model_validate({"servers": {"a b": {"command": "x"}}})
    with pytest.raises(ValidationError, match="host glob"):
        McpSettings(allow_urls=["https://example.com/"])


def test_a_route_names_a_server_that_exists() -> None:
    config = demo_config() | {"routes": [{"match": "*", "model": "demo", "mcp": "dosc"}]}
    config["mcp"] = {"servers": {"docs": {"url": "http://127.0.0.1:9/mcp"}}}
    with pytest.raises(ConfigError, match=r"there is no MCP server 'dosc'.*Did you mean 'docs'"):
        load_config(env={}, overrides=config)


def test_a_variable_that_is_not_set_is_a_warning() -> None:
    server = {"url": "http://127.0.0.1:9/mcp", "token_env": "DOCS_TOKEN"}
    loaded = load_config(env={}, overrides=demo_config() | {"mcp": {"servers": {"docs": server}}})
    assert "'DOCS_TOKEN' is not set" in str(loaded.problems[-1])


def test_credentials_of_servers_are_masked_everywhere() -> None:
    servers = {
        "a": {"command": "x", "env": {"API_KEY": "k-1"}, "env_from": ["TOKEN"]},
        "b": {"url": "http://127.0.0.1:9/mcp", "headers": {"authorization": "Bearer k-2"}, "token_env": "OTHER"},
    }
    env = {"TOKEN": "k-3", "OTHER": "k-4"}
    config = load_config(env=env, overrides=demo_config() | {"mcp": {"servers": servers}}).config
    assert {"k-1", "Bearer k-2", "k-3", "k-4"} <= set(config_secrets(config, env))


def test_a_missing_package_is_reported_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.config.checks.find_spec", lambda _: None)
    servers = {"servers": {"docs": {"url": "http://127.0.0.1:9/mcp"}}}
    loaded = load_config(env={}, overrides=demo_config() | {"mcp": servers})
    assert "pip install 'modelyard[mcp]'" in str(loaded.problems[-1])
