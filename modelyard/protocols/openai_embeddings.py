"""OpenAI embeddings, both roles: `POST /v1/embeddings`, vectors as numbers or as base64 of little-endian float32."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from modelyard.core import limits
from modelyard.core.engine import Embeddings
from modelyard.core.errors import Incomplete, InvalidRequest
from modelyard.core.request import EmbeddingRequest
from modelyard.protocols.common.extensions import check_positive
from modelyard.protocols.common.json import decode, encode
from modelyard.protocols.common.openai_errors import http_error_writer, read_http_error
from modelyard.protocols.common.openai_fields import (
    DEFAULT_MODEL,
    PromptField,
    Prompts,
    read_prompts,
)
from modelyard.protocols.common.vectors import shortened

NAME = "openai_embeddings"
PATHS: tuple[str, ...] = ("/v1/embeddings", "/embeddings")


class EmbeddingBody(Struct):
    model: limits.Name | None = None
    input: PromptField | None = None
    encoding_format: limits.Word | None = None
    dimensions: int | None = None
    user: limits.Name | None = None


_decoder = msgspec.json.Decoder(EmbeddingBody)


def read_request(body: bytes, headers: Mapping[str, str]) -> EmbeddingRequest:  # noqa: ARG001 - as in every protocol
    parsed = decode(_decoder, body)
    check_positive("dimensions", parsed.dimensions)
    return EmbeddingRequest(
        model=parsed.model or DEFAULT_MODEL,
        inputs=_read_inputs(parsed.input),
        encoding_format=_read_encoding_format(parsed.encoding_format),
        dimensions=parsed.dimensions,
        user=parsed.user,
    )


class LlamaEmbeddingBody(Struct):
    """llama-server's `/embedding`: `input` is another name of `content`. Vectors of models that do not pool would be
    one per token, which is not offered."""

    model: limits.Name | None = None
    content: PromptField | None = None
    input: PromptField | None = None


_llama_decoder = msgspec.json.Decoder(LlamaEmbeddingBody)


def read_llama_request(body: bytes) -> EmbeddingRequest:
    parsed = decode(_llama_decoder, body)
    name = "input" if parsed.content is None and parsed.input is not None else "content"
    inputs = _read_inputs(parsed.input if name == "input" else parsed.content, name)
    return EmbeddingRequest(model=parsed.model or DEFAULT_MODEL, inputs=inputs)


def write_llama_reply(vectors: Sequence[Sequence[float]]) -> bytes:
    return encode([{"index": at, "embedding": [vector]} for at, vector in enumerate(vectors)])


def _read_inputs(value: PromptField | None, name: str = "input") -> Prompts:
    inputs = read_prompts(value, name)
    if "" in inputs:
        path = name if isinstance(value, str) else f"{name}[{inputs.index('')}]"
        raise InvalidRequest(f"{path} is an empty text, which has no embedding", param=path)
    return inputs


def _read_encoding_format(name: str | None) -> Literal["float", "base64"]:
    if name is None or name == "float":
        return "float"
    if name == "base64":
        return "base64"
    raise InvalidRequest(f"encoding_format must be float or base64, got {name!r}", param="encoding_format")


def write_reply(vectors: Sequence[Sequence[float]], prompt_tokens: int, request: EmbeddingRequest) -> bytes:
    data = [
        {"object": "embedding", "index": i, "embedding": _write_vector(vector, request)}
        for i, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    return encode({"object": "list", "data": data, "model": request.model, "usage": usage})


def _write_vector(vector: Sequence[float], request: EmbeddingRequest) -> Sequence[float] | str:
    if request.dimensions is not None:
        vector = shortened(vector, request.dimensions)
    if request.encoding_format == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


write_error = http_error_writer("input")


# --- the client role --------------------------------------------------------------------------------------------------

read_error = read_http_error


def write_request(request: EmbeddingRequest, model: str) -> bytes:
    """Whole vectors, as numbers: `write_reply` shortens and encodes them."""
    return encode({"model": model, "input": request.inputs, "encoding_format": "float"})


class UpstreamVector(Struct):
    embedding: list[float]
    index: int | None = None


class UpstreamTokenCount(Struct):
    prompt_tokens: int | None = None


class UpstreamEmbeddings(Struct):
    data: list[UpstreamVector]
    usage: UpstreamTokenCount | None = None


def read_reply(reply: Any, count: int) -> Embeddings:
    """`count` is the number of inputs."""
    try:
        parsed = msgspec.convert(reply, UpstreamEmbeddings)
    except msgspec.ValidationError as error:
        raise Incomplete(f"the upstream's embeddings cannot be read: {error}") from None
    found = {at if vector.index is None else vector.index: vector.embedding for at, vector in enumerate(parsed.data)}
    if sorted(found) != list(range(count)):
        raise Incomplete(f"the upstream sent {len(parsed.data)} embeddings for {count} inputs")
    tokens = parsed.usage.prompt_tokens if parsed.usage is not None else None
    return Embeddings([found[at] for at in range(count)], tokens or 0)
