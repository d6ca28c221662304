"""docs/api.md: every endpoint is in it, every path in it is an endpoint, and every command in it works."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from modelyard.http.routes import CLIENTS, OPEN, ROWS
from tests.docs.pages import DOCS, Call, calls
from tests.e2e.helpers import wait_until
from tests.http.app_client import make_app
from tests.live_server import LiveServer, live_server

DEMO = DOCS.parent / "configs" / "demo.toml"

_BODY = '{"model": "demo", "messages": [{"role": "user", "content": "' + "Hi " * 300 + '"}]}'
LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": ' + _BODY.encode() + b"}"
_UNLISTED = {"/docs/{name}"}  # the files of the page
# What the scripted model of the page cannot show: its library is empty, and it has no KV.
_CHANGES = {"/api/blobs/{digest}", "/api/copy", "/api/create", "/api/delete", "/api/push", "/slots/{id}"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    objects = tmp_path_factory.mktemp("objects") / "objects.sqlite"
    with live_server(tomllib.loads(DEMO.read_text()) | {"store": {"objects": str(objects)}}) as running:
        yield running


@pytest.fixture(scope="module")
def response_id(served: LiveServer) -> str:
    made: str = httpx.post(served.url + "/v1/responses", json={"model": "demo", "input": "Hi"}).json()["id"]
    return made


ROUTES = [
    row
    for row in (*CLIENTS, *OPEN)
    if row.method in ("GET", "POST", "DELETE") and row.path not in _UNLISTED and row.handler != "not_served"
]


def test_the_page_lists_every_endpoint_and_no_other() -> None:
    listed = set(re.findall(r"`(GET|POST|DELETE) (/[^ `]*)`", (DOCS / "api.md").read_text()))
    app: Any = make_app().app
    routes = [*ROUTES, *(set(app.table) - set(ROWS))]  # and those of plug-ins
    named = {(row.method, path.replace(":path", "")) for row in routes for path in (row.path, *row.also)}
    assert {(row.method, row.label) for row in routes} <= listed <= named


def test_every_endpoint_has_a_command() -> None:
    shown = {(call.method, re.sub(r"\$[A-Z]+", "{id}", re.sub(r"\?.*", "", call.path))) for call in calls("api.md")}
    for method, path in ((row.method, row.label) for row in ROUTES):
        if path in _CHANGES:
            continue
        pattern = re.escape(path).replace(r"\{id\}", r"[^?]+").replace(r"\{item\}", "[^?]+") + "$"
        assert any(m == method and re.match(pattern, p) for m, p in shown), (method, path)


def new_objects(url: str, text: str) -> dict[str, str]:
    """New objects for the variables of a command, which may delete or cancel them."""

    def create(path: str, **body: Any) -> str:
        reply = httpx.post(url + path, json=body)
        assert reply.status_code == 200, reply.text
        made: str = reply.json()["id"]
        return made

    found: dict[str, str] = {}
    if "$BACKGROUND" in text:
        found["$BACKGROUND"] = create("/v1/responses", model="demo", input="Hi", background=True)
    if "$CONVERSATION" in text:
        id = found["$CONVERSATION"] = create("/v1/conversations", items=[{"role": "user", "content": "Hi"}])
        found["$ITEM"] = httpx.get(f"{url}/v1/conversations/{id}/items").json()["first_id"]
    if "$FILE" in text or "$BATCH" in text:
        reply = httpx.post(url + "/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", LINE)})
        file = found["$FILE"] = reply.json()["id"]
    if "$BATCH" in text:
        found["$BATCH"] = create("/v1/batches", input_file_id=file, endpoint="/v1/chat/completions")
    if "$MESSAGES" in text or "$ENDED" in text:
        params = {"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
        id = create("/v1/messages/batches", requests=[{"custom_id": "1", "params": params}])
        found |= {"$MESSAGES": id, "$ENDED": id}
    if "$ENDED" in text:
        wait_until(
            lambda: httpx.get(f"{url}/v1/messages/batches/{id}").json()["processing_status"] == "ended", "it ends"
        )
    return found


@pytest.mark.parametrize("call", calls("api.md"), ids=lambda call: f"{call.method} {call.path}")
def test_every_command_works(served: LiveServer, response_id: str, call: Call):
    path, body = call.path.replace("$ID", response_id), call.body.replace("$ID", response_id)
    for name, id in new_objects(served.url, path + body).items():
        path, body = path.replace(name, id), body.replace(name, id)
    if call.form:
        fields = dict(field.split("=", 1) for field in call.form if "=@" not in field)
        reply = httpx.post(served.url + path, data=fields, files={"file": ("in.jsonl", LINE)})
    else:
        reply = httpx.request(call.method, served.url + path, content=body, headers=call.headers)
    assert reply.status_code == 200, reply.text
    assert "error" not in reply.text[:20]
