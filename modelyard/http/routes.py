"""The route table: every path that is served, with its methods, its handler, the role that it needs, its name in the
metrics and its entry in the API page. The middleware, authentication, metrics, logs and the page read it.

A handler is an ASGI app by its name (`openai_chat`), or a method of a group of endpoints (`models.all`). `server` and
`admin.routes` have the groups; a row without its group is not served. `also` are other paths of the same route: those
without parameters are treated as `path` from there on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from starlette.convertors import Convertor
from starlette.routing import compile_path
from starlette.types import ASGIApp

from modelyard.accounts.owner import Role
from modelyard.core.errors import InvalidRequest, ModelyardError, NotFound
from modelyard.protocols import openai_batches, openai_completions, openai_embeddings
from modelyard.protocols.anthropic_messages.batches import MessageBatchBody
from modelyard.protocols.anthropic_messages.request import MessagesBody
from modelyard.protocols.common.token_body import TokenBody
from modelyard.protocols.gemini.embeddings import GeminiBatchEmbedBody, GeminiEmbedBody
from modelyard.protocols.gemini.request import GeminiBody, GeminiCountBody
from modelyard.protocols.llama_completion import LlamaCompletionBody
from modelyard.protocols.llama_infill import InfillBody
from modelyard.protocols.mistral_fim import FimBody
from modelyard.protocols.ollama.generate import OllamaGenerateBody
from modelyard.protocols.ollama.models import OllamaCopyBody, OllamaCreateBody, OllamaEmbedBody, OllamaModelBody
from modelyard.protocols.ollama.request import OllamaChatBody
from modelyard.protocols.openai_chat.request import ChatCompletionBody
from modelyard.protocols.openai_responses import conversations
from modelyard.protocols.openai_responses.request import ResponsesBody
from modelyard.protocols.pool_responses import PoolResponsesBody
from modelyard.protocols.rerank import RerankBody
from modelyard.protocols.score import ScoreBody

OTHER = "other"  # the name of paths that are not served
WORKBENCH = "workbench"
ADMIN_PATH = "/v1/admin"
_MAX_SHOWN = 256


class Row(Struct, frozen=True):
    """`summary` is empty for a route that the API page does not show. `body` are the structs that it takes.
    `protocol` writes its errors; empty: the client's headers decide."""

    method: str  # `*`: every one, WebSockets too
    path: str
    handler: str
    summary: str = ""
    body: tuple[type, ...] = ()
    also: tuple[str, ...] = ()
    protocol: str = ""
    role: Role = "member"
    is_open: bool = False  # without a key
    is_quiet: bool = False  # logged as debug

    @property
    def label(self) -> str:
        """Of the metrics. Not the client's path: every path would be a new time series."""
        return _without_kinds(self.path)


@cache
def _without_kinds(path: str) -> str:
    """`/v1/models/{id}` for `/v1/models/{id:path}`."""
    return re.sub(r":\w+}", "}", path)


def _speaking(protocol: str, *rows: Row) -> tuple[Row, ...]:
    return tuple(replace(row, protocol=protocol) for row in rows)


def _needing(role: Role, *rows: Row) -> tuple[Row, ...]:
    return tuple(replace(row, role=role) for row in rows)


def _post(path: str, handler: str, summary: str = "", *body: type, also: tuple[str, ...] = ()) -> Row:
    return Row("POST", path, handler, summary, body, also)


def _get(path: str, handler: str, summary: str = "", *also: str) -> Row:
    return Row("GET", path, handler, summary, (), also)


def _delete(path: str, handler: str, summary: str = "", *also: str) -> Row:
    return Row("DELETE", path, handler, summary, (), also)


def _versions(path: str, *versions: str) -> tuple[str, ...]:
    """A path of Google's API in its other versions."""
    return tuple(path.replace("/v1beta/", f"/{version}/" if version else "/") for version in versions)


def _gemini(method: str, handler: str, summary: str = "", *body: type) -> Row:
    path = f"/v1beta/models/{{id:path}}:{method}"
    return _post(path, handler, summary, *body, also=_versions(path, "v1", "v1alpha", ""))


