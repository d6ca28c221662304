"""docs/admin-api.md lists every endpoint, every field of a model record, and the overrides of every engine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from modelyard import plugins
from modelyard.http.routes import ADMIN
from tests.http.app_client import app_client

PAGE = Path(__file__).parents[2] / "docs" / "admin-api.md"


def endpoint_rows() -> Iterator[str]:
    for row in ADMIN:
        yield f"| `{row.method} {row.label}` | {row.role} | {row.summary} |\n"


def override_rows() -> Iterator[str]:
    for name in plugins.names("engines"):
        fields = plugins.engine(name).live_overrides
        listed = ", ".join(f"`{field}`{_range(TypeAdapter(kind).json_schema())}" for field, kind in fields.items())
        yield f"| `{name}` | {listed or 'none'} |\n"


def _range(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None and high is None:
        return f" ({', '.join(map(str, schema['enum']))})" if "enum" in schema else ""
    return f" ({low} to {high})" if high is not None else f" (from {low})"


def check_rows(section: str, rows: Iterator[str]) -> None:
    text = PAGE.read_text()
    begin, end = f"<!-- {section}: begin -->\n", f"<!-- {section}: end -->"
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    current = head + begin + "".join(rows) + end + tail
    if os.environ.get("MODELYARD_GOLDEN") == "write":
        PAGE.write_text(current)
    assert text == current, "run the tests with MODELYARD_GOLDEN=write to update the table"


def test_the_page_lists_every_endpoint() -> None:
    check_rows("endpoints", endpoint_rows())


def test_the_page_lists_the_overrides_of_every_engine() -> None:
    check_rows("overrides", override_rows())


async def test_the_page_names_every_field_of_a_record() -> None:
    async with app_client(loaded=True) as client:
        (record,) = (await client.get("/v1/admin/models")).json()["data"]
    table = PAGE.read_text().partition("## Model record")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)`", table))
    assert set(record) - {"object"} <= named
    for part in ("queue", "capabilities", "load_constraints"):
        assert set(record[part]) <= named
