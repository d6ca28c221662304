"""The tree of a cache's KV as lines of text: conversations that begin alike, and where the KV of each is. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def tree_lines(prefixes: Sequence[Mapping[str, Any]]) -> list[str]:
    """From `prefixes` of `GET /v1/admin/caches`, if anything shares one or is not in a sequence: what begins alike is
    indented below the first."""
    if not any(leaf["shared"] or leaf["id"] is None for leaf in prefixes):
        return []
    lines, open_at = ["Prefixes"], list[int]()
    for leaf in prefixes:
        while open_at and open_at[-1] > leaf["shared"]:
            open_at.pop()
        if leaf["shared"] and (not open_at or open_at[-1] < leaf["shared"]):
            open_at.append(leaf["shared"])
        where = f"sequence {leaf['id']}" if leaf["id"] is not None else "stored" if leaf.get("stored") else "parked"
        same = f"{_count(leaf['shared'])} shared + " if leaf["shared"] else ""
        lines.append(f"{'   ' * len(open_at)}{where}: {same}{_count(leaf['tokens'] - leaf['shared'])} tokens")
    return lines


def _count(value: int) -> str:
    """With thin spaces, as the workbench writes numbers."""
    return f"{value:,}".replace(",", "\u202f")