_MODEL, _FILE, _UPLOAD = "/v1beta/models/{id:path}", "/v1beta/files/{id}", "/upload/v1beta/files"
_RESPONSE, _TALK, _ITEMS = "/v1/responses/{id}", "/v1/conversations/{id}", "/v1/conversations/{id}/items"
_BATCH, _MESSAGE_BATCH, _DOWNLOAD = "/v1/batches/{id}", "/v1/messages/batches/{id}", f"{_FILE}:download"
_LM_STUDIO = "/api/v0"
_RANK_NAMES = ("/rerank", "/v2/rerank", "/reranking", "/v1/reranking")  # also Cohere's and llama-server's

CLIENTS = (
    *_speaking(
        "openai_chat",
        _post(
            "/v1/chat/completions",
            "openai_chat",
            "OpenAI Chat Completions",
            ChatCompletionBody,
            also=("/chat/completions", f"{_LM_STUDIO}/chat/completions"),
        ),
        _post(
            "/v1/chat/completions/input_tokens",
            "chat_input_tokens",
            "Count the tokens of a Chat request",
            ChatCompletionBody,
            also=("/chat/completions/input_tokens",),
        ),
        _post(
            "/v1/completions",
            "openai_completions",
            "OpenAI Completions (legacy)",
            openai_completions.CompletionBody,
            also=(f"{_LM_STUDIO}/completions",),
        ),
        _post(
            "/v1/embeddings",
            "embeddings",
            "OpenAI Embeddings",
            openai_embeddings.EmbeddingBody,
            also=("/embeddings", f"{_LM_STUDIO}/embeddings"),
        ),
        _post("/completions", "bare_completions"),
        _post("/completion", "llama_completion", "Complete a prompt, as llama-server", LlamaCompletionBody),
        _post("/infill", "llama_infill", "Fill a gap in a text, as llama-server", InfillBody, also=("/v1/infill",)),
        _post(
            "/v1/fim/completions",
            "mistral_fim",
            "Fill a gap in a text, as Mistral",
            FimBody,
            also=("/fim/completions",),
        ),
        _post("/embedding", "llama_embedding", "Embeddings, as llama-server", openai_embeddings.LlamaEmbeddingBody),
        _post("/v1/rerank", "rerank", "Order documents by their relevance to a query", RerankBody, also=_RANK_NAMES),
        _post("/v1/score", "score", "How well texts match, as vLLM", ScoreBody, also=("/score",)),
        _post("/v1/batches", "batches.create", "Run the requests of a file, at low priority", openai_batches.BatchBody),
        _get("/v1/batches", "batches.all", "Batches, the newest first"),
    ),
    *_speaking(
        "openai_responses",
        _post(
            "/v1/responses",
            "openai_responses",
            "OpenAI Responses, or the pool dialect",
            ResponsesBody,
            PoolResponsesBody,
            also=("/responses",),
        ),
        Row("WEBSOCKET", "/v1/responses", "responses_socket", also=("/responses",)),
        _post("/v1/responses/compact", "compaction", "Summarize a conversation", ResponsesBody),
        _post("/v1/responses/input_tokens", "input_tokens", "Count the tokens of a Responses request", ResponsesBody),
        _get(_RESPONSE, "responses.get", "A stored response, or the events of a background response"),
        _delete(_RESPONSE, "responses.delete", "Forget a stored response"),
        _post(f"{_RESPONSE}/cancel", "responses.cancel", "Cancel a background response"),
        _get(f"{_RESPONSE}/input_items", "responses.input_items", "What a stored response was asked"),
    ),
    *_speaking(
        "anthropic_messages",
        _post("/v1/messages", "anthropic_messages", "Anthropic Messages", MessagesBody),
        _post("/v1/messages/count_tokens", "count_tokens", "Count the tokens of a Messages request", MessagesBody),
        _post(
            "/v1/messages/batches",
            "message_batches.create",
            "Run many Messages requests, at low priority",
            MessageBatchBody,
        ),
        _get("/v1/messages/batches", "message_batches.all", "Batches of Messages, the newest first"),
        _get(_MESSAGE_BATCH, "message_batches.get", "One batch of Messages, and how far it is"),
        _delete(_MESSAGE_BATCH, "message_batches.delete", "Delete a batch that has ended"),
        _post(f"{_MESSAGE_BATCH}/cancel", "message_batches.cancel", "Cancel a batch of Messages"),
        _get(f"{_MESSAGE_BATCH}/results", "message_batches.results", "The results of a batch of Messages, one a line"),
    ),
    *_speaking(
        "gemini",
        _gemini("generateContent", "gemini", "Gemini's API", GeminiBody),
        _gemini("streamGenerateContent", "gemini", "Gemini's API, streamed", GeminiBody),
        _gemini("countTokens", "gemini_count", "Count the tokens of a Gemini request", GeminiCountBody),
        _gemini("embedContent", "gemini_embed", "An embedding, as Gemini", GeminiEmbedBody),
        _gemini("batchEmbedContents", "gemini_batch_embed", "Embeddings, as Gemini", GeminiBatchEmbedBody),
        _gemini("{method}", "not_served"),  # Google's methods that no other endpoint has
        _get("/v1beta/models", "models.all", "The models, as Gemini", "/v1alpha/models"),
        _get(_MODEL, "models.one", "One model, as Gemini", *_versions(_MODEL, "v1alpha")),
        _post(
            _UPLOAD,
            "files.receive",
            "Upload a file as Google's SDKs do: resumable, in pieces",
            also=_versions(_UPLOAD, "v1alpha", "v1"),
        ),
        _get("/v1beta/files", "files.all", "Uploaded files, in Google's form", "/v1alpha/files"),
        _get(_DOWNLOAD, "files.content", "What is in a file", *_versions(_DOWNLOAD, "v1alpha", "v1")),
        _get(_FILE, "files.get", "One file, in Google's form", *_versions(_FILE, "v1alpha")),
        _delete(_FILE, "files.delete", "Delete a file", *_versions(_FILE, "v1alpha")),
    ),
    *_speaking(
        "ollama",
        _post("/api/chat", "ollama", "A conversation, as Ollama", OllamaChatBody),
        _post("/api/generate", "ollama_generate", "A prompt, as Ollama", OllamaGenerateBody),
        _post("/api/embed", "ollama_embed", "Embeddings, as Ollama", OllamaEmbedBody),
        _post("/api/embeddings", "ollama_embeddings", "An embedding, as Ollama before /api/embed", OllamaEmbedBody),
        _get("/api/version", "library.version", "The version of Ollama's API that is served"),
        _get("/api/tags", "library.tags", "The models, as Ollama"),
        _get("/api/ps", "library.ps", "The loaded models, as Ollama"),
        _post("/api/show", "library.show", "What a model is and can do, as Ollama", OllamaModelBody),
        *_needing(
            "local",  # operator, unless there is nothing to fetch
            _post("/api/pull", "library.pull", "Fetch a model of the hub, as Ollama", OllamaModelBody),
        ),
        *_needing(
            "operator",
            _delete("/api/delete", "library.delete", "Remove a model from the library, as Ollama"),
            _post("/api/copy", "library.copy", "Another name for a model, as Ollama", OllamaCopyBody),
            _post("/api/push", "library.push"),
        ),
        *_needing(
            "owner",
            _post("/api/create", "library.create", "A model with other settings, as Ollama", OllamaCreateBody),
            Row("HEAD", "/api/blobs/{digest}", "library.has_blob"),
            _post("/api/blobs/{digest}", "library.put_blob"),
        ),
    ),
    _get("/v1/models", "models.all", "The models, in the shape of the protocol that asks", "/models"),
    _get("/v1/models/{id:path}", "models.one", "One model; any name that a route knows", "/models/{id:path}"),
    _get(f"{_LM_STUDIO}/models", "lookups.lm_studio_models", "The models, as LM Studio"),
    _get(f"{_LM_STUDIO}/models/{{id:path}}", "lookups.lm_studio_model", "One model, as LM Studio"),
    _post("/tokenize", "tokenize", "Text or messages to token ids", TokenBody),
    _post("/detokenize", "detokenize", "Token ids to text", TokenBody),
    _post("/apply-template", "apply_template", "Messages to the prompt that the model reads", ChatCompletionBody),
    _get("/props", "lookups.props", "Settings, template and window of a model, as llama-server"),
    _get("/slots", "lookups.slots", "The slots of a model, as llama-server"),
    _post("/slots/{id}", "lookups.change_slot", "Save, restore or erase the KV of a slot, as llama-server"),
    _get(
        "/lora-adapters",
        "lookups.lora_adapters",
        "The loaded LoRA adapters of a model, as llama-server",
        "/v1/lora-adapters",
    ),
    _get("/version", "lookups.version", "The version of this server, as vLLM"),
    _post(
        "/v1/conversations",
        "conversations.create",
        "Create a conversation, which responses continue",
        conversations.ConversationBody,
    ),
    _get(_TALK, "conversations.get", "A conversation"),
    _post(_TALK, "conversations.update", "Change a conversation", conversations.ConversationUpdateBody),
    _delete(_TALK, "conversations.delete", "Delete a conversation"),
    _get(_ITEMS, "conversations.items", "Items of a conversation"),
    _post(_ITEMS, "conversations.add", "Add items", conversations.ConversationItemsBody),
    _get(f"{_ITEMS}/{{item}}", "conversations.item", "One item"),
    _delete(f"{_ITEMS}/{{item}}", "conversations.delete_item", "Delete an item"),
    _post("/v1/files", "files.upload", "Upload a file, as a form with file and purpose"),
    _get("/v1/files", "files.all", "Uploaded files, and those of batches"),
    _get("/v1/files/{id}", "files.get", "One file"),
    _delete("/v1/files/{id}", "files.delete", "Delete a file"),
    _get("/v1/files/{id}/content", "files.content", "What is in a file"),
    _get(_BATCH, "batches.get", "One batch, and how far it is"),
    _post(f"{_BATCH}/cancel", "batches.cancel", "Cancel a batch"),
    Row("GET", "/metrics", "health.metrics", "Prometheus metrics of all gateway processes", is_quiet=True),
)
# Without secrets: the pages ask for a key, and send it to the API as any client does.
OPEN = tuple(
    replace(row, is_open=True, is_quiet=row.handler != "pages")
    for row in (
        _get("/", "health.root"),
        _get("/health", "health.health", "Is the server well, and each model", "/v1/health"),
        _get("/health/live", "health.live", "Is the process alive"),
        _get("/health/ready", "health.ready", "Can its models answer"),
        _get("/docs", "pages"),
        _get("/docs/{name}", "pages"),
        _get("/openapi.json", "pages"),
        Row("*", "/workbench", WORKBENCH, also=("/workbench/{page:path}",)),
    )
)


