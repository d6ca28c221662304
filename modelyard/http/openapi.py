"""The API documentation: the page, and the hot routes, which FastAPI does not see, with bodies from their structs."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from modelyard.core.errors import NotFound
from modelyard.http.tokens import TokenBody
from modelyard.protocols import (
    llama_completion,
    llama_infill,
    mistral_fim,
    openai_batches,
    openai_completions,
    openai_embeddings,
    pool_responses,
    rerank,
    score,
)
from modelyard.protocols.anthropic_messages import batches as message_batches
from modelyard.protocols.anthropic_messages import request as anthropic_messages
from modelyard.protocols.gemini import embeddings as gemini_embeddings
from modelyard.protocols.gemini import request as gemini
from modelyard.protocols.ollama import generate as ollama_generate
from modelyard.protocols.ollama import models as ollama_models
from modelyard.protocols.ollama import request as ollama
from modelyard.protocols.openai_chat import request as openai_chat
from modelyard.protocols.openai_responses import conversations
from modelyard.protocols.openai_responses import request as openai_responses

_TAKES: tuple[tuple[str, str, str, type], ...] = (
    ("/v1/messages", "Anthropic Messages", "AnthropicMessages", anthropic_messages.MessagesBody),
    (
        "/v1/messages/count_tokens",
        "Count the tokens of a Messages request",
        "AnthropicMessages",
        anthropic_messages.MessagesBody,
    ),
    ("/v1/chat/completions", "OpenAI Chat Completions", "OpenaiChat", openai_chat.ChatCompletionBody),
    ("/v1/responses", "OpenAI Responses", "OpenaiResponses", openai_responses.ResponsesBody),
    ("/v1/responses", "OpenAI Responses, or the pool dialect", "PoolResponses", pool_responses.PoolResponsesBody),
    (
        "/v1/responses/input_tokens",
        "Count the tokens of a Responses request",
        "OpenaiResponses",
        openai_responses.ResponsesBody,
    ),
    (
        "/v1/conversations",
        "Create a conversation, which responses continue",
        "Conversations",
        conversations.ConversationBody,
    ),
    ("/v1/conversations/{id}", "Change a conversation", "Conversations", conversations.ConversationUpdateBody),
    ("/v1/conversations/{id}/items", "Add items", "Conversations", conversations.ConversationItemsBody),
    ("/v1/batches", "Run the requests of a file, at low priority", "Batches", openai_batches.BatchBody),
    (
        "/v1/messages/batches",
        "Run many Messages requests, at low priority",
        "MessageBatches",
        message_batches.MessageBatchBody,
    ),
    ("/v1/responses/compact", "Summarize a conversation", "OpenaiResponses", openai_responses.ResponsesBody),
    ("/v1/completions", "OpenAI Completions (legacy)", "OpenaiCompletions", openai_completions.CompletionBody),
    ("/v1/embeddings", "OpenAI Embeddings", "OpenaiEmbeddings", openai_embeddings.EmbeddingBody),
    ("/v1/rerank", "Order documents by their relevance to a query", "Rerank", rerank.RerankBody),
    ("/v1/fim/completions", "Fill a gap between two texts, as Mistral", "MistralFim", mistral_fim.FimBody),
    ("/infill", "Fill a gap between two texts, as llama-server", "LlamaInfill", llama_infill.InfillBody),
    ("/completion", "Complete a prompt, as llama-server", "LlamaCompletion", llama_completion.LlamaCompletionBody),
    ("/embedding", "Embeddings, as llama-server", "OpenaiEmbeddings", openai_embeddings.LlamaEmbeddingBody),
    ("/v1/score", "How well texts match, as vLLM", "Score", score.ScoreBody),
    (
        "/v1/chat/completions/input_tokens",
        "Count the tokens of a Chat request",
        "OpenaiChat",
        openai_chat.ChatCompletionBody,
    ),
    ("/api/chat", "A conversation, as Ollama", "Ollama", ollama.OllamaChatBody),
    ("/api/generate", "A prompt, as Ollama", "Ollama", ollama_generate.OllamaGenerateBody),
    ("/api/embed", "Embeddings, as Ollama", "Ollama", ollama_models.OllamaEmbedBody),
    ("/api/embeddings", "An embedding, as Ollama before /api/embed", "Ollama", ollama_models.OllamaEmbedBody),
    ("/api/show", "What a model is and can do, as Ollama", "Ollama", ollama_models.OllamaModelBody),
    ("/api/pull", "Fetch a model of the hub, as Ollama", "Ollama", ollama_models.OllamaModelBody),
    ("/api/copy", "Another name for a model, as Ollama", "Ollama", ollama_models.OllamaCopyBody),
    ("/api/create", "A model with other settings, as Ollama", "Ollama", ollama_models.OllamaCreateBody),
    ("/v1beta/models/{id}:generateContent", "Gemini's API", "Gemini", gemini.GeminiBody),
    ("/v1beta/models/{id}:streamGenerateContent", "Gemini's API, streamed", "Gemini", gemini.GeminiBody),
    ("/v1beta/models/{id}:countTokens", "Count the tokens of a Gemini request", "Gemini", gemini.GeminiCountBody),
    ("/v1beta/models/{id}:embedContent", "An embedding, as Gemini", "Gemini", gemini_embeddings.GeminiEmbedBody),
    (
        "/v1beta/models/{id}:batchEmbedContents",
        "Embeddings, as Gemini",
        "Gemini",
        gemini_embeddings.GeminiBatchEmbedBody,
    ),
    ("/tokenize", "Text or messages to token ids", "Tokens", TokenBody),
    ("/detokenize", "Token ids to text", "Tokens", TokenBody),
    ("/apply-template", "Messages to the prompt that the model reads", "OpenaiChat", openai_chat.ChatCompletionBody),
)
_GIVES = (
    ("get", "/v1/models", "The models, in the shape of the protocol that asks"),
    ("get", "/v1/models/{id}", "One model; any name that a route knows"),
    ("get", "/v1/responses/{id}", "A stored response, or the events of a background response"),
    ("post", "/v1/responses/{id}/cancel", "Cancel a background response"),
    ("delete", "/v1/responses/{id}", "Forget a stored response"),
    ("get", "/v1/responses/{id}/input_items", "What a stored response was asked"),
    ("get", "/v1/conversations/{id}", "A conversation"),
    ("delete", "/v1/conversations/{id}", "Delete a conversation"),
    ("get", "/v1/conversations/{id}/items", "Items of a conversation"),
    ("get", "/v1/conversations/{id}/items/{item}", "One item"),
    ("delete", "/v1/conversations/{id}/items/{item}", "Delete an item"),
    ("post", "/v1/files", "Upload a file, as a form with file and purpose"),
    ("get", "/v1/files", "Uploaded files, and those of batches"),
    ("get", "/v1/files/{id}", "One file"),
    ("delete", "/v1/files/{id}", "Delete a file"),
    ("get", "/v1/files/{id}/content", "What is in a file"),
    ("post", "/upload/v1beta/files", "Upload a file as Google's SDKs do: resumable, in pieces"),
    ("get", "/v1beta/files", "Uploaded files, in Google's form"),
    ("get", "/v1beta/files/{id}", "One file, in Google's form"),
    ("get", "/v1beta/files/{id}:download", "What is in a file"),
    ("delete", "/v1beta/files/{id}", "Delete a file"),
    ("get", "/v1/batches", "Batches, the newest first"),
    ("get", "/v1/batches/{id}", "One batch, and how far it is"),
    ("post", "/v1/batches/{id}/cancel", "Cancel a batch"),
    ("get", "/v1/messages/batches", "Batches of Messages, the newest first"),
    ("get", "/v1/messages/batches/{id}", "One batch of Messages, and how far it is"),
    ("delete", "/v1/messages/batches/{id}", "Delete a batch that has ended"),
    ("post", "/v1/messages/batches/{id}/cancel", "Cancel a batch of Messages"),
    ("get", "/v1/messages/batches/{id}/results", "The results of a batch of Messages, one a line"),
    ("get", "/api/tags", "The models, as Ollama"),
    ("get", "/api/ps", "The loaded models, as Ollama"),
    ("get", "/api/version", "The version of Ollama's API that is served"),
    ("delete", "/api/delete", "Remove a model from the library, as Ollama"),
    ("get", "/v1beta/models", "The models, as Gemini"),
    ("get", "/v1beta/models/{id}", "One model, as Gemini"),
    ("get", "/health", "Is the server well, and each model"),
    ("get", "/health/live", "Is the process alive"),
    ("get", "/health/ready", "Can a model answer"),
    ("get", "/props", "Settings, template and window of a model, as llama-server"),
    ("get", "/slots", "The places of a model, as llama-server"),
    ("get", "/lora-adapters", "The loaded LoRA adapters of a model, as llama-server"),
    ("get", "/version", "The version of this server, as vLLM"),
    ("get", "/api/v0/models", "The models, as LM Studio"),
    ("get", "/api/v0/models/{id}", "One model, as LM Studio"),
    ("get", "/metrics", "Prometheus metrics of all gateway processes"),
)


# --- the page ---------------------------------------------------------------------------------------------------------

_ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}


def page_routes() -> list[Route]:
    """`/docs` with all its files from this server: FastAPI's own page loads them from a CDN."""
    html = get_swagger_ui_html(
        openapi_url="/openapi.json",
        title="Modelyard API",
        swagger_js_url="/docs/swagger-ui-bundle.js",
        swagger_css_url="/docs/swagger-ui.css",
        swagger_favicon_url="/docs/favicon-32x32.png",
        # The validator is a service of swagger.io. "Try it out" is open, and a key is kept while the page is open.
        swagger_ui_parameters={"validatorUrl": None, "tryItOutEnabled": True, "displayRequestDuration": True},
    )

    async def page(_request: HttpRequest) -> Response:
        return html

    async def asset(request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name not in _ASSETS:
            raise NotFound(f"there is no /docs/{name} here; /docs lists the paths", code="path_not_found")
        return Response(_asset(name), media_type=_ASSETS[name], headers={"cache-control": "private, max-age=86400"})

    return [Route("/docs", page), Route("/docs/{name}", asset)]


@cache
def _asset(name: str) -> bytes:
    return resources.files("fastapi_swagger.resources").joinpath(name).read_bytes()


# --- the schema -------------------------------------------------------------------------------------------------------


class DescribedApp(FastAPI):
    """Its schema has every route in it, also those that FastAPI does not read; made at the first look, then kept."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = get_openapi(title=self.title, version=self.version, routes=self.routes)
            _add(self.openapi_schema)
        return self.openapi_schema


def _add(schema: dict[str, Any]) -> None:
    components = schema.setdefault("components", {}).setdefault("schemas", {})
    schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schema["security"] = [{}, {"key": []}]  # a server without keys needs none
    paths = schema.setdefault("paths", {})
    for path, summary, name, body in _TAKES:
        inner, defined = msgspec.json.schema_components([body], ref_template=f"#/components/schemas/{name}.{{name}}")
        components |= {f"{name}.{key}": value for key, value in defined.items()}
        operations = paths.setdefault(path, {})
        content = {"application/json": {"schema": _either(operations.get("post"), inner[0])}}
        body_fields = {"requestBody": {"required": True, "content": content}} | _path_parameters(path)
        operations["post"] = _operation(summary, body_fields)
    for method, path, summary in _GIVES:
        paths.setdefault(path, {})[method] = _operation(summary, _path_parameters(path))


def _either(before: dict[str, Any] | None, schema: dict[str, Any]) -> dict[str, Any]:
    """A path that speaks two dialects takes either body."""
    if before is None:
        return schema
    return {"anyOf": [before["requestBody"]["content"]["application/json"]["schema"], schema]}


def _operation(summary: str, more: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": {"description": "OK"}}} | more


def _path_parameters(path: str) -> dict[str, Any]:
    names = [name for name in ("id", "item") if f"{{{name}}}" in path]
    if not names:
        return {}
    kind = {"in": "path", "required": True, "schema": {"type": "string"}}
    return {"parameters": [{"name": name} | kind for name in names]}
