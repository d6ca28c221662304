"""A reload replaces the configuration while requests run; an invalid configuration changes nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelyard.config.library_models import read_library_models
from modelyard.config.load import load_config
from modelyard.core.errors import Conflict, InvalidRequest
from modelyard.library import models
from modelyard.library.variants import MemoryBudget
from modelyard.server.app import compose
from tests.library.convert.tiny_models import write_model
from tests.library.files import write_gguf
from tests.live_server import demo_config, owner_headers

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
    headers = {} if config.get("keys") else owner_headers(server.server_app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
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


async def test_keys_prices_and_limits_are_applied(tmp_path: Path) -> None:
    def config(*keys: dict[str, Any], price: float) -> dict[str, Any]:
        found = config_with_reply("Hi.")
        found["models"]["demo"]["price"] = {"output": price}
        return {**found, "keys": list(keys), "accounts": {"path": str(tmp_path / "accounts.sqlite")}}

    boss = {"name": "boss", "key": "boss-secret", "admin": True}
    team = {"name": "team", "key": "team-secret", "requests_per_minute": 1}
    async with reloadable_server(tmp_path / "a.json", config(boss, price=1.0)) as (server, client):

        async def status(secret: str) -> int:
            headers = {"x-api-key": secret}
            return (await client.post("/v1/chat/completions", json=CHAT_BODY, headers=headers)).status_code

        assert await status("team-secret") == 401
        server.write(config(boss, team, price=2.0))
        reply = await client.post("/v1/admin/reload", headers={"x-api-key": "boss-secret"})
        assert "restart" not in str(reply.json()["warnings"])
        assert [await status("team-secret") for _ in range(2)] == [200, 429]
        assert server.server_app.accounts.ledger.prices["demo"].output == 2.0
        server.write(config(boss, price=2.0))
        await client.post("/v1/admin/reload", headers={"x-api-key": "boss-secret"})
        assert await status("team-secret") == 401
        await server.server_app.accounts.close()


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


def config_with_template(template: str | None) -> dict[str, Any]:
    config = config_with_reply("Hi.")
    if template is not None:
        config["models"]["demo"]["chat_template"] = template
    return config


async def state_of(client: httpx.AsyncClient, model: str = "demo") -> str:
    return str((await client.get(f"/v1/admin/models/{model}")).json()["state"])


@pytest.mark.parametrize(
    "template",
    ["{% if %}", "no braces and no file", "{{ raise_exception('never') }}", "{{ messages[9].role.upper() }}"],
)
async def test_a_broken_template_does_not_take_a_running_model_down(tmp_path: Path, template: str) -> None:
    async with reloadable_server(tmp_path / "a.json", config_with_template(None)) as (server, client):
        server.write(config_with_template(template))
        reply = await client.post("/v1/admin/reload")
        assert reply.status_code == 400
        assert "models.demo: " in reply.json()["error"]["message"]
        assert (await reply_text(client), await state_of(client)) == ("Hi.", "ready")


async def test_a_new_model_with_a_broken_template_concerns_no_other_model(tmp_path: Path) -> None:
    async with reloadable_server(tmp_path / "a.json", config_with_template(None)) as (server, client):
        more = config_with_template(None)
        more["models"]["second"] = more["models"]["demo"] | {"chat_template": "{% if %}"}
        server.write(more)
        assert (await client.post("/v1/admin/reload")).json()["added"] == ["second"]
        assert (await reply_text(client), await reply_text(client, "second")) == ("Hi.", "model_failed")


@pytest.mark.parametrize("fixed", [{"chat_template": None}, {"chat_template": None, "script": [{"steps": []}]}])
async def test_a_model_that_failed_at_the_start_runs_once_its_configuration_is_fixed(
    tmp_path: Path, fixed: dict[str, Any]
) -> None:
    """With the same engine as before, and with another one."""
    server = ReloadableServer(tmp_path / "a.json", config_with_template("{% if %}"))
    with pytest.raises(InvalidRequest):
        await server.server_app.scheduler.load("demo")
    transport = httpx.ASGITransport(server.server_app.app, raise_app_exceptions=False)
    headers = owner_headers(server.server_app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        assert await state_of(client) == "failed"
        config = config_with_template(None)
        config["models"]["demo"] |= {name: value for name, value in fixed.items() if value is not None}
        server.write(config)
        assert (await client.post("/v1/admin/reload")).status_code == 200
        await server.server_app.scheduler.load("demo")
        assert await state_of(client) == "ready"
    await server.server_app.stop()
    await server.server_app.gateway.close()


@pytest.mark.parametrize("text", ["", "\n", "# comments only\n"])
async def test_a_file_that_has_lost_its_models_changes_nothing(tmp_path: Path, text: str) -> None:
    async with reloadable_server(tmp_path / "a.json", config_with_reply("Still here.")) as (server, client):
        server.file = tmp_path / "a.toml"
        server.file.write_text(text)
        reply = await client.post("/v1/admin/reload")
        assert reply.status_code == 400
        assert "no model is defined any more" in reply.json()["error"]["message"]
        assert (await reply_text(client), await state_of(client)) == ("Still here.", "ready")


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


# --- models of the library --------------------------------------------------------------------------------------------


def library_server(file: Path) -> ReloadableServer:
    class LibraryServer(ReloadableServer):
        def read(self) -> Any:
            return load_config(self.file, env={}, library=lambda: read_library_models(MemoryBudget(2**34)))

    return LibraryServer(file, config_with_reply("One."))


async def test_a_pulled_model_reads_its_files_at_its_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    caplog.set_level("INFO")
    server = library_server(tmp_path / "a.json")
    built = server.server_app
    await built.scheduler.load("demo")
    transport = httpx.ASGITransport(built.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        kept = built.gateway.lookup.models["demo"]
        models.pull(str(write_model(tmp_path / "tiny.gguf")))
        await built.admin.reload_library()
        assert built.gateway.lookup.models["demo"] is kept, "what has not changed is not read again"
        assert built.gateway.lookup.models["tiny"].text is None
        assert "tiny: 8 conversations of 256 tokens: as trained" in caplog.text
        assert (await client.get("/health")).json()["tokenizer_loaded"]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        replies = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(3)))
        assert [reply.status_code for reply in replies] == [200] * 3
        defined = built.gateway.lookup.models["tiny"]
        assert defined.text is not None
        count = await client.post("/tokenize", json={"model": "tiny", "content": "hello"})
        assert count.status_code == 200
        await built.admin.reload_library()
        assert built.gateway.lookup.models["tiny"] is defined
        models.remove_model("tiny")
        await built.admin.reload_library()
        assert (await client.post("/v1/chat/completions", json=body)).json()["error"]["code"] == "model_not_found"
    await built.stop()
    await built.gateway.close()


async def test_a_pulled_file_that_is_broken_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELYARD_CACHE", str(tmp_path / "cache"))
    models.pull(str(write_gguf(tmp_path / "hollow.gguf")))  # a header without weights
    async with reloadable_server(tmp_path / "a.json", config_with_reply("One.")):
        built = library_server(tmp_path / "b.json").server_app
        transport = httpx.ASGITransport(built.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = CHAT_BODY | {"model": "hollow"}
            reply = await client.post("/v1/chat/completions", json=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_failed")
        await built.stop()
        await built.gateway.close()
