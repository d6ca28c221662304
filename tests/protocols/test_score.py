"""vLLM's /score: bodies as requests for a ranking, and the reply."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.engine import Ranking
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import RerankRequest
from modelyard.protocols import score


def read(**fields: Any) -> list[RerankRequest]:
    return score.read_request(msgspec.json.encode({"model": "m"} | fields), {})


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
def test_one_text_is_compared_with_every_other(names: tuple[str, str]) -> None:
    assert read(**dict(zip(names, ("q", ["a", "b"]), strict=True))) == [
        RerankRequest(model="m", query="q", documents=("a", "b"))
    ]


def test_two_lists_are_compared_pair_by_pair() -> None:
    pairs = [(request.query, request.documents) for request in read(text_1=["q", "r"], text_2=["a", "b"])]
    assert pairs == [("q", ("a",)), ("r", ("b",))]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text_1": "q"}, "text_2"),
        ({"text_1": [], "text_2": "a"}, "text_1"),
        ({"text_1": "q", "text_2": ["a", ""]}, "text_2"),
        ({"text_1": ["q", "r"], "text_2": ["a"]}, "text_1"),
        ({"text_1": ["q"] * 1025, "text_2": ["a"] * 1025}, "text_1"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


def test_scores_are_in_the_order_of_the_texts() -> None:
    reply = msgspec.json.decode(score.write_reply([Ranking([(1, 0.9), (0, 0.1)], 7), Ranking([(0, 0.5)], 2)], "m"))
    assert [row["score"] for row in reply["data"]] == [0.1, 0.9, 0.5]
    assert [row["index"] for row in reply["data"]] == [0, 1, 2]
    assert reply["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
