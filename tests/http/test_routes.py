"""The route table: every path has one row, which the middleware, the metrics, the roles and the API page use."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.routing import Match

from modelyard import plugins
from modelyard.http.admin.routes import admin_router
from modelyard.http.errors import load_protocol
from modelyard.http.openapi import ROLE_FIELD, page_routes
from modelyard.http.routes import ADMIN, OTHER, ROWS, Row
from modelyard.http.settings import HttpSettings
from tests.http.app_client import TABLE, app_client, make_app
from tests.live_server import demo_config

ADMIN_ROUTES: list[Any] = list(admin_router(cast(Any, SimpleNamespace(accounts=None)), HttpSettings()).routes)
SCHEMA = ("GET", "/openapi.json")  # FastAPI's own route


def address(path: str) -> str:
    """A path that the pattern matches."""
    return re.sub(r"{\w+(:\w+)?}", "x", path)


def test_a_whole_server_serves_every_row_and_those_of_plugins() -> None:
    app: Any = make_app().app
    assert set(app.table) >= set(ROWS)
    added = {row.handler.partition(".")[0] for row in set(app.table) - set(ROWS)}
    assert added == set(plugins.names("endpoints"))


def test_no_two_rows_have_one_method_of_one_path() -> None:
    claims = [(row.method, path) for row in ROWS for path in (row.path, *row.also)]
    assert len(set(claims)) == len(claims)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.method} {row.path}")
def test_a_row_is_found_by_its_path_and_by_its_other_names(row: Row) -> None:
    method = "GET" if row.method == "*" else row.method
    for path in (row.path, *row.also):
        assert TABLE.find(address(path), method).row == row
        assert TABLE.find(f"{address(path)}/", method).row == row


def test_what_fastapi_serves_has_a_row_each() -> None:
    """Without one its path could not be reached: it is behind the table."""
    routes: list[Any] = [*ADMIN_ROUTES, *page_routes()]
    found = {(method, route.path) for route in routes for method in route.methods - {"HEAD"}} | {SCHEMA}
    rows = {(row.method, row.path) for row in ROWS if row.path.startswith("/v1/admin/") or row.handler == "pages"}
    assert found == rows


NAMES = st.lists(st.sampled_from(["a", "log", "load", "models", "keys", "hub", "x%0a", "\n"]), min_size=1, max_size=4)


@given(st.sampled_from(ADMIN), NAMES.map("/".join), st.sampled_from(["GET", "POST", "PUT", "PATCH", "DELETE"]))
@settings(deadline=None, max_examples=300)
def test_the_admin_app_takes_the_row_whose_role_was_required(row: Row, name: str, method: str) -> None:
    """The role is that of the table's row, and FastAPI finds the handler: both must find the same."""
    path = re.sub(r"{\w+(:\w+)?}", lambda _: name, row.path)
    found = TABLE.find(path, method)
    scope = {"type": "http", "path": found.path, "method": method}
    taken = next((route for route in ADMIN_ROUTES if route.matches(scope)[0] is Match.FULL), None)
    if taken is not None:
        assert found.row is not None
        assert (taken.path, taken.openapi_extra[ROLE_FIELD]) == (found.row.path, found.row.role)


def test_the_paths_of_every_protocol_are_in_the_table() -> None:
    listed = {path for row in ROWS for path in (row.path, *row.also)}
    for name in plugins.names("protocols"):
        assert listed.issuperset(getattr(load_protocol(name), "PATHS", ())), name


async def test_nothing_that_is_served_counts_as_other() -> None:
    rows = [row for row in ROWS if row.method in ("GET", "DELETE") and row.path != "/v1/admin/events"]
    rows += [row for row in ROWS if row.method == "POST" and not row.path.startswith("/v1/admin/")]
    async with app_client(is_owner=True) as client:
        for row in rows:
            await client.request(row.method, address(row.path))
        counted = (await client.get("/metrics")).text
        assert f'endpoint="{OTHER}"' not in counted
        for row in rows:
            assert f'endpoint="{row.label}"' in counted or row.path == "/metrics", row
        await client.get("/no/such/path")
        assert f'endpoint="{OTHER}"' in (await client.get("/metrics")).text


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("GET", "/chat/completions", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("PUT", "/v1/responses", "POST"),
        ("PUT", "/v1/conversations/c", "DELETE, GET, HEAD, POST"),
        ("GET", "/v1beta/models/m:generateContent", "POST"),
        ("PATCH", "/v1/admin/models", "GET, HEAD"),
    ],
)
async def test_a_path_with_another_method_is_refused_with_those_that_it_has(method: str, path: str, allow: str) -> None:
    async with app_client(is_owner=True) as client:
        reply = await client.request(method, path)
    assert (reply.status_code, reply.headers["allow"]) == (405, allow)
    assert "is not a method of" in reply.text


async def test_the_role_of_a_row_is_needed_before_its_body_is_read() -> None:
    keys = [{"name": role, "key": f"{role}-secret-0123456789", "role": role} for role in ("member", "operator")]
    async with app_client(demo_config() | {"keys": keys}) as client:

        async def refused(row: Row, role: str) -> bool:
            headers = {"x-api-key": f"{role}-secret-0123456789"}
            reply: httpx.Response = await client.request(row.method, address(row.path), headers=headers, content=b"{")
            return reply.status_code == 403

        for row in ROWS:
            if row.role != "member" and row.method != "GET" and "reload" not in row.path:
                expected = ["member"] + (["operator"] if row.role == "owner" else [])
                assert [role for role in ("member", "operator") if await refused(row, role)] == expected, row