def _admin(role: Role, *rows: tuple[str, str, str, str]) -> Iterator[Row]:
    """Open pages read them every second."""
    for method, path, handler, summary in rows:
        yield Row(method, ADMIN_PATH + path, handler, summary, role=role, is_quiet=method == "GET")


ADMIN = (  # the first that matches counts: a model's name may have slashes
    *_admin(
        "operator",
        ("GET", "/models/{name:path}/log", "admin.log", "The last lines of a managed engine's output"),
        ("GET", "/requests", "admin.requests", "Running and waiting requests, and recent ones"),
        ("GET", "/requests/{id}", "admin.request", "One request: timeline, tokens and texts"),
        ("POST", "/requests/{id}/cancel", "admin.cancel", "Cancel a running or waiting request"),
        ("GET", "/logs", "admin.logs", "The server's last log lines, by time, level and request"),
        ("POST", "/history", "admin.keep", "Whether the texts of requests are kept in memory"),
        ("GET", "/hub", "admin.search_hub", "Repositories of the hub with GGUF models, by words of their names"),
        ("GET", "/hub/{source:path}", "admin.offer", "The variants of a repository, and which fit this machine"),
        ("POST", "/downloads", "admin.start_download", "Fetch a model of the hub, in the background"),
        ("POST", "/downloads/{id}/cancel", "admin.cancel_download", "Cancel a download; its parts stay"),
        ("DELETE", "/library/{name:path}", "admin.remove_model", "Remove a model of the library and its files"),
        ("GET", "/set-aside", "admin.set_aside", "What is not resumed any more: the server died with it twice"),
        ("POST", "/reload", "admin.reload", "Reload the configuration without dropping requests"),
    ),
    *_admin(
        "local",
        ("GET", "/models", "admin.models", "Every configured model: state, queue, replicas, memory, definition"),
        ("POST", "/models/{name:path}/load", "admin.load", "Load a model, with overrides for this load only"),
        ("POST", "/models/{name:path}/unload", "admin.unload", "Unload a model after its requests, or at once"),
        ("POST", "/models/{name:path}/drain", "admin.drain", "Accept no new requests for a model"),
        ("POST", "/models/{name:path}/replicas", "admin.scale", "Set the number of loaded replicas"),
        ("POST", "/models/{name:path}/estimate", "admin.estimate", "The memory of a load with these overrides"),
        ("GET", "/models/{name:path}", "admin.model", "One configured model"),
        ("GET", "/gpu-memory", "admin.memory", "GPU memory and RAM in use, by model"),
        ("GET", "/caches", "admin.caches", "Each cache's sequences, occupancy and reuse"),
        ("GET", "/history", "admin.history", "The last hour in slices of ten seconds"),
        ("GET", "/route", "admin.route", "Which route, cache and model a name resolves to"),
        ("GET", "/routes", "admin.routes", "The rules that decide where a model name leads, in their order"),
        ("GET", "/events", "admin.events", "Changes of the pool as server-sent events"),
        ("GET", "/tune", "admin.tune", "Results of the optimizer"),
        ("GET", "/downloads", "admin.downloads", "Downloads of models: running ones and the last ones"),
    ),
    *_admin(
        "member",
        ("GET", "/role", "admin.role", "Who the sender is: role, key, and the MCP servers that requests may name"),
        ("GET", "/chats", "admin.chats", "The chats of this key, newest first; `search` finds a text in them"),
        ("GET", "/chats/{id}", "admin.chat", "One stored chat"),
        ("PUT", "/chats/{id}", "admin.store_chat", "Store a chat; refused if it was changed since it was read"),
        ("DELETE", "/chats/{id}", "admin.delete_chat", "Delete a stored chat"),
        ("POST", "/login", "keys.log_in", "A secret for the cookie of a browser, in exchange for the key that is sent"),
        ("DELETE", "/login", "keys.log_out", "End the login whose secret is sent"),
        ("GET", "/keys", "keys.keys", "API keys: rules, usage, what is left of budgets; an operator sees all of them"),
        ("GET", "/usage", "keys.usage", "Requests, tokens and cost by key, model and day; an operator's of all keys"),
    ),
    *_admin(
        "operator",
        ("POST", "/keys", "keys.create", "Create a key; the reply has its secret, which is shown only here"),
        ("PATCH", "/keys/{id}", "keys.change", "Change what a created key may do"),
        ("DELETE", "/keys/{id}", "keys.revoke", "Revoke a created key at once, and end its requests"),
    ),
    *_admin(
        "owner",
        ("GET", "/config", "config.overview", "Models, caches and routes of the configuration files, without secrets"),
        ("POST", "/config/fields", "config.fields", "The fields of a model, cache or route: type, default, choices"),
        ("POST", "/config/preview", "config.preview", "What a change would write, and what is wrong with it"),
        ("POST", "/config/apply", "config.apply", "Write a change with a backup, and reload the configuration"),
    ),
)
ROWS = (*CLIENTS, *OPEN, *ADMIN)

