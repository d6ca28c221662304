"""Another server with a Chat Completions, Responses or Anthropic Messages API. Requests leave this machine, with
consent. Google and Ollama are reached through the Chat Completions that both offer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field, field_validator

from modelyard.core.engine import (
    Capabilities,
    Embeddings,
    EngineInfo,
    EnginePlugin,
    EngineSpec,
    EngineStats,
    Generation,
    OnProgress,
    Ranking,
)
from modelyard.core.errors import ModelyardError, Unavailable, Unsupported
from modelyard.core.events import Event
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import (
    EmbeddingRequest,
    Message,
    Reasoning,
    Request,
    RerankRequest,
    Sampling,
    Text,
    Thinking,
)
from modelyard.engines.option_faults import OptionFault, try_options
from modelyard.engines.upstream import (
    Emit,
    RetryPolicy,
    Upstream,
    UpstreamAddress,
    UpstreamJobs,
    append_fields,
    embed_inputs,
    map_auth_error,
    read_api_key,
    reject_bare_prompts,
    rerank_documents,
)
from modelyard.protocols import anthropic_messages, openai_chat, openai_completions, openai_responses
from modelyard.protocols.common.reasoning_signature import unpack_reasoning

ApiKind = Literal["chat_completions", "responses", "anthropic_messages", "gemini", "ollama"]


class OpenAiRemoteOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    remote_api_kind: ApiKind = Field(default="chat_completions", description="The API of the upstream.")
    remote_base_url: str = Field(
        description="Address of the upstream, such as https://api.example.com/v1; its paths are appended."
    )
    remote_model: str = Field(min_length=1, description="The upstream's name of the model.")
    remote_api_key_env: str | None = Field(
        default=None, description="Environment variable that holds the upstream's key; unset: no key is sent."
    )
    remote_headers: dict[str, str] = Field(default_factory=dict, description="Headers added to every request.")
    remote_timeout_s: float = Field(
        default=120.0, gt=0, description="Maximum seconds without data, before and during an answer."
    )
    remote_max_retries: int = Field(
        default=0,
        ge=0,
        le=10,
        description="Retries of a request that failed before the first byte of its answer.",
    )
    remote_health_check: Literal["config_only", "models"] = Field(
        default="config_only",
        description="What loading checks: the settings and the key, or also the upstream's list of models.",
    )
    remote_thinking: Literal["default", "enabled", "disabled"] = Field(
        default="default",
        description="Thinking if the request does not say; on Chat sent as the provider's thinking field.",
    )
    remote_max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum tokens of an answer if the request does not say; an Anthropic upstream gets 8192.",
    )
    remote_extensions: bool = Field(
        default=False,
        description="Whether the upstream accepts extension fields (top_k, grammar …), as another Modelyard, "
        "llama-server or vLLM does; else it gets only the fields of the official API.",
    )

    @field_validator("remote_base_url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be an http:// or https:// address, such as https://api.example.com/v1")
        return url.rstrip("/")


log = logging.getLogger(__name__)

_NO_COUNT_ENDPOINT = frozenset({404, 405, 501})

CAPABILITIES = Capabilities(
    modalities=("text", "image"),
    structured=True,
    logprobs=True,
    prompt_logprobs=True,
    reasoning_budget=True,
    thinking_modes=("default", "enabled", "disabled"),
    embeddings=True,
    rerank=True,
    infill=True,
)


class OpenAiRemoteEngine:
    """Create it on its event loop. It is never lost: an unreachable upstream fails single requests."""

    def __init__(self, spec: EngineSpec) -> None:
        self._model = spec.model
        self._options: OpenAiRemoteOptions = spec.options
        self._api = APIS[self._options.remote_api_kind]
        self.lost: asyncio.Future[ModelyardError] = asyncio.get_running_loop().create_future()
        self.info = EngineInfo("openai_remote", dict(spec.caches), _capabilities(spec, self._api), device="remote")
        self._jobs = UpstreamJobs()
        self._upstream: Upstream | None = None

    def __repr__(self) -> str:
        return f"<RemoteEngine {self._options.remote_base_url} {len(self._jobs)} running>"

    async def open(self, progress: OnProgress) -> None:
        progress(0.0, "checking the settings")
        options = self._options
        key = read_api_key(self._model, options.remote_api_key_env) or ""
        address = UpstreamAddress(
            name=f"the upstream of {self._model!r}",
            base_url=base_url(options.remote_api_kind, options.remote_base_url),
            headers=self._api.auth_headers(key) | options.remote_headers,
            key_source=f"the environment variable {options.remote_api_key_env!r}",
            timeout=options.remote_timeout_s,
        )
        self._upstream = Upstream(address, RetryPolicy(options.remote_max_retries, options.remote_timeout_s))
        if options.remote_health_check == "models":
            progress(0.5, f"requesting the models of {options.remote_base_url}")
            await self._check_models()
        progress(1.0, "ready")

    async def _check_models(self) -> None:
        """Raises if the list of models cannot be read. An upstream may serve models that it does not list."""
        address = self._open_upstream.address
        status, reply = await self._open_upstream.request_json("GET", "/models")
        if status >= 400:
            error = self._api.protocol.read_error(status, {}, f"its list of models answered {status}".encode())
            raise map_auth_error(error, address)
        if self._options.remote_model not in _model_names(reply):
            log.warning("%s does not list the model %r", address.name, self._options.remote_model)

    def chat(self, request: Request) -> Generation[Event]:
        async def run(emit: Emit) -> None:
            body = chat_body(request, self._options, self._api)
            path, protocol = self._api.path, self._api.protocol
            if request.prompts:
                path, protocol = "/completions", cast(WireProtocol, openai_completions)
            await self._open_upstream.stream_chat(path, body, protocol, emit)

        return self._jobs.start(run)

    async def count(self, request: Request) -> int | None:
        if self._api.count_path is None:
            return None
        body = count_body(request, self._options, self._api)
        status, reply = await self._open_upstream.request_json("POST", self._api.count_path, body)
        if status in _NO_COUNT_ENDPOINT:
            return None
        count: Any = reply.get("input_tokens") if isinstance(reply, dict) else None
        if not isinstance(count, int):
            raise Unavailable(f"{self._open_upstream.address.name} cannot count tokens now: it answered {status}")
        return count

    async def embed_inputs(self, request: EmbeddingRequest) -> Embeddings:
        return await embed_inputs(self._open_upstream, "/embeddings", request, self._options.remote_model)

    async def rerank(self, request: RerankRequest) -> Ranking:
        return await rerank_documents(self._open_upstream, "/rerank", request, self._options.remote_model)

    @property
    def _open_upstream(self) -> Upstream:
        if self._upstream is None:
            raise RuntimeError("the engine is not open")
        return self._upstream

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._jobs))

    async def close(self) -> None:
        self._jobs.close(Unavailable("the engine was closed"))
        await self._jobs.join()
        if self._upstream is not None:
            await self._upstream.close()


def _capabilities(spec: EngineSpec, api: RemoteApi) -> Capabilities:
    options: OpenAiRemoteOptions = spec.options
    takes_all = options.remote_extensions
    can_switch_thinking = takes_all or api.kind != "chat_completions" or options.remote_thinking != "default"
    return replace(
        CAPABILITIES,
        modalities=spec.modalities,
        logprobs=api.has_logprobs,
        embeddings=api.has_prompts,
        rerank=api.has_prompts,
        infill=api.has_prompts,
        ignored=() if takes_all else tuple(name for name in Sampling.__struct_fields__ if name not in api.sampling),
        thinking_modes=CAPABILITIES.thinking_modes if can_switch_thinking else ("default",),
    )


# --- requests ---------------------------------------------------------------------------------------------------------

_DEFAULT_MAX_TOKENS = 8192  # for an API that needs max_tokens
_GRAMMARS = frozenset({"gbnf", "regex", "lark"})


class RemoteApi(Struct, frozen=True, kw_only=True):
    """`sampling` are the documented sampling fields. `reads_signed_reasoning`: earlier reasoning may be sent if the
    upstream has signed it."""

    kind: ApiKind
    protocol: WireProtocol
    path: str
    count_path: str | None = None
    sampling: frozenset[str]
    has_prompts: bool = True  # it also has completions, embeddings and rankings, as servers with OpenAI's API do
    has_stop: bool = True
    has_logprobs: bool = True
    needs_max_tokens: bool = False
    reads_signed_reasoning: bool = False

    def auth_headers(self, key: str) -> dict[str, str]:
        if self.kind == "anthropic_messages":
            return {"anthropic-version": "2023-06-01"} | ({"x-api-key": key} if key else {})
        return {"authorization": f"Bearer {key}"} if key else {}


APIS: Mapping[ApiKind, RemoteApi] = {
    "chat_completions": RemoteApi(
        kind="chat_completions",
        protocol=cast(WireProtocol, openai_chat),
        path="/chat/completions",
        sampling=frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "logit_bias"}),
    ),
    "responses": RemoteApi(
        kind="responses",
        protocol=cast(WireProtocol, openai_responses),
        path="/responses",
        count_path="/responses/input_tokens",
        sampling=frozenset({"temperature", "top_p"}),
        has_stop=False,
        reads_signed_reasoning=True,
    ),
    "anthropic_messages": RemoteApi(
        kind="anthropic_messages",
        protocol=cast(WireProtocol, anthropic_messages),
        path="/messages",
        count_path="/messages/count_tokens",
        sampling=frozenset({"temperature", "top_p", "top_k"}),
        has_prompts=False,
        has_logprobs=False,
        needs_max_tokens=True,
        reads_signed_reasoning=True,
    ),
    "gemini": RemoteApi(
        kind="gemini",
        protocol=cast(WireProtocol, openai_chat),
        path="/chat/completions",
        sampling=frozenset({"temperature", "top_p"}),  # it rejects a request with any other
        has_prompts=False,
        has_logprobs=False,
        reads_signed_reasoning=True,
    ),
    "ollama": RemoteApi(
        kind="ollama",
        protocol=cast(WireProtocol, openai_chat),
        path="/chat/completions",
        sampling=frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"}),
    ),
}


def _model_names(reply: Any) -> set[str]:
    """The names in a list of models. Google's begin with `models/`, and Ollama's may end with a tag."""
    models = reply.get("data") if isinstance(reply, dict) else reply
    listed = [model for model in models if isinstance(model, dict)] if isinstance(models, list) else []
    names = {str(model.get("id")).removeprefix("models/") for model in listed}
    return names | {name.removesuffix(":latest") for name in names}


def base_url(kind: ApiKind, url: str) -> str:
    """Clients of OpenAI get the address with a version, others without it; both are accepted."""
    if kind == "gemini":
        versioned = url.endswith(("/v1beta", "/v1", "/v1alpha", "/openai"))
        return (url if versioned else f"{url}/v1beta").removesuffix("/openai") + "/openai"
    return f"{url}/v1" if kind in ("anthropic_messages", "ollama") and not url.endswith("/v1") else url


def chat_body(request: Request, options: OpenAiRemoteOptions, api: RemoteApi) -> bytes:
    """The complete request; a stream with usage. A bare prompt goes to an OpenAI upstream's completions."""
    if not api.has_prompts:
        reject_bare_prompts(request)
    if request.prompts and request.constraint is not None and not options.remote_extensions:
        raise Unsupported("the upstream's completions take no schema or grammar", code="structured_unsupported")
    is_stream = request.prompt_logprobs is None or request.echo  # vLLM sends them with a whole reply only
    if not is_stream and not (options.remote_extensions and api.kind == "chat_completions"):
        reason = "the upstream has no prompt_logprobs: send echo with logprobs, or set remote_extensions for a vLLM"
        raise Unsupported(reason, code="prompt_logprobs_unsupported", param="prompt_logprobs")
    max_tokens = request.max_tokens or options.remote_max_tokens
    streamed = replace(
        request,
        **_accepted_fields(request, options, api),
        model=options.remote_model,
        max_tokens=max_tokens or (_DEFAULT_MAX_TOKENS if api.needs_max_tokens else None),
        n=1,
        stream=is_stream,
        include_usage=is_stream,
        previous=None,  # the conversation is complete; the upstream does not know our stored responses
        store=False if api.kind == "responses" else None,
    )
    fields: dict[str, Any] = {}
    if api.kind == "chat_completions" and options.remote_thinking != "default":
        # Chat providers that can switch thinking agree on this field.
        is_enabled = _reasoning(request, options).enabled
        fields["thinking"] = {"type": "enabled" if is_enabled else "disabled"}
    if request.prompts:
        return openai_completions.write_request(streamed)
    if api.kind == "gemini":
        return openai_chat.write_request(streamed, signed_calls=True)
    return append_fields(api.protocol.write_request(streamed), fields)


