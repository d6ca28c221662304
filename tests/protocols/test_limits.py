"""Every string and list of every request body has a limit, and an error that names it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from modelyard.core.errors import InvalidRequest
from modelyard.http.tokens import TokenBody
from modelyard.protocols import (
    anthropic_messages,
    gemini,
    ollama,
    openai_chat,
    openai_completions,
    openai_embeddings,
    openai_responses,
)
from modelyard.protocols.anthropic_messages.request import MessagesBody, Source, TypedToolFields
from modelyard.protocols.gemini.embeddings import GeminiBatchEmbedBody
from modelyard.protocols.gemini.request import GeminiBody, GeminiCountBody
from modelyard.protocols.llama_completion import LlamaCompletionBody
from modelyard.protocols.ollama.generate import OllamaGenerateBody
from modelyard.protocols.ollama.models import OllamaCopyBody, OllamaCreateBody, OllamaEmbedBody, OllamaModelBody
from modelyard.protocols.ollama.request import OllamaChatBody
from modelyard.protocols.openai_chat.request import ChatCompletionBody
from modelyard.protocols.openai_completions import CompletionBody
from modelyard.protocols.openai_embeddings import EmbeddingBody, LlamaEmbeddingBody
from modelyard.protocols.openai_responses.request import ResponsesBody
from modelyard.protocols.pool_responses import PoolResponsesBody
from modelyard.protocols.score import ScoreBody

_BODIES = (
    ChatCompletionBody,
    CompletionBody,
    EmbeddingBody,
    GeminiBatchEmbedBody,
    GeminiBody,
    GeminiCountBody,
    LlamaCompletionBody,
    LlamaEmbeddingBody,
    MessagesBody,
    OllamaChatBody,
    OllamaCopyBody,
    OllamaCreateBody,
    OllamaEmbedBody,
    OllamaGenerateBody,
    OllamaModelBody,
    PoolResponsesBody,
    ResponsesBody,
    ScoreBody,
    TypedToolFields,
    Source,
    TokenBody,
)


def _unlimited(kind: inspect.Type, path: str, seen: set[type]) -> Iterator[str]:
    if isinstance(kind, inspect.Metadata):
        yield from _unlimited(kind.type, path, seen)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _unlimited(one, path, seen)
    elif isinstance(kind, inspect.StructType):
        if kind.cls not in seen:
            seen.add(kind.cls)
            for field in kind.fields:
                yield from _unlimited(field.type, f"{kind.cls.__name__}.{field.name}", seen)
    elif isinstance(kind, inspect.StrType):
        if kind.max_length is None:
            yield path
    elif isinstance(kind, inspect.ListType | inspect.VarTupleType | inspect.DictType):
        if kind.max_length is None:
            yield f"{path}[]"
        if not isinstance(kind, inspect.DictType):
            yield from _unlimited(kind.item_type, f"{path}[…]", seen)


@pytest.mark.parametrize("body", _BODIES)
def test_every_string_and_list_of_a_body_has_a_limit(body: type[msgspec.Struct]) -> None:
    assert [*_unlimited(inspect.type_info(body), body.__name__, set())] == []


_CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
_CONTENTS: dict[str, Any] = {"contents": [{"parts": [{"text": "hi"}]}]}
_TEXT: dict[str, Any] = {"model": "m", "prompt": "hi"}
_RESPONSES: dict[str, Any] = {"model": "m", "input": "hi"}


@pytest.mark.parametrize(
    ("protocol", "body", "field", "limit"),
    [
        (openai_chat, _CHAT | {"stop": "x" * 1025}, "stop", "1024 characters"),
        (openai_chat, _CHAT | {"stop": ["x"] * 129}, "stop", "128 entries"),
        (openai_chat, _CHAT | {"stop": ["x" * 1000] * 9}, "stop", "8192 characters"),
        (openai_chat, _CHAT | {"dry_sequence_breakers": ["x"] * 33}, "dry_sequence_breakers", "32 entries"),
        (openai_chat, _CHAT | {"dry_sequence_breakers": ["x" * 65]}, "dry_sequence_breakers[0]", "64 characters"),
        (openai_chat, _CHAT | {"grammar": "x" * 40_000}, "grammar", "32768 characters"),
        (openai_chat, _CHAT | {"json_schema": {"x": "x" * 300_000}}, "json_schema", "262144 characters"),
        (openai_chat, _CHAT | {"model": "x" * 2000}, "model", "1024 characters"),
        (openai_chat, _CHAT | {"logit_bias": {str(i): 1 for i in range(20_000)}}, "logit_bias", "16384 entries"),
        (anthropic_messages, _CHAT | {"stop_sequences": ["x" * 1000] * 9}, "stop_sequences", "8192 characters"),
        (openai_completions, _TEXT | {"stop": ["x"] * 129}, "stop", "128 entries"),
        (openai_responses, _RESPONSES | {"stop": ["x" * 1000] * 9}, "stop", "8192 characters"),
        (openai_responses, _RESPONSES | {"tools": [{"name": "x" * 2000}]}, "tools[0].name", "1024 characters"),
        (openai_responses, _RESPONSES | {"decoding": {"stop": "x" * 1025}}, "decoding.stop", "1024 characters"),
        (ollama, _CHAT | {"options": {"stop": ["x"] * 129}}, "options.stop", "128 entries"),
        (ollama, _CHAT | {"format": {"x": "x" * 300_000}}, "format", "262144 characters"),
        (
            gemini,
            _CONTENTS | {"generationConfig": {"stopSequences": ["x"] * 129}},
            "generationConfig.stopSequences",
            "128 entries",
        ),
        (openai_embeddings, {"model": "x" * 2000, "input": "a"}, "model", "1024 characters"),
    ],
)
def test_a_field_over_its_limit_is_refused_with_its_name_and_the_limit(
    protocol: Any, body: dict[str, Any], field: str, limit: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        protocol.read_request(json.dumps(body).encode(), {":path": "/v1beta/models/m:generateContent"})
    assert raised.value.param == field
    assert raised.value.message == f"{field} is too long: at most {limit}; shorten it"
    assert raised.value.code in ("string_above_max_length", "array_above_max_length")


def test_a_schema_in_a_response_format_has_a_limit() -> None:
    schema = {"type": "object", "description": "x" * 300_000}
    formats: list[tuple[Any, dict[str, Any]]] = [
        (openai_chat, _CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
        (anthropic_messages, _CHAT | {"output_config": {"format": {"type": "json_schema", "schema": schema}}}),
        (openai_responses, _RESPONSES | {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}),
    ]
    for protocol, body in formats:
        with pytest.raises(InvalidRequest, match="at most 262144 characters"):
            protocol.read_request(json.dumps(body).encode(), {})
