"""Reranking, both roles: `POST /v1/rerank` with the body that Jina, Cohere, vLLM and llama-server share.

    {"model": "m", "query": "…", "documents": ["…", {"text": "…"}], "top_n": 2, "return_documents": true}
    {"object": "list", "model": "m", "results": [{"index": 1, "relevance_score": 0.9, "document": {"text": "…"}}, …],
     "usage": {"prompt_tokens": 20, "total_tokens": 20}}

Text Embeddings Inference has `texts` in place of `documents`, and its reply is a bare list with `score`. Scores are the
model's own: logits of a classifier, or probabilities where the model ends in a softmax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from modelyard.core import limits
from modelyard.core.engine import Ranking
from modelyard.core.errors import Incomplete, InvalidRequest
from modelyard.core.request import RerankRequest
from modelyard.protocols.common.extensions import check_positive
from modelyard.protocols.common.json import decode, encode
from modelyard.protocols.common.openai_errors import http_error_writer, read_http_error
from modelyard.protocols.common.openai_fields import DEFAULT_MODEL

NAME = "rerank"
PATHS: tuple[str, ...] = ("/v1/rerank", "/rerank")

read_error = read_http_error


class RerankBody(Struct):
    model: limits.Name | None = None
    query: limits.Text | None = None
    documents: limits.RankedDocuments | None = None
    texts: limits.RankedDocuments | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    user: limits.Name | None = None


_decoder = msgspec.json.Decoder(RerankBody)


# --- the server role --------------------------------------------------------------------------------------------------


def read_request(body: bytes, headers: Mapping[str, str]) -> RerankRequest:  # noqa: ARG001 - as in every protocol
    parsed = decode(_decoder, body)
    check_positive("top_n", parsed.top_n)
    if not parsed.query:
        raise InvalidRequest("query is required: the text to compare with", param="query", code=_MISSING)
    name = "texts" if parsed.documents is None and parsed.texts is not None else "documents"
    documents = parsed.texts if name == "texts" else parsed.documents
    if not documents:
        raise InvalidRequest(f"{name} is required: a list of texts to rank", param=name, code=_MISSING)
    return RerankRequest(
        model=parsed.model or DEFAULT_MODEL,
        query=parsed.query,
        documents=tuple(_read_document(document, f"{name}[{at}]") for at, document in enumerate(documents)),
        top_n=parsed.top_n,
        return_documents=parsed.return_documents is True or parsed.return_text is True,
        dialect="tei" if name == "texts" else "jina",
        user=parsed.user,
    )


_MISSING = "missing_required_parameter"


def _read_document(document: str | dict[str, Any], path: str) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{path} must be a text, or an object with a text", param=path)
    return text


def write_reply(ranking: Ranking, request: RerankRequest) -> bytes:
    if request.dialect == "tei":
        return encode([_write_tei(index, score, request) for index, score in ranking.scores])
    usage = {"prompt_tokens": ranking.prompt_tokens, "total_tokens": ranking.prompt_tokens}
    results = [_write_result(index, score, request) for index, score in ranking.scores]
    return encode({"object": "list", "model": request.model, "results": results, "usage": usage})


def _write_result(index: int, score: float, request: RerankRequest) -> dict[str, Any]:
    result: dict[str, Any] = {"index": index, "relevance_score": score}
    return result | {"document": {"text": request.documents[index]}} if request.return_documents else result


def _write_tei(index: int, score: float, request: RerankRequest) -> dict[str, Any]:
    result: dict[str, Any] = {"index": index, "score": score}
    return result | {"text": request.documents[index]} if request.return_documents else result


write_error = http_error_writer("documents")


# --- the client role --------------------------------------------------------------------------------------------------


def write_request(request: RerankRequest, model: str) -> bytes:
    """All documents are asked for: the gateway takes the best of them."""
    return encode({"model": model, "query": request.query, "documents": request.documents})


class UpstreamResult(Struct):
    index: int
    relevance_score: float


class UpstreamTokens(Struct):
    prompt_tokens: int | None = None
    total_tokens: int | None = None


class UpstreamRanking(Struct):
    results: list[UpstreamResult]
    usage: UpstreamTokens | None = None


def read_reply(reply: Any, documents: Sequence[str]) -> Ranking:
    try:
        parsed = msgspec.convert(reply, UpstreamRanking)
    except msgspec.ValidationError as error:
        raise Incomplete(f"the upstream's ranking cannot be read: {error}") from None
    scores = [(result.index, result.relevance_score) for result in parsed.results]
    if any(not 0 <= index < len(documents) for index, _ in scores):
        raise Incomplete("the upstream's ranking names documents that were not sent")
    usage = parsed.usage or UpstreamTokens()
    return Ranking(scores, usage.prompt_tokens or usage.total_tokens or 0)
