"""The request for an upstream, by its API: with the upstream's model name and only the fields that it accepts.

The official APIs refuse unknown fields, and reasoning that they have not signed. An upstream with
`remote_extensions` gets the whole request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.errors import Unsupported
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Message, Reasoning, Request, Sampling, Text, Thinking
from modelyard.engines.openai_remote.options import ApiKind, OpenAiRemoteOptions
from modelyard.engines.upstream.forwarding import append_fields, reject_bare_prompts
from modelyard.protocols import anthropic_messages, openai_chat, openai_responses
from modelyard.protocols.common.reasoning_signature import unpack_reasoning

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
        has_logprobs=False,
        needs_max_tokens=True,
        reads_signed_reasoning=True,
    ),
}


def base_url(kind: ApiKind, url: str) -> str:
    """Anthropic clients get the address without /v1, OpenAI clients with it; both are accepted."""
    return f"{url}/v1" if kind == "anthropic_messages" and not url.endswith("/v1") else url


def chat_body(request: Request, options: OpenAiRemoteOptions, api: RemoteApi) -> bytes:
    """The complete request; always a stream with usage."""
    reject_bare_prompts(request)
    max_tokens = request.max_tokens or options.remote_max_tokens
    streamed = replace(
        _accepted_request(request, options, api),
        model=options.remote_model,
        max_tokens=max_tokens or (_DEFAULT_MAX_TOKENS if api.needs_max_tokens else None),
        n=1,
        stream=True,
        include_usage=True,
        previous=None,  # the conversation is complete; the upstream does not know our stored responses
        store=False if api.kind == "responses" else None,
    )
    fields: dict[str, Any] = {}
    if api.kind == "chat_completions" and options.remote_thinking != "default":
        # Chat providers that can switch thinking agree on this field.
        is_enabled = _reasoning(request, options).enabled
        fields["thinking"] = {"type": "enabled" if is_enabled else "disabled"}
    return append_fields(api.protocol.write_request(streamed), fields)


def count_body(request: Request, options: OpenAiRemoteOptions, api: RemoteApi) -> bytes:
    """Only the fields that add tokens to the prompt."""
    accepted = _accepted_request(request, options, api)
    prompt = Request(
        model=options.remote_model,
        messages=accepted.messages,
        instructions=accepted.instructions,
        tools=accepted.tools,
        tool_choice=accepted.tool_choice,
        reasoning=accepted.reasoning,
    )
    return api.protocol.write_request(prompt)


def _accepted_request(request: Request, options: OpenAiRemoteOptions, api: RemoteApi) -> Request:
    reasoning = _reasoning(request, options)
    if options.remote_extensions:
        return replace(request, reasoning=reasoning)
    if request.constraint is not None and request.constraint.kind in _GRAMMARS:
        raise Unsupported(
            f"the upstream of this model takes JSON schemas, not a {request.constraint.kind} grammar",
            code="structured_unsupported",
        )
    return replace(
        request,
        messages=tuple(_without_foreign_reasoning(message, options, api) for message in request.messages),
        sampling=Sampling(**{name: getattr(request.sampling, name) for name in api.sampling}),
        stop=request.stop if api.has_stop else (),
        logprobs=request.logprobs if api.has_logprobs else None,
        # The official Chat API has an effort and nothing else.
        reasoning=Reasoning(effort=reasoning.effort) if api.kind == "chat_completions" else reasoning,
        lora_adapter=None,
        chat_template_kwargs={},
        documents=(),
        priority=None,
        session=request.session if api.kind == "responses" else None,
        metadata=None,
    )


def _reasoning(request: Request, options: OpenAiRemoteOptions) -> Reasoning:
    reasoning = request.reasoning
    if reasoning.enabled is not None or options.remote_thinking == "default":
        return reasoning
    return replace(reasoning, enabled=options.remote_thinking == "enabled")


def _without_foreign_reasoning(message: Message, options: OpenAiRemoteOptions, api: RemoteApi) -> Message:
    """Removes reasoning that the upstream would refuse: unsigned, or signed by this gateway. A turn stays non-empty."""

    def is_accepted(part: Thinking) -> bool:
        if api.kind == "chat_completions":
            return options.remote_thinking != "default"
        return api.reads_signed_reasoning and bool(part.signature) and unpack_reasoning(part.signature) is None

    if not any(isinstance(part, Thinking) for part in message.parts):
        return message
    parts = tuple(part for part in message.parts if not isinstance(part, Thinking) or is_accepted(part))
    return replace(message, parts=parts or (Text(""),))
