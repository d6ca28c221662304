"""A reload replaces the configuration while requests run; an invalid configuration changes nothing."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelyard.config.load import load_config
from modelyard.core.errors import Conflict
from modelyard.server.admin_service import public_settings
from modelyard.server.app import compose
from tests.live_server import demo_config

CHAT_BODY = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}


class ReloadableServer:
    """A server whose configuration file can be changed by the test."""

    def __init__(self, file: Path, config: dict[str, Any]) -> None:
        self.file = file
        self.write(config)
        self.server_app = compose(self.read().config, {}, self.read)

    def write(self, config: dict[str, Any]) -> None:
        self.file.write_text(json.dumps(config))

    def read(self) -> Any:
        return load_config(self.file, env={})


@asynccontextmanager
async def reloadable_server(
    file: Path, config: dict[str, Any]
) -> AsyncIterator[tuple[ReloadableServer, httpx.AsyncClient]]:
    server = ReloadableServer(file, config)
    await server.server_app.scheduler.load("demo")
    transport = httpx.ASGITransport(server.server_app.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield server, client
    await server.server_app.stop()
    await server.server_app.gateway.close()


def config_with_reply(text: str) -> dict[str, Any]:
    config = demo_config([{"steps": [{"text": text}]}])
    del config["routes"]
    return config


async def reply_text(client: httpx.AsyncClient, model: str = "demo") -> str:
    reply = (await client.post("/v1/chat/completions", json=CHAT_BODY | {"model": model})).json()
    return str(reply["choices"][0]["message"]["content"] if "choices" in reply else reply["error"]["code"])


async def test_a_changed_model_is_reloaded(tmp_path: Path) -> None:
    async with reloadable_server(tmp_path / "a.json", config_with_reply("Before.")) as (server, client):
        assert await reply_text(client) == "Before."
        server.write(config_with_reply("After."))
        reply = await client.post("/v1/admin/reload")
        assert reply.json() == {"added": [], "removed": [], "changed": ["demo"], "warnings": []}
        assert await reply_text(client) == "After."


async def test_models_are_added_and_removed(tmp_path: Path) -> None:
    async with reloadable_server(tmp_path / "a.json", config_with_reply("One.")) as (server, client):
        more = config_with_reply("One.")
        more["models"]["second"] = {"backend": "fake", "token_delay": 0, "autoload": True}
        server.write(more)
        assert (await client.post("/v1/admin/reload")).json()["added"] == ["second"]
        assert "second" in [row["id"] for row in (await client.get("/v1/admin/models")).json()["data"]]
        server.write(config_with_reply("One."))
        assert (await client.post("/v1/admin/reload")).json()["removed"] == ["second"]
        assert await reply_text(client, "second") == "model_not_found"
        assert await reply_text(client) == "One."


async def test_an_invalid_file_changes_nothing_and_names_every_error(tmp_path: Path) -> None:
    async with reloadable_server(tmp_path / "a.json", config_with_reply("Still here.")) as (server, client):
        wrong = config_with_reply("Never.")
        wrong["models"]["demo"]["replicas"] = 0
        wrong["caches"]["main"]["model"] = "unknown"
        server.write(wrong)
        reply = await client.post("/v1/admin/reload")
        assert reply.status_code == 400
        assert "replicas" in reply.json()["error"]["message"]
        assert "the old one stays" in reply.json()["error"]["message"]
        assert await reply_text(client) == "Still here."


async def test_settings_that_need_a_restart_are_reported(tmp_path: Path) -> None:
    async with reloadable_server(tmp_path / "a.json", config_with_reply("Hi.")) as (server, client):
        server.write({**config_with_reply("Hi."), "http": {"port": 9999}})
        (warning,) = (await client.post("/v1/admin/reload")).json()["warnings"]
        assert warning.startswith("http: changed; restart the server")


async def test_a_server_without_a_file_cannot_reload() -> None:
    server_app = compose(load_config(env={}, overrides=demo_config()).config, {})
    with pytest.raises(Conflict):
        await server_app.admin.reload()
    await server_app.stop()
    await server_app.gateway.close()


def test_secrets_are_not_shown() -> None:
    settings = load_config(
        env={},
        overrides={
            "models": {
                "m": {
                    "backend": "llama_server",
                    "path": "/m.gguf",
                    "llama_server_env": {"HF_TOKEN": "hidden", "CUDA_VISIBLE_DEVICES": "0"},
                },
                "far": {
                    "backend": "openai_remote",
                    "remote_base_url": "https://api.example.com/v1",
                    "remote_api_key_env": "EXAMPLE_API_KEY",
                    "remote_model": "large",
                },
            }
        },
    ).config.models
    shown = public_settings(settings["m"])
    assert shown["llama_server_env"] == {"HF_TOKEN": "***", "CUDA_VISIBLE_DEVICES": "***"}
    assert shown["path"] == "/m.gguf"
    assert public_settings(settings["far"])["remote_api_key_env"] == "EXAMPLE_API_KEY"
