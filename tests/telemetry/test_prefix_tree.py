"""What the Caches page and `modelyard explain` say about the tree of prefixes."""

from __future__ import annotations

from typing import Any

from modelyard.telemetry.prefix_tree import tree_lines


def leaf(tokens: int, shared: int = 0, id: int | None = None, stored: bool = False) -> dict[str, Any]:
    return {"tokens": tokens, "shared": shared, "id": id, "session": None, "stored": stored}


def test_conversations_that_begin_alike_are_below_the_first() -> None:
    assert tree_lines(
        [
            leaf(3400, id=2),
            leaf(3500, 3000, id=0),
            leaf(3200, 3100),
            leaf(3300, 3000),
            leaf(90, id=1),
            leaf(70, stored=True),
        ]
    ) == [
        "Prefixes",
        "sequence 2: 3\u202f400 tokens",
        "   sequence 0: 3\u202f000 shared + 500 tokens",
        "      parked: 3\u202f100 shared + 100 tokens",
        "   parked: 3\u202f000 shared + 300 tokens",
        "sequence 1: 90 tokens",
        "stored: 70 tokens",
    ]


def test_nothing_is_shown_while_nothing_is_shared_or_parked() -> None:
    assert tree_lines([leaf(10, id=0), leaf(20, id=1)]) == tree_lines([]) == []
