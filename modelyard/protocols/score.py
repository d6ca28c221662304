"""vLLM's scores: `POST /score`, how well texts match, by a model that ranks documents.

    {"model": "m", "text_1": "a question", "text_2": ["one", "two"]}
    {"object": "list", "model": "m", "data": [{"index": 0, "object": "score", "score": 0.9}, …], "usage": {…}}

One text is compared with every other, and two lists of the same length pair by pair. `queries` and `documents`, or
`data_1` and `data_2`, are newer names of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from modelyard.core import limits
from modelyard.core.engine import Ranking
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import RerankRequest
from modelyard.protocols.common.json import decode, encode
from modelyard.protocols.common.openai_fields import DEFAULT_MODEL
from modelyard.protocols.rerank import write_error

__all__ = ["PATHS", "ScoreBody", "read_request", "write_error", "write_reply"]

NAME = "score"
PATHS: tuple[str, ...] = ("/v1/score", "/score")

_MAX_PAIRS = 1024  # of two lists: each pair is a request of its own inside the server

Texts = limits.Text | limits.ScoredTexts


class ScoreBody(Struct):
    model: limits.Name | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    user: limits.Name | None = None


_decoder = msgspec.json.Decoder(ScoreBody)


def read_request(body: bytes, headers: Mapping[str, str]) -> list[RerankRequest]:  # noqa: ARG001 - as in every protocol
    """The requests that together score every pair, in order."""
    parsed = decode(_decoder, body)
    model = parsed.model or DEFAULT_MODEL
    queries = _read_texts(parsed, ("text_1", "queries", "data_1"))
    documents = _read_texts(parsed, ("text_2", "documents", "data_2"))
    if len(queries) == 1:
        return [RerankRequest(model=model, query=queries[0], documents=documents, user=parsed.user)]
    if len(queries) != len(documents):
        raise InvalidRequest(
            f"text_1 has {len(queries)} texts and text_2 {len(documents)}: send one text, or as many as the other has",
            param="text_1",
        )
    if len(queries) > _MAX_PAIRS:
        raise InvalidRequest(f"text_1 has {len(queries)} texts; at most {_MAX_PAIRS} are allowed", param="text_1")
    pairs = zip(queries, documents, strict=True)
    return [RerankRequest(model=model, query=one, documents=(other,), user=parsed.user) for one, other in pairs]


def _read_texts(body: ScoreBody, names: Sequence[str]) -> tuple[str, ...]:
    found = next((value for name in names if (value := getattr(body, name)) is not None), None)
    texts = (found,) if isinstance(found, str) else tuple(found or ())
    if not texts or "" in texts:
        message = f"{names[0]} is required: a text, or a list of texts, none of them empty"
        raise InvalidRequest(message, param=names[0], code="missing_required_parameter")
    return texts


def write_reply(rankings: Sequence[Ranking], model: str) -> bytes:
    scores = [score for ranking in rankings for _, score in sorted(ranking.scores)]
    tokens = sum(ranking.prompt_tokens for ranking in rankings)
    data = [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return encode({"object": "list", "model": model, "data": data, "usage": usage})
