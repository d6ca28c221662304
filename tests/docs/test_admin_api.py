"""The page on the admin API lists what there is: endpoints, fields of a record, and what one load may set."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from modelyard import plugins
from modelyard.http.admin.routes import AdminRoutes
from tests.http.front import door

PAGE = Path(__file__).parents[2] / "docs" / "admin-api.md"
BEGIN, END = "<!-- overrides: begin -->\n", "<!-- overrides: end -->"


def endpoints() -> list[tuple[str, str]]:
    desk: Any = AdminRoutes.__new__(AdminRoutes)
    return [(f"{m} /v1/admin{path.replace(':path', '')}", told) for m, path, _, told in desk.endpoints()]


def overrides() -> Iterator[str]:
    for name in plugins.names("engines"):
        fields = getattr(plugins.load("engines", name), "LIVE_OVERRIDES", {})
        listed = ", ".join(f"`{field}`{_range(TypeAdapter(kind).json_schema())}" for field, kind in fields.items())
        yield f"| `{name}` | {listed or 'none'} |\n"


def _range(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None and high is None:
        return f" ({', '.join(map(str, schema['enum']))})" if "enum" in schema else ""
    return f" ({low} to {high})" if high is not None else f" (from {low})"


def test_the_page_lists_every_endpoint_with_its_purpose() -> None:
    rows = re.findall(r"^\| `((?:GET|POST) /v1/admin[^`]*)` \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(endpoints())


def test_the_page_lists_what_one_load_may_set() -> None:
    text = PAGE.read_text()
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    current = head + BEGIN + "".join(overrides()) + END + tail
    if os.environ.get("MODELYARD_GOLDEN") == "write":
        PAGE.write_text(current)
    assert text == current, "run the tests with MODELYARD_GOLDEN=write to renew the table"


async def test_the_page_names_every_field_of_a_record() -> None:
    async with door(loaded=True) as client:
        (record,) = (await client.get("/v1/admin/models")).json()["data"]
    table = PAGE.read_text().partition("## A model's record")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)`", table))
    assert set(record) - {"object"} <= named
    for part in ("queue", "capabilities", "load_constraints"):
        assert set(record[part]) <= named
