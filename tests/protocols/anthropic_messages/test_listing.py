"""Token counts and the list of models."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.errors import InvalidRequest
from modelyard.core.protocol import ModelCard
from modelyard.protocols.anthropic_messages import write_count, write_model, write_models

CARDS = [ModelCard(name, 0, 4096) for name in "abcde"]


def page(**how: Any) -> tuple[list[str], bool]:
    body = msgspec.json.decode(write_models(CARDS, **how))
    ids = [model["id"] for model in body["data"]]
    assert (body["first_id"], body["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
    return ids, body["has_more"]


def test_a_count_is_one_number() -> None:
    assert write_count(42) == b'{"input_tokens":42}'


def test_a_model_shows_its_window_and_when_it_was_made() -> None:
    card = ModelCard("org/m", 1_700_000_000, 32768, 4096, "loading", "M", aliases=("x",))
    model = msgspec.json.decode(write_model(card))
    assert (model["type"], model["id"], model["display_name"]) == ("model", "org/m", "M")
    assert model["created_at"] == "2023-11-14T22:13:20Z"
    assert (model["max_input_tokens"], model["max_tokens"], model["state"]) == (32768, 4096, "loading")


@pytest.mark.parametrize(
    ("how", "ids", "has_more"),
    [
        ({}, "abcde", False),
        ({"limit": 1000}, "abcde", False),
        ({"limit": 2}, "ab", True),
        ({"limit": 2, "after_id": "b"}, "cd", True),
        ({"limit": 2, "after_id": "c"}, "de", False),
        ({"after_id": "e"}, "", False),
        ({"limit": 2, "before_id": "d"}, "bc", True),
        ({"limit": 5, "before_id": "c"}, "ab", False),
    ],
)
def test_pages_are_turned_by_id(how: dict[str, Any], ids: str, has_more: bool) -> None:
    assert page(**how) == (list(ids), has_more)


@pytest.mark.parametrize("how", [{"limit": 0}, {"limit": 1001}, {"after_id": "z"}, {"before_id": "z"}])
def test_a_page_that_cannot_be_found_is_refused(how: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(how))):
        page(**how)
