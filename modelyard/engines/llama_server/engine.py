"""The llama-server engine: requests in llama-server's format, token counts by the server.

Once there is more than one scope (`Prompt.scope`), `ScopedSlots` chooses the slot of a request. llama-server gives a
request the slot whose prompt is most similar, whoever sent it. So its slots are chosen here: one of the same scope,
else the one that was used least recently, which then reuses nothing. A request that names its slot also takes nothing
from llama-server's prompt cache in RAM. While no request has a scope, llama-server chooses.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count, takewhile
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.engine import Capabilities, EngineInfo, EngineSpec, OnProgress
from modelyard.core.errors import ModelyardError, Unsupported
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Audio, Image, Message, Part, Request, ToolResult
from modelyard.engines.llama_server.options import LlamaServerOptions
from modelyard.engines.llama_server.server import combined_cache, server_command, server_task
from modelyard.engines.managed import Endpoint, ManagedEngine, ManagedServer, has_media, server_request
from modelyard.engines.media_checks import checked_audio, checked_image
from modelyard.engines.upstream import append_fields
from modelyard.library.variants import projector_kinds
from modelyard.protocols import llama_infill, openai_chat, openai_completions

FieldValues = dict[str, Any]  # of a request body


class Slot(Struct):
    index: int
    scope: str = ""
    messages: tuple[Message, ...] = ()  # of its last request
    use_order: int = 0
    busy: bool = False


class ScopedSlots:
    """`slots` is 0 if their number is not known: then no request reuses anything, once there are scopes."""

    def __init__(self, slots: int) -> None:
        self._slots = [Slot(index) for index in range(slots)]
        self._uses = count(1)
        self._is_mixed = False  # a request has had a scope

    def take(self, scope: str, messages: tuple[Message, ...]) -> tuple[Slot | None, FieldValues]:
        """The slot, until `release`, and the fields of the request body that choose it."""
        self._is_mixed = self._is_mixed or bool(scope)
        if not self._is_mixed:
            return None, {}
        free = [slot for slot in self._slots if not slot.busy]
        if not free:
            return None, {"cache_prompt": False}
        own = [slot for slot in free if slot.scope == scope]
        slot = max(own, key=lambda each: (equal_messages(each.messages, messages), each.use_order), default=None)
        reuses = slot is not None
        slot = slot or min(free, key=lambda each: each.use_order)
        slot.scope, slot.messages, slot.use_order, slot.busy = scope, messages, next(self._uses), True
        return slot, {"id_slot": slot.index, "cache_prompt": reuses}

    def release(self, slot: Slot | None) -> None:
        if slot is not None:
            slot.busy = False


def equal_messages(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many messages both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


CAPABILITIES = Capabilities(
    modalities=("text", "image", "audio"),
    structured=True,
    logprobs=True,
    reasoning_budget=True,
    ignored=("beam_size", "min_tokens"),
    thinking_modes=("default", "enabled", "disabled"),
    embeddings=True,
    rerank=True,
    infill=True,
)


class LlamaServerEngine(ManagedEngine):
    """Create it on its event loop."""

    def __init__(self, spec: EngineSpec) -> None:
        self._options = cast(LlamaServerOptions, spec.options)
        capabilities = model_capabilities(self._options)
        if len(spec.modalities) > 1:
            capabilities = replace(capabilities, modalities=spec.modalities)
        info = EngineInfo("llama_server", dict(spec.caches), capabilities)
        super().__init__(spec, info, self._options.llama_server_start_timeout_s)
        is_known = not {"--parallel", "-np"} & set(self._options.llama_server_extra_args)
        self._slots = ScopedSlots(combined_cache(spec.caches).parallel if is_known else 0)

    async def _start_server(self, progress: OnProgress) -> ManagedServer:
        progress(0.0, "starting llama-server")
        return await ManagedServer.start(server_command(self._spec))

    async def _is_ready(self, server: ManagedServer, progress: OnProgress) -> bool:
        try:
            status, _ = await server.upstream.request_json("GET", "/health")
        except ModelyardError:
            return False  # it does not listen yet
        if status == 503:
            progress(0.2, "loading the weights")
        return status == 200

    async def _checked(self, request: Request) -> Request:
        """llama-server exits with some files that are damaged on purpose, and knows few formats of images."""
        return await asyncio.to_thread(_with_checked_media, request) if has_media(request) else request

    def _request_body(self, request: Request) -> bytes:
        return chat_body(request, self._options)

    def _endpoint(self, request: Request) -> Endpoint:
        return INFILL if request.infill is not None else super()._endpoint(request)

    @contextmanager
    def _placed(self, request: Request) -> Iterator[Mapping[str, Any]]:
        slot, fields = self._slots.take(request.kv_scope, request.messages)
        try:
            yield fields
        finally:
            self._slots.release(slot)

    async def count(self, request: Request) -> int | None:
        """Counts the prompt as the server renders it; None if the server does not answer."""
        if has_media(request):
            return await self._count_by_answering(request)
        upstream = self.server.upstream
        body = openai_chat.write_request(_llama_request(request, self._options))
        status, reply = await upstream.request_json("POST", "/apply-template", body)
        if status != 200 or not isinstance(reply, dict):
            return None
        text = {"content": reply.get("prompt", ""), "add_special": True, "parse_special": True}
        status, reply = await upstream.request_json("POST", "/tokenize", msgspec.json.encode(text))
        tokens: Any = reply.get("tokens") if isinstance(reply, dict) else None
        return len(tokens) if status == 200 and isinstance(tokens, list) else None


INFILL: Endpoint = ("/infill", cast(WireProtocol, llama_infill))


def model_capabilities(options: LlamaServerOptions, header: Path | None = None) -> Capabilities:
    """llama-server embeds or ranks if it is started for that, and then does nothing else."""
    task, projector = server_task(options, header), options.llama_server_mmproj_path
    return replace(
        CAPABILITIES,
        generates=task == "chat",
        embeddings=task == "embedding",
        rerank=task == "reranking",
        infill=task == "chat",
        modalities=("text", *projector_kinds(Path(projector).expanduser())) if projector else ("text",),
    )


def chat_body(request: Request, options: LlamaServerOptions) -> bytes:
    """The body of /v1/chat/completions: OpenAI Chat with llama-server's extensions. It is always a stream with usage.
    `return_progress` keeps a long prefill from running into the timeout. A bare prompt has the same extensions."""
    if request.constraint is not None and request.constraint.kind in ("regex", "lark"):
        raise Unsupported(
            f"llama-server takes JSON schemas and GBNF grammars, not {request.constraint.kind}",
            code="structured_unsupported",
        )
    streamed = replace(_llama_request(request, options), n=1, stream=True, include_usage=True)
    if request.infill is not None:
        return llama_infill.write_request(streamed)
    fields: dict[str, Any] = {"return_progress": True}
    if request.timings == "all":
        fields["timings_per_token"] = True
    if request.sampling.repetition_penalty is not None:
        fields["repeat_penalty"] = request.sampling.repetition_penalty
    if request.reasoning.budget is not None:
        fields["thinking_budget_tokens"] = max(-1, request.reasoning.budget)
    written = (openai_completions if request.prompts else openai_chat).write_request(streamed)
    return append_fields(written, fields)


def _with_checked_media(request: Request) -> Request:
    def checked(part: Part) -> Any:
        if isinstance(part, ToolResult):
            return replace(part, content=tuple(checked(each) for each in part.content))
        if not isinstance(part, Image | Audio):
            return part
        data = base64.b64decode(part.url.partition(",")[2])
        if isinstance(part, Audio):
            checked_audio(data)
            return part
        readable = checked_image(data)
        return (
            part
            if readable is data
            else replace(part, url="data:image/png;base64," + base64.b64encode(readable).decode())
        )

    messages = (replace(message, parts=tuple(map(checked, message.parts))) for message in request.messages)
    return replace(request, messages=tuple(messages))


def _ends_with_reply(request: Request) -> bool:
    return bool(request.messages) and request.messages[-1].role == "assistant"


def _llama_request(request: Request, options: LlamaServerOptions) -> Request:
    is_closed = request.continue_final_message is False or request.add_generation_prompt is not None
    if is_closed and not request.continue_final_message and _ends_with_reply(request):
        raise Unsupported(
            "llama-server always continues an assistant message at the end; add a user message after it",
            param="messages",
        )
    sampling = replace(request.sampling, repetition_penalty=None, beam_size=None, min_tokens=None)
    return replace(server_request(request, enable_thinking=options.enable_thinking), sampling=sampling)
