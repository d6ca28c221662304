"""The words on a model's card, from a real server's record."""

from __future__ import annotations

from modelyard.workbench.pages.models import abilities, context, facts
from tests.http.front import door


async def test_a_record_is_told_in_words() -> None:
    async with door(loaded=True) as client:
        (record,) = (await client.get("/v1/admin/models")).json()["data"]
    assert context(record) == "2\u202f048 / 4\u202f096 tokens"
    assert {"text", "tools", "thinking"} <= set(abilities(record))
    lines = list(facts(record))
    assert "cache main: 4 × 4\u202f096 tokens" in lines
    assert any(line.startswith("replica 1: ready") for line in lines)
