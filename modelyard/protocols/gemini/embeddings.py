"""`embedContent` and `batchEmbedContents`: contents in, vectors out. Server role only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest
from modelyard.core.request import EmbeddingRequest
from modelyard.protocols.common.extensions import check_positive
from modelyard.protocols.common.json import encode
from modelyard.protocols.common.vectors import shortened
from modelyard.protocols.gemini.request import GeminiContent, read_path
from modelyard.protocols.gemini.schema import decode_proto


class GeminiEmbedBody(Struct, rename="camel"):
    """Task types and titles are prompts of Google's models: they are ignored."""

    model: limits.Name | None = None
    content: GeminiContent | None = None
    output_dimensionality: int | None = None


class GeminiBatchEmbedBody(Struct, rename="camel"):
    requests: Annotated[list[GeminiEmbedBody], Meta(max_length=limits.MAX_INPUTS)] | None = None


_decoder = msgspec.json.Decoder(GeminiEmbedBody)
_batch_decoder = msgspec.json.Decoder(GeminiBatchEmbedBody)


def read_embed(body: bytes, headers: Mapping[str, str]) -> EmbeddingRequest:
    return _read([decode_proto(_decoder, GeminiEmbedBody, body)], headers, "")


def read_batch_embed(body: bytes, headers: Mapping[str, str]) -> EmbeddingRequest:
    parsed = decode_proto(_batch_decoder, GeminiBatchEmbedBody, body)
    if not parsed.requests:
        raise InvalidRequest("requests: at least one request is required", param="requests")
    return _read(parsed.requests, headers, "requests")


def _read(bodies: list[GeminiEmbedBody], headers: Mapping[str, str], path: str) -> EmbeddingRequest:
    """All vectors of a batch have the dimensions of its first request."""
    inputs = tuple(_text(body, f"{path}[{at}].content" if path else "content") for at, body in enumerate(bodies))
    dimensions = bodies[0].output_dimensionality
    check_positive("outputDimensionality", dimensions)
    return EmbeddingRequest(model=read_path(headers)[0], inputs=inputs, dimensions=dimensions, truncate=True)


def _text(body: GeminiEmbedBody, path: str) -> str:
    parts = body.content.parts or [] if body.content is not None else []
    if any(part.text is None for part in parts):
        raise InvalidRequest(f"{path} has a part that is not text", param=path, code="modality_unsupported")
    text = "\n".join(part.text for part in parts if part.text)
    if not text:
        raise InvalidRequest(f"{path} has no text to embed", param=path)
    return text


def write_embedding(vectors: list[list[float]], request: EmbeddingRequest) -> bytes:
    return encode({"embedding": {"values": _vectors(vectors, request)[0]}})


def write_embeddings(vectors: list[list[float]], request: EmbeddingRequest) -> bytes:
    return encode({"embeddings": [{"values": vector} for vector in _vectors(vectors, request)]})


def _vectors(vectors: list[list[float]], request: EmbeddingRequest) -> list[list[float]]:
    size = request.dimensions
    return vectors if size is None else [list(shortened(one, size, "outputDimensionality")) for one in vectors]
