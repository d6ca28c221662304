"""Reranking: the bodies of its dialects, replies, and an upstream's reply."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from modelyard.core.engine import Ranking
from modelyard.core.errors import ContextOverflow, Incomplete, InvalidRequest
from modelyard.core.request import RerankRequest
from modelyard.protocols import rerank

RANKING = Ranking([(1, 0.9), (0, -2.5)], 12)


def read(**fields: Any) -> RerankRequest:
    return rerank.read_request(msgspec.json.encode({"model": "m", "query": "q"} | fields), {})


def test_documents_are_texts_or_objects_with_a_text() -> None:
    request = read(documents=["one", {"text": "two", "title": "x"}], top_n=1, return_documents=True, user="u")
    expected = RerankRequest(
        model="m", query="q", documents=("one", "two"), top_n=1, return_documents=True, user="u", dialect="jina"
    )
    assert request == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": ["a"], "query": ""}, "query"),
        ({}, "documents"),
        ({"documents": []}, "documents"),
        ({"texts": []}, "texts"),
        ({"documents": ["a", {"image": "x"}]}, "documents[1]"),
        ({"documents": ["a"], "top_n": 0}, "top_n"),
        ({"documents": [5]}, "documents[0]"),
        ({"documents": ["a"] * 10_001}, "documents"),
    ],
)
def test_a_bad_body_is_refused_with_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


def test_the_reply_has_documents_only_if_they_are_asked_for() -> None:
    plain = msgspec.json.decode(rerank.write_reply(RANKING, read(documents=["one", "two"])))
    assert plain == {
        "object": "list",
        "model": "m",
        "results": [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": -2.5}],
        "usage": {"prompt_tokens": 12, "total_tokens": 12},
    }
    full = msgspec.json.decode(rerank.write_reply(RANKING, read(documents=["one", "two"], return_documents=True)))
    assert [entry["document"]["text"] for entry in full["results"]] == ["two", "one"]


def test_texts_select_the_dialect_of_text_embeddings_inference() -> None:
    request = read(texts=["one", "two"], return_text=True)
    reply = msgspec.json.decode(rerank.write_reply(RANKING, request))
    assert reply == [{"index": 1, "score": 0.9, "text": "two"}, {"index": 0, "score": -2.5, "text": "one"}]


def test_an_overflow_names_the_documents() -> None:
    error = rerank.write_error(ContextOverflow(600, 512), trace="t")
    assert (error.status, msgspec.json.decode(error.body)["error"]["param"]) == (400, "documents")


def test_an_upstream_gets_all_documents_and_its_reply_is_read() -> None:
    request = read(documents=["one", {"text": "two"}], top_n=1)
    assert msgspec.json.decode(rerank.write_request(request, "theirs")) == {
        "model": "theirs",
        "query": "q",
        "documents": ["one", "two"],
    }
    written = msgspec.json.decode(rerank.write_reply(RANKING, request))
    assert rerank.read_reply(written, request.documents) == RANKING


@pytest.mark.parametrize("reply", [None, [], {"results": 5}, {"results": [{"index": 7, "relevance_score": 1}]}])
def test_an_unreadable_upstream_reply_is_an_error(reply: Any) -> None:
    with pytest.raises(Incomplete):
        rerank.read_reply(reply, ("one",))
