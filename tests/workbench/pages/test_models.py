"""The texts of a model's card, from the record of a real server, and the values of the load dialog."""

from __future__ import annotations

from typing import Any

import pytest

from modelyard.workbench.pages.models import capability_tags, detail_lines, fit_text, override_value, windows_text
from tests.http.app_client import app_client


async def test_the_texts_of_a_record() -> None:
    async with app_client(loaded=True) as client:
        (record,) = (await client.get("/v1/admin/models")).json()["data"]
    assert windows_text(record) == "2\u202f048 / 4\u202f096 tokens"
    assert {"text", "chat", "tools", "thinking"} <= set(capability_tags(record))
    lines = list(detail_lines(record))
    assert "cache main: 4 × 4\u202f096 tokens" in lines
    assert any(line.startswith("replica 1: ready") for line in lines)


@pytest.mark.parametrize(
    ("kind", "entered", "sent"),
    [
        ("boolean", "on", True),
        ("boolean", "off", False),
        ("integer", 8.0, 8),
        ("number", 0.5, 0.5),
        ("string", "x", "x"),
    ],
)
def test_an_override_is_sent_in_the_type_of_its_schema(kind: str, entered: Any, sent: Any) -> None:
    value = override_value({"type": kind}, entered)
    assert (value, type(value)) == (sent, type(sent))


def test_the_estimate_says_whether_the_model_fits() -> None:
    def estimate(free: int, limit: int | None = None, *, possible: bool = True) -> dict[str, Any]:
        sizes = {"weights": 2**30, "kv": 2**29, "compute": 0, "total": 3 * 2**29}
        fits = free >= sizes["total"]
        return {"estimate": sizes, "free": free, "fits": fits, "limit": limit, "possible": possible}

    needed = "Needs about 1.5 GiB (weights 1.0 GiB, kv 512 MiB, compute 0 B); 2.0 GiB are free."
    assert fit_text(estimate(2**31)) == ("It fits", needed)
    assert "idle models may be unloaded" in fit_text(estimate(2**30))[0]
    assert "never fit, because models may take 1.0 GiB" in fit_text(estimate(2**30, 2**30, possible=False))[0]
    assert "never fit into this machine" in fit_text(estimate(2**30, possible=False))[0]
