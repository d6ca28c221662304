"""Models, caches and routes are changed in the files of a running server: previewed, checked, written with a backup."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelyard.config.load import ConfigSources
from modelyard.core.errors import InvalidRequest
from modelyard.server.app import compose
from tests.live_server import owner_headers

TEXT = """\
# My models
[http]
port = 8000

# The one for everything
[models.demo]   # scripted
backend = "fake"
token_delay = 0
script = [{ steps = [{ text = "Before." }] }]
aliases = ["other"]

[models.far]
backend = "openai_remote"
enabled = false
remote_base_url = "http://127.0.0.1:9/v1"
remote_model = "m"
remote_api_key_env = "FAR_KEY"
remote_headers = { "X-Team" = "blue-secret", "Authorization" = "Bearer abcdef" }

[caches.main]
model = "demo"
n_ctx = 4096   # enough

# coding
[[routes]]
match = "claude-*"
model = "demo"

[[routes]]
match = "gpt-*"
cache = "main"
"""


class EditedServer:
    def __init__(self, client: httpx.AsyncClient, file: Path, service: Any) -> None:
        self.client, self.file, self.service = client, file, service

    async def post(self, action: str, status: int = 200, **change: Any) -> Any:
        reply = await self.client.post(f"/v1/admin/config/{action}", json=change)
        assert reply.status_code == status, reply.text
        return reply.json()

    async def overview(self) -> Any:
        return (await self.client.get("/v1/admin/config")).json()

    async def entry(self, section: str, name: str) -> Any:
        return next(each for each in (await self.overview())[section] if each["name"] == name)


@asynccontextmanager
async def edited_server(folder: Path, text: str | None = TEXT, **settings: Any) -> AsyncIterator[EditedServer]:
    file = folder / "modelyard.toml"
    if text is not None:
        file.write_text(text)
    env = {"HOME": str(folder / "home"), **settings}
    sources = ConfigSources(env=env, cwd=folder)
    app = compose(sources().config, {}, sources)
    transport = httpx.ASGITransport(app.app, raise_app_exceptions=False)
    headers = owner_headers(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        yield EditedServer(client, file, app.admin)
    await app.stop()
    await app.gateway.close()


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EditedServer]:
    async with edited_server(tmp_path) as running:
        yield running


# --- what the files say -----------------------------------------------------------------------------------------------


async def test_entries_are_shown_with_their_file_and_without_secrets(server: EditedServer) -> None:
    seen = await server.overview()
    assert seen["editable"] is True
    assert seen["target"] == str(server.file)
    assert {each["role"]: each["exists"] for each in seen["files"]} == {"user": False, "project": True}
    far = await server.entry("models", "far")
    assert far["file"] == str(server.file)
    assert far["backend"] == "openai_remote"
    assert far["values"]["remote_base_url"] == "http://127.0.0.1:9/v1"
    assert "secret" not in json.dumps(seen)
    assert "abcdef" not in json.dumps(seen)
    assert [route["match"] for route in seen["routes"]["entries"]] == [["claude-*"], ["gpt-*"]]


async def test_a_form_offers_only_the_options_of_the_engine(server: EditedServer) -> None:
    async def names(**values: Any) -> dict[str, Any]:
        found = await server.post("fields", section="models", name="demo", values=values)
        return {field["name"]: field for field in found["fields"]}

    fake, llama = await names(), await names(backend="llama_cpp")
    assert "script" in fake
    assert "n_gpu_layers" not in fake
    assert "n_gpu_layers" in llama
    assert "script" not in llama
    assert fake["token_delay"]["description"]
    assert fake["backend"]["choices"][0] == "ct2"
    assert fake["decoding.temperature"] == {
        "name": "decoding.temperature",
        "kind": "number",
        "group": "sampling",
        "minimum": 0,
        "maximum": 100,
        "description": fake["decoding.temperature"]["description"],
    }
    assert (await names(backend="", path="/x/model.gguf")).keys() == llama.keys()
    caches = await server.post("fields", section="caches")
    assert {field["name"]: field.get("choices") for field in caches["fields"]}["model"] == ["demo", "far"]


async def test_sources_below_and_above_the_file_are_named(tmp_path: Path) -> None:
    own = tmp_path / "home" / ".config" / "modelyard" / "modelyard.toml"
    own.parent.mkdir(parents=True)
    own.write_text('[models.demo]\ndescription = "mine"\n')
    async with edited_server(tmp_path, MODELYARD_CACHES__MAIN__N_CTX="2048") as server:
        demo = await server.entry("models", "demo")
        assert demo["file"] == str(server.file)
        assert demo["inherited"] == {"description": {"value": "mine", "source": str(own)}}
        assert (await server.entry("caches", "main"))["overridden"] == {
            "n_ctx": "environment MODELYARD_CACHES__MAIN__N_CTX"
        }


# --- previews ---------------------------------------------------------------------------------------------------------


async def test_a_preview_shows_the_difference_and_writes_nothing(server: EditedServer) -> None:
    seen = await server.post(
        "preview", section="models", name="demo", set={"token_delay": 0.5, "decoding.top_p": 0.9}, unset=["aliases"]
    )
    assert seen["valid"], seen["problems"]
    assert seen["file"] == str(server.file)
    assert seen["effect"]["changed"] == ["demo"]
    changed = [line for line in seen["diff"].splitlines()[2:] if line[0] in "+-"]
    assert changed == ["-token_delay = 0", "+token_delay = 0.5", '-aliases = ["other"]', "+decoding = { top_p = 0.9 }"]
    assert server.file.read_text() == TEXT
    assert [file.name for file in server.file.parent.iterdir() if file.is_file()] == ["modelyard.toml"]


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"section": "models", "name": "demo", "set": {"token_delay": "fast"}}, "token_delay", "must be a number"),
        ({"section": "models", "name": "demo", "set": {"tokendelay": 1}}, "tokendelay", "unknown key"),
        ({"section": "models", "name": "demo", "set": {"decoding.top_p": 7}}, "decoding.top_p", "at most 1"),
        ({"section": "models", "name": "demo", "set": {"format": "hermess"}}, "format", "Did you mean"),
        ({"section": "models", "name": "x", "new": True, "set": {"backend": "fakee"}}, "backend", "Did you mean"),
        ({"section": "models", "name": "x", "new": True, "set": {"path": "/no/x.gguf"}}, "path", "/no/x.gguf"),
        ({"section": "caches", "name": "x", "new": True, "set": {"model": "demo"}}, "n_ctx", "is missing"),
        ({"section": "caches", "name": "main", "set": {"model": "nobody"}}, "model", "there is no model"),
        ({"section": "routes", "index": 0, "set": {"model": "nobody"}}, "model", "there is no model"),
        ({"section": "routes", "new": True, "set": {"match": "x"}}, "", "needs cache or model"),
        ({"section": "models", "name": "demo", "remove": True}, "", "there is no model 'demo'"),
    ],
)
async def test_what_is_wrong_is_reported_at_its_field(
    server: EditedServer, change: dict[str, Any], field: str, words: str
) -> None:
    seen = await server.post("preview", **change)
    assert not seen["valid"]
    assert any(each["field"] == field and words in each["message"] for each in seen["problems"]), seen["problems"]
    refused = await server.post("apply", status=400, **change)
    assert words in refused["error"]["message"]
    assert server.file.read_text() == TEXT


async def test_a_model_that_does_not_run_here_is_written_only_by_force(server: EditedServer) -> None:
    change: dict[str, Any] = {
        "section": "models",
        "name": "x",
        "new": True,
        "set": {"path": "/no/x.gguf", "autoload": True},
    }
    seen = await server.post("preview", **change)
    assert (seen["valid"], seen["can_force"]) == (False, True)
    await server.post("apply", **change, force=True)
    assert "[models.x]" in server.file.read_text()


# --- changes ----------------------------------------------------------------------------------------------------------


async def test_a_change_is_written_with_a_backup_and_takes_effect(server: EditedServer) -> None:
    change: dict[str, Any] = {
        "section": "models",
        "name": "demo",
        "set": {"description": "New", "aliases": ["other", "more"]},
    }
    seen = await server.post("preview", **change)
    done = await server.post("apply", **change, revision=seen["revision"])
    assert server.file.with_name("modelyard.bak.toml").read_text() == TEXT
    assert done["backup"] == str(server.file.with_name("modelyard.bak.toml"))
    assert done["reload"]["changed"] == ["demo"]
    assert server.file.read_text() == TEXT.replace('["other"]', '["other", "more"]\ndescription = "New"')
    demo = (await server.client.get("/v1/admin/models/demo")).json()
    assert (demo["description"], demo["aliases"]) == ("New", ["other", "more"])
    assert (await server.overview())["files"][-1]["revision"] == done["revision"] != seen["revision"]


async def test_models_and_caches_are_added_and_removed(server: EditedServer) -> None:
    await server.post("apply", section="models", name="new", new=True, set={"backend": "fake", "autoload": True})
    await server.post("apply", section="caches", name="small", new=True, set={"model": "new", "n_ctx": 512})
    record = (await server.client.get("/v1/admin/models/new")).json()
    assert record["caches"]["small"]["window"] == 512
    refused = await server.post("apply", section="models", name="new", remove=True, status=400)
    assert "there is no model 'new'" in refused["error"]["message"]  # its cache would have none
    await server.post("apply", section="caches", name="small", remove=True)
    done = await server.post("apply", section="models", name="new", remove=True)
    assert done["reload"]["removed"] == ["new"]
    assert server.file.read_text() == TEXT


async def test_routes_are_added_moved_changed_and_removed(server: EditedServer) -> None:
    async def matches() -> list[list[str]]:
        rows = (await server.client.get("/v1/admin/routes")).json()["data"]
        return [row["match"] for row in rows if row["kind"] == "route"]

    await server.post("apply", section="routes", new=True, set={"match": ["a", "b"], "model": "demo"})
    await server.post("apply", section="routes", index=2, to=0)
    assert await matches() == [["a", "b"], ["claude-*"], ["gpt-*"]]
    await server.post("apply", section="routes", index=1, set={"cache": "main"}, unset=["model"])
    await server.post("apply", section="routes", index=0, remove=True)
    assert await matches() == [["claude-*"], ["gpt-*"]]
    assert server.file.read_text() == TEXT.replace('"claude-*"\nmodel = "demo"', '"claude-*"\ncache = "main"')


async def test_masked_secrets_stay_and_new_ones_are_written(server: EditedServer) -> None:
    shown = (await server.entry("models", "far"))["values"]
    await server.post(
        "apply",
        section="models",
        name="far",
        set={"remote_headers": {**shown["remote_headers"], "X-More": "1"}, "remote_model": "n"},
    )
    text = server.file.read_text()
    assert '"X-Team" = "blue-secret"' in text or 'X-Team = "blue-secret"' in text
    assert "Bearer abcdef" in text
    assert "X-More" in text
    refused = await server.post(
        "apply",
        section="models",
        name="demo",
        set={"description": f"a {shown['remote_headers']['X-Team']}"},
        status=400,
    )
    assert "in place of a secret" in refused["error"]["message"]


async def test_the_difference_hides_secrets_beside_the_change(server: EditedServer) -> None:
    seen = await server.post("preview", section="models", name="far", set={"remote_model": "n"})
    assert "remote_model" in seen["diff"]
    assert "abcdef" not in seen["diff"]


# --- what goes wrong --------------------------------------------------------------------------------------------------


async def test_a_file_that_was_changed_on_disk_is_not_overwritten(server: EditedServer) -> None:
    change: dict[str, Any] = {"section": "models", "name": "demo", "set": {"description": "New"}}
    seen = await server.post("preview", **change)
    server.file.write_text(TEXT + "\n# by hand\n")
    refused = await server.post("apply", **change, revision=seen["revision"], status=409)
    assert refused["error"]["code"] == "file_changed"
    assert server.file.read_text() == TEXT + "\n# by hand\n"
    again = await server.post("preview", **change)
    await server.post("apply", **change, revision=again["revision"])
    assert server.file.read_text().endswith("# by hand\n")
    assert 'description = "New"' in server.file.read_text()


async def test_a_refused_reload_restores_the_file(server: EditedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(**_: Any) -> Any:
        raise InvalidRequest("the model would break", code="config")

    monkeypatch.setattr("modelyard.server.config_editor.ConfigEditor._reload_now", lambda _: refuse())
    refused = await server.post("apply", section="models", name="demo", set={"description": "New"}, status=400)
    assert "is as it was: the model would break" in refused["error"]["message"]
    assert server.file.read_text() == TEXT
    assert [file.name for file in server.file.parent.iterdir() if file.is_file()] == ["modelyard.toml"]


async def test_a_reload_that_runs_already_is_waited_for(server: EditedServer) -> None:
    server.service._busy = True

    def end() -> None:
        server.service._busy = False

    asyncio.get_running_loop().call_later(0.2, end)
    done = await server.post("apply", section="models", name="demo", set={"description": "New"})
    assert done["reload"]["changed"] == ["demo"]


async def test_a_read_only_file_says_so(server: EditedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelyard.server.config_editor.os.access", lambda *_: False)
    assert (await server.overview())["files"][-1]["writable"] is False
    refused = await server.post("preview", section="models", name="demo", set={"description": "x"}, status=409)
    assert "read-only for the server" in refused["error"]["message"]


async def test_a_file_with_errors_on_disk_is_named(server: EditedServer) -> None:
    server.file.write_text(TEXT + "[models.demo]\n")
    reply = await server.client.get("/v1/admin/config")
    assert reply.status_code == 400
    assert "modelyard.toml" in reply.json()["error"]["message"]
    server.file.write_text(TEXT.replace("n_ctx = 4096", 'n_ctx = "many"'))
    assert "must be a whole number" in (await server.overview())["problems"][0]
    fixed = await server.post("apply", section="caches", name="main", set={"n_ctx": 8192})
    assert fixed["valid"]


async def test_files_are_only_shown_if_editing_is_off(tmp_path: Path) -> None:
    async with edited_server(tmp_path, TEXT.replace("port = 8000", "edit_config = false")) as server:
        assert (await server.overview())["editable"] is False
        change: dict[str, Any] = {"section": "models", "name": "demo", "set": {"description": "x"}}
        assert (await server.post("preview", **change))["valid"]
        assert "edit_config" in (await server.post("apply", **change, status=403))["error"]["message"]


async def test_the_last_model_cannot_be_removed(tmp_path: Path) -> None:
    async with edited_server(tmp_path, '[models.demo]\nbackend = "fake"\n') as server:
        seen = await server.post("preview", section="models", name="demo", remove=True)
        assert not seen["valid"]
        assert "no model would be left" in seen["problems"][0]["message"]


# --- without a file ---------------------------------------------------------------------------------------------------


async def test_without_a_file_the_users_own_is_created_and_the_built_in_model_stays(tmp_path: Path) -> None:
    async with edited_server(tmp_path, None) as server:
        own = tmp_path / "home" / ".config" / "modelyard" / "modelyard.toml"
        assert (await server.overview())["target"] == str(own)
        seen = await server.post("preview", section="models", name="smollm2", set={"n_threads": 1})
        assert "built-in configuration" in seen["notes"][0]
        done = await server.post("apply", section="models", name="smollm2", set={"n_threads": 1}, force=True)
        assert done["backup"] is None
        assert done["reload"]["removed"] == []
        assert (await server.overview())["target"] == str(own)
        caches = {each["name"] for each in (await server.overview())["caches"]}
        assert caches == {"main", "fast"}
        route = await server.client.get("/v1/admin/route?model=claude-haiku&endpoint=/v1/messages")
        assert route.json()["cache"] == "fast"
        assert (await server.client.get("/v1/admin/route?model=anything")).json()["model"] == "smollm2"


async def test_routes_of_another_source_are_copied_before_one_is_added(tmp_path: Path) -> None:
    own = tmp_path / "home" / ".config" / "modelyard" / "modelyard.toml"
    own.parent.mkdir(parents=True)
    own.write_text('[[routes]]\nmatch = "mine"\nmodel = "demo"\n')
    async with edited_server(tmp_path, '[models.demo]\nbackend = "fake"\n') as server:
        change: dict[str, Any] = {
            "section": "routes",
            "new": True,
            "set": {"match": "x", "model": "demo"},
            "file": str(server.file),
        }
        assert "copied" in (await server.post("preview", **change))["notes"][0]
        await server.post("apply", **change)
        entries = (await server.overview())["routes"]["entries"]
        assert [route["match"] for route in entries] == [["mine"], ["x"]]
        assert own.read_text().count("[[routes]]") == 1