# The protocols of clients that ask for a path which is not served: it shall read why.
_PROTOCOLS_OF_UNKNOWN = {
    "/v1/responses": "openai_responses",
    "/responses": "openai_responses",
    "/v1/messages": "anthropic_messages",
    "/api/v0/": "",  # LM Studio's are OpenAI's
    "/api/": "ollama",
    "/v1beta/": "gemini",
    "/v1alpha/": "gemini",
    "/upload/v1": "gemini",
}
GEMINI_METHODS = tuple(row.path.rpartition(":")[2] for row in ROWS if row.path.startswith(f"{_MODEL}:") and row.body)


def path_protocol(row: Row | None, path: str) -> str:
    """The protocol of a path; empty: the client's."""
    if row is not None:
        return row.protocol
    return next((name for prefix, name in _PROTOCOLS_OF_UNKNOWN.items() if path.startswith(prefix)), "")


# --- from a path to its handler ---------------------------------------------------------------------------------------


class MethodNotAllowed(InvalidRequest):
    """`allow` lists the methods that the path has."""

    def __init__(self, method: str, path: str, allow: str) -> None:
        super().__init__(f"{method} is not a method of {path[:_MAX_SHOWN]}", code="method_not_allowed")
        self.allow = allow


class Match(Struct, frozen=True):
    """What a path leads to: `app` is None if there is no such path, or not with this method. `is_direct`: the app notes
    its own status."""

    path: str
    row: Row | None = None
    app: ASGIApp | None = None
    params: Mapping[str, Any] = {}
    is_direct: bool = False
    allow: str = ""

    def refusal(self, method: str) -> ModelyardError:
        if self.row is None:
            return NotFound(f"there is no {self.path[:_MAX_SHOWN]} here; /docs lists the paths", code="path_not_found")
        return MethodNotAllowed(method, self.path, self.allow)