def count_body(request: Request, options: OpenAiRemoteOptions, api: RemoteApi) -> bytes:
    """Only the fields that add tokens to the prompt."""
    accepted = replace(request, **_accepted_fields(request, options, api))
    prompt = Request(
        model=options.remote_model,
        messages=accepted.messages,
        instructions=accepted.instructions,
        tools=accepted.tools,
        tool_choice=accepted.tool_choice,
        reasoning=accepted.reasoning,
    )
    return api.protocol.write_request(prompt)


def _accepted_fields(request: Request, options: OpenAiRemoteOptions, api: RemoteApi) -> dict[str, Any]:
    """The fields of the request that the upstream gets in another form, or not at all."""
    reasoning = _reasoning(request, options)
    if options.remote_extensions:
        return {"reasoning": reasoning}
    if request.constraint is not None and request.constraint.kind in _GRAMMARS:
        raise Unsupported(
            f"the upstream of this model takes JSON schemas, not a {request.constraint.kind} grammar",
            code="structured_unsupported",
        )
    changed: dict[str, Any] = {}
    if api.kind == "gemini":  # it rejects a request with a field that it does not know
        tools = tuple([replace(tool, strict=None) for tool in request.tools])
        changed = {"parallel_tool_calls": None, "user": None, "tools": tools}
    return changed | {
        "messages": tuple([_without_foreign_reasoning(message, options, api) for message in request.messages]),
        "sampling": Sampling(**{name: getattr(request.sampling, name) for name in api.sampling}),
        "stop": request.stop if api.has_stop else (),
        "logprobs": request.logprobs if api.has_logprobs else None,
        "reasoning": _written_reasoning(reasoning, api),
        "lora_adapter": None,
        "chat_template_kwargs": {},
        "add_generation_prompt": None,
        "continue_final_message": None,
        "documents": (),
        "priority": None,
        "session": request.session if api.kind == "responses" else None,
        "metadata": None,
    }


