"""docs/api.md: every endpoint is in it, every path in it is an endpoint, and every command in it works."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from tests.docs.pages import DOCS, Call, calls
from tests.live_server import LiveServer, live_server

DEMO = DOCS.parent / "configs" / "demo.toml"

_UNLISTED = {"/docs/{name}"}  # the files of the page
# What the scripted model of the page cannot show: its library is empty.
_CHANGES = {"/api/blobs/{digest}", "/api/copy", "/api/create", "/api/delete", "/api/push"}


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    with live_server(tomllib.loads(DEMO.read_text())) as running:
        yield running


@pytest.fixture(scope="module")
def response_id(served: LiveServer) -> str:
    made: str = httpx.post(served.url + "/v1/responses", json={"model": "demo", "input": "Hi"}).json()["id"]
    return made


def endpoints(served: LiveServer) -> set[tuple[str, str]]:
    app: Any = served.app.app
    while not hasattr(app, "routes"):
        app = app._app
    found = [route for route in app.routes if isinstance(route, Route) and route.path not in _UNLISTED]
    paths = {(m, r.path.replace(":path", "")) for r in found for m in r.methods or () if m != "HEAD"}
    return {(method, path) for method, path in paths if not _is_other_version(path)}


def _is_other_version(path: str) -> bool:
    """Google's paths have several beginnings."""
    return path.startswith("/v1alpha/") or (":" in path and not path.startswith("/v1beta/"))


def test_the_page_lists_every_endpoint_and_no_other(served: LiveServer):
    listed = set(re.findall(r"`(GET|POST|DELETE) (/[^ `]*)`", (DOCS / "api.md").read_text()))
    assert listed == endpoints(served)


def test_every_endpoint_has_a_command(served: LiveServer):
    shown = {(call.method, re.sub(r"\?.*", "", call.path).replace("$ID", "{id}")) for call in calls("api.md")}
    for method, path in endpoints(served):
        if path in _CHANGES:
            continue
        pattern = re.escape(path).replace(r"\{id\}", r"[^?]+") + "$"
        assert any(m == method and re.match(pattern, p) for m, p in shown), (method, path)


@pytest.mark.parametrize("call", calls("api.md"), ids=lambda call: f"{call.method} {call.path}")
def test_every_command_works(served: LiveServer, response_id: str, call: Call):
    path, body = call.path.replace("$ID", response_id), call.body.replace("$ID", response_id)
    reply = httpx.request(call.method, served.url + path, content=body, headers=call.headers)
    assert reply.status_code == 200, reply.text
    assert "error" not in reply.text[:20]