class RouteTable:
    """The rows that are served. A path without parameters is found in one step, others in the order of the rows."""

    def __init__(self, served: Iterable[tuple[Row, ASGIApp]]) -> None:
        self._exact: dict[str, dict[str, Match]] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], dict[str, Convertor[Any]], dict[str, Match]]] = {}
        for row, app in served:
            is_direct = getattr(app, "notes_status", False)
            for path in (row.path, *row.also):
                if "{" in path:
                    pattern, _, convertors = compile_path(path)
                    methods = self._patterns.setdefault(path, (pattern, convertors, {}))[2]
                    match = Match("", row, app, is_direct=is_direct)
                else:
                    methods = self._exact.setdefault(path, {})
                    match = Match(row.path, row, app, is_direct=is_direct)
                methods.setdefault(row.method, match)
                if row.method == "GET":
                    methods.setdefault("HEAD", match)

    def find(self, path: str, method: str) -> Match:
        methods = self._exact.get(path)
        if methods is not None and (found := methods.get(method)) is not None:
            return found
        path = path.rstrip("/") or "/"
        if (methods := self._exact.get(path)) is not None:
            return methods.get(method) or methods.get("*") or _not_allowed(path, methods)
        other: Match | None = None
        for pattern, convertors, methods in self._patterns.values():
            if (matched := pattern.match(path)) is None:
                continue
            if (found := methods.get(method) or methods.get("*")) is not None:
                params = {name: convertors[name].convert(text) for name, text in matched.groupdict().items()}
                return Match(path, found.row, found.app, params, found.is_direct)
            other = other or _not_allowed(path, methods)
        return other or Match(path)

    def posts(self) -> dict[str, ASGIApp]:
        """The apps of the requests that a batch may have."""
        posts = ((path, methods.get("POST")) for path, methods in self._exact.items())
        return {path: found.app for path, found in posts if found is not None and found.is_direct and found.app}

    def __iter__(self) -> Iterator[Row]:
        for methods in (*self._exact.values(), *(methods for _, _, methods in self._patterns.values())):
            yield from (match.row for match in methods.values() if match.row is not None)


def _not_allowed(path: str, methods: Mapping[str, Match]) -> Match:
    return Match(path, next(iter(methods.values())).row, allow=", ".join(sorted(methods.keys() - {"WEBSOCKET"})))