def _written_reasoning(reasoning: Reasoning, api: RemoteApi) -> Reasoning:
    """Chat Completions have an effort and nothing else; Google and Ollama take `none` for no thinking."""
    if api.kind in ("responses", "anthropic_messages"):
        return reasoning
    is_off = reasoning.enabled is False and api.kind != "chat_completions"
    return Reasoning(effort="none" if is_off else reasoning.effort)


def _reasoning(request: Request, options: OpenAiRemoteOptions) -> Reasoning:
    reasoning = request.reasoning
    if reasoning.enabled is not None or options.remote_thinking == "default":
        return reasoning
    return replace(reasoning, enabled=options.remote_thinking == "enabled")


def _without_foreign_reasoning(message: Message, options: OpenAiRemoteOptions, api: RemoteApi) -> Message:
    """Removes reasoning that the upstream would refuse: unsigned, or signed by this gateway. A turn stays non-empty."""
    if message.role != "assistant" or not any(isinstance(part, Thinking) for part in message.parts):
        return message

    def is_accepted(part: Thinking) -> bool:
        if api.kind == "chat_completions":
            return options.remote_thinking != "default"
        return api.reads_signed_reasoning and bool(part.signature) and unpack_reasoning(part.signature) is None

    parts = tuple(part for part in message.parts if not isinstance(part, Thinking) or is_accepted(part))
    if api.kind == "gemini":  # it takes the signature and has no field for the text
        parts = tuple(replace(part, text="") if isinstance(part, Thinking) else part for part in parts)
    return replace(message, parts=parts or (Text(""),))


# --- the plug-in interface --------------------------------------------------------------------------------------------

Options, create = OpenAiRemoteOptions, OpenAiRemoteEngine


def faults(spec: EngineSpec) -> Iterator[OptionFault]:
    variable: str | None = spec.options.remote_api_key_env
    yield from try_options(("remote_api_key_env", lambda name: read_api_key(spec.model, name), variable))


ENGINE = EnginePlugin(
    Options=Options,
    create=create,
    kind="chat",
    capabilities=CAPABILITIES,
    holds_weights=False,
    remote=True,
    faults=faults,
)
