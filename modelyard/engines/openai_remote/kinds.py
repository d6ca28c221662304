"""The three APIs an upstream may speak, as data: wire, paths, how a key is shown, and which fields its maker takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from msgspec import Struct

from modelyard.core.protocol import WireProtocol
from modelyard.engines.openai_remote.options import ApiKind
from modelyard.protocols import anthropic_messages, openai_chat, openai_responses


def _wire(module: Any) -> WireProtocol:
    """A protocol module is a Wire; modules cannot say so to the type checker."""
    return cast(WireProtocol, module)


class Kind(Struct, frozen=True, kw_only=True):
    """`counts` is the path of the API's token counter; `sampling` are the knobs that its maker documents."""

    name: ApiKind
    wire: WireProtocol
    path: str
    counts: str | None = None
    models: str = "/models"
    sampling: frozenset[str]
    stops: bool = True
    logprobs: bool = True
    needs_max_tokens: bool = False
    thinks_in_history: bool = False  # reasoning of earlier turns may be shown, where the upstream has signed it

    def auth(self, key: str) -> dict[str, str]:
        return {"authorization": f"Bearer {key}"} if key else {}


class AnthropicKind(Kind, frozen=True, kw_only=True):
    def auth(self, key: str) -> dict[str, str]:
        return {"anthropic-version": "2023-06-01"} | ({"x-api-key": key} if key else {})


KINDS: Mapping[ApiKind, Kind] = {
    "chat_completions": Kind(
        name="chat_completions",
        wire=_wire(openai_chat),
        path="/chat/completions",
        sampling=frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "logit_bias"}),
    ),
    "responses": Kind(
        name="responses",
        wire=_wire(openai_responses),
        path="/responses",
        counts="/responses/input_tokens",
        sampling=frozenset({"temperature", "top_p"}),
        stops=False,
        thinks_in_history=True,
    ),
    "anthropic_messages": AnthropicKind(
        name="anthropic_messages",
        wire=_wire(anthropic_messages),
        path="/messages",
        counts="/messages/count_tokens",
        sampling=frozenset({"temperature", "top_p", "top_k"}),
        logprobs=False,
        needs_max_tokens=True,
        thinks_in_history=True,
    ),
}


def base_url(kind: ApiKind, url: str) -> str:
    """Anthropic's clients are given the address without its version, OpenAI's with it; both are understood."""
    return f"{url}/v1" if kind == "anthropic_messages" and not url.endswith("/v1") else url
