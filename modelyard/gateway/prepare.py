"""From a request to a `PreparedRequest`: check capabilities → restore replayed turns → fetch images → render → tokenize
→ check the window → build the constraint. Needs no engine, and raises before a byte is sent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from modelyard.accounts.accounts import Accounts
from modelyard.core.engine import Capabilities, Engine
from modelyard.core.errors import InvalidRequest, Unsupported
from modelyard.core.limits import MAX_WARNINGS
from modelyard.core.protocol import INLINE_BYTES
from modelyard.core.request import Caller, Infill, Message, Request, Reservation, Text
from modelyard.gateway.constraints import Constrained, constrain
from modelyard.gateway.files import Files
from modelyard.gateway.lookup import ModelLookup
from modelyard.gateway.model import (
    Model,
    check_capabilities,
    media_kinds,
    require_place_for_images,
    without_tool_media,
)
from modelyard.gateway.prepared_request import (
    OutputBudget,
    PreparedRequest,
    RenderedPrompt,
    estimated_tokens,
    output_budget,
    priority,
)
from modelyard.gateway.replay_memory import ReplayMemory
from modelyard.gateway.request_work import RequestWork, end_of_stage
from modelyard.gateway.server_tools import ServerTools, offer_tools
from modelyard.mcp.servers import McpServers
from modelyard.prompt.images import Images
from modelyard.prompt.infill import infill_prompt
from modelyard.prompt.media import media_parts
from modelyard.prompt.translation import translated
from modelyard.protocols.common.openai_fields import DEFAULT_MODEL
from modelyard.router.router import Target
from modelyard.telemetry.metrics import Metrics
from modelyard.tokenizer.slices import OnProgress

log = logging.getLogger("modelyard.gateway")

# Larger inputs are handled in a thread, so that they do not block every stream. Each limit is 1 to 5 ms of work.
_INLINE_CHARS = 20_000  # of uncached text to tokenize
_INLINE_MESSAGES = 300  # messages and tools to render
_WARNING_CHARS = 500  # of a warning in the log
_UNLIMITED = 1 << 40  # tokens

Watch = Callable[[int], OnProgress]  # for a text of so many characters


class Preparer:
    def __init__(
        self,
        lookup: ModelLookup,
        images: Images,
        metrics: Metrics,
        accounts: Accounts,
        replay: ReplayMemory,
        files: Files | None,
        mcp: McpServers | None,
    ) -> None:
        self.images, self.metrics, self.mcp = images, metrics, mcp
        self._lookup, self._accounts, self._replay, self._files = lookup, accounts, replay, files

    async def prepare(
        self,
        request: Request,
        caller: Caller,
        target: Target,
        work: RequestWork | None = None,
        server_tools: ServerTools | None = None,
    ) -> PreparedRequest:
        """For this target, whatever the route says meanwhile. `server_tools` are those of an earlier round."""
        while (prepared := await self.attempt(request, caller, target, work, server_tools)) is None:
            pass
        return prepared

    async def attempt(
        self,
        request: Request,
        caller: Caller,
        target: Target,
        work: RequestWork | None = None,
        server_tools: ServerTools | None = None,
    ) -> PreparedRequest | None:
        """None: a reload has replaced the model meanwhile."""
        began, urgency = time.perf_counter(), caller.priority or priority(request)
        has_budget = self._accounts.check_budget(caller.key)
        target, model, engine = self._lookup.admit(target, request.model, caller, request.allow_remote)
        if request.model == DEFAULT_MODEL and target.why in ("default", "unnamed"):  # the reply says which one it is
            request = msgspec.structs.replace(request, model=target.model)
        if model.define is not None:
            model = await self._lookup.defined(model)
        has_server_tools = any(tool.kind == "server" for tool in request.tools)
        if self.mcp is not None and server_tools is None and (has_server_tools or target.mcp):
            request, server_tools = await self.offer(self.mcp, request, target, model, engine)
            began = time.perf_counter()
        request, capabilities = await self.adapt(request, caller, model, engine)
        if request.mixed_prompts or request.biased_texts:
            request = await (work or RequestWork(0, caller.deadline)).run(_with_token_ids, request, model)
        if request.infill is not None and model.kind == "chat":
            request = _with_tokens_around_gap(request, model, capabilities or model.capabilities, target.window)
        requested = request.max_tokens if request.max_tokens is not None else model.entry.max_tokens
        prompts: list[RenderedPrompt] = []
        for ids, text in await self.render(request, model, target.window, work or RequestWork(0, caller.deadline)):
            prompts.append(RenderedPrompt(ids, text, output_budget(len(ids), requested, target.window, target.strict)))
        if has_budget and caller.reservation is not None:
            most = requested or target.window
            request, prompts = await _within_budget(request, prompts, caller.reservation, model, most)
        constrained, warnings = Constrained(request.constraint), request.warnings
        if request.constraint is not None or request.tools:
            structured = capabilities is None or capabilities.structured
            make = partial(constrain, request, model, prompts[0].text if prompts else "", structured=structured)
            constrained = make() if work is None or work.size <= INLINE_BYTES else await work.run(make)
            not_enforced = [f"not_enforced: {path}" for path in constrained.not_enforced]
            warnings = (*warnings, *constrained.warnings, *not_enforced)
        if has_server_tools:
            warnings = (*warnings, *_omitted_tools(request, model))
        held = self._lookup.models.get(model.name)
        if prompts and held is not None and held.text is not model.text:
            return None  # the tokens may be of another vocabulary than that of the engine that would get them
        if warnings:
            self._report(warnings)
        reasoning = None
        if request.reasoning.budget is not None and prompts and model.kind == "text":
            reasoning = model.pipeline.reasoning_budget(request, prompts[0].text)
        return PreparedRequest(
            request=request,
            caller=caller,
            target=target,
            model=model,
            prompts=tuple(prompts),
            sampling=model.sampling_for(request),
            constraint=constrained.constraint,
            not_enforced=tuple(constrained.not_enforced),
            created=int(time.time()),
            tokenize_s=time.perf_counter() - began,
            capabilities=capabilities,
            priority=urgency,
            reasoning=reasoning,
            server_tools=server_tools,
            ignored=_ignored(warnings) if warnings else (),
        )

    async def offer(
        self, mcp: McpServers, request: Request, target: Target, model: Model, engine: Engine | None
    ) -> tuple[Request, ServerTools | None]:
        """With the tools of the servers that the request names, and of its route if the model can call tools."""
        if not mcp.settings.is_on and (not request.tools or any(tool.server is not None for tool in request.tools)):
            return request, None  # refused by `_omitted_tools`, or passed on
        can = self._lookup.effective(model, engine)
        return await offer_tools(mcp, request, target.mcp if can.tools else (), forwards=model.kind == "chat")

    async def adapt(
        self, request: Request, caller: Caller, model: Model, engine: Engine | None
    ) -> tuple[Request, Capabilities | None]:
        """The request as this model takes it, and the engine's capabilities (None: not loaded). Raise if it cannot."""
        capabilities = None if engine is None else engine.info.capabilities
        effective = self._lookup.capabilities.effective(model, capabilities)
        if effective.generates and not model.talks and not request.prompts:
            request = _as_bare_prompt(request, model)
        if model.settings.system_prompt is not None or model.settings.lora_adapter is not None:
            request = _with_defaults(request, model)
        if not self._replay.is_empty:
            request = await self._replay.restore(request, caller.key)
        if request.tools or request.tool_choice.mode != "auto":
            request = _with_tool_choice(request)
        media = media_kinds(request)
        if media:
            if self._files is not None:
                request = await self._files.inline(request, caller, is_remote=model.remote)
                media = media_kinds(request)
            request = await self._adapt_media(request, media, model, effective)
            media = media_kinds(request)
        if media and request.prompts and model.kind == "chat":
            message = "multimodal_data: this model takes images and audio in messages of /v1/chat/completions only"
            raise Unsupported(message, param="prompt")
        check_capabilities(request, effective, model.name, media=media)
        if request.post_sampling and not effective.post_sampling:
            raise Unsupported("post_sampling_probs: the engine of this model has none", param="post_sampling_probs")
        if model.translates:
            request = translated(request)
        if media:
            request = await self.images.inline(request)
        return request, capabilities

    async def _adapt_media(
        self, request: Request, media: frozenset[str], model: Model, effective: Capabilities
    ) -> Request:
        """With the pages of documents, or only their text. Media of tools that the model does not take become notes."""
        sees = "image" in effective.modalities
        if "document" in media:
            request = await self.images.expand_documents(request, with_images=sees)
        request = without_tool_media(request, effective.modalities)
        if sees and model.kind == "text" and model.fault is None:
            require_place_for_images(model)
        return request

    async def render(
        self, request: Request, model: Model, window: int | None, work: RequestWork, *, counts_media: bool = False
    ) -> Sequence[tuple[list[int], str]]:
        """Each prompt's token ids and text. Empty for an engine that renders by itself, unless its tokenizer is known
        and the prompt is text only, or its media are counted, too. A long prompt is given up once it exceeds the
        window."""
        if model.kind != "text":
            is_unknown = model.text is None or model.text.renderer.missing is not None or bool(request.prompts)
            if is_unknown or (not counts_media and media_kinds(request)):
                return ()
        renderer = model.pipeline.renderer
        if request.prompts:
            if sum(map(len, request.prompts)) + _infill_chars(request.infill) <= inline_chars(model):
                return _encode_raw(request, model, window)
            return await work.run(_encode_raw, request, model, window, partial(work.watch_window, window=window))
        is_large = work.size > INLINE_BYTES
        is_long = is_large or len(request.messages) + len(request.tools) > _INLINE_MESSAGES
        text = None if is_long else renderer.quick_text(request)
        if text is None:
            text = await work.run(renderer.text, request)
        inline = inline_chars(model)
        if is_large or (len(text) > inline and renderer.fresh(text) > inline):
            return [(await work.run(renderer.tokens, text, work.watch_window(len(text), window)), text)]
        await end_of_stage()  # render
        ids = renderer.tokens(text)
        await end_of_stage()  # tokenize
        return [(ids, text)]

    def _report(self, warnings: Sequence[str]) -> None:
        for warning in warnings[:MAX_WARNINGS]:
            kind = warning.partition(":")[0]  # the rest is the client's text
            self.metrics.warnings.add((kind if kind.isidentifier() else "other",))
            log.info("request: %s", warning[:_WARNING_CHARS])
        if len(warnings) > MAX_WARNINGS:
            log.info("request: %d more warnings", len(warnings) - MAX_WARNINGS)


async def _within_budget(
    request: Request, prompts: list[RenderedPrompt], reservation: Reservation, model: Model, most: int
) -> tuple[Request, list[RenderedPrompt]]:
    """With no more output than the budget of the key has left. `most` is what a server that renders by itself may
    write."""
    wanted = max((prompt.budget.max_tokens for prompt in prompts), default=most)
    tokens = sum(len(prompt.ids) for prompt in prompts) if prompts else estimated_tokens(request)
    choices = (len(prompts) or len(request.prompts) or 1) * request.n
    allowed = await reservation.hold(model.name, tokens, wanted, choices)
    if allowed >= wanted:
        return request, prompts
    budget = OutputBudget(allowed, "max_tokens")
    cut = [p if p.budget.max_tokens <= allowed else msgspec.structs.replace(p, budget=budget) for p in prompts]
    return msgspec.structs.replace(request, max_tokens=min(allowed, request.max_tokens or allowed)), cut


def inline_chars(model: Model) -> int:
    """What is tokenized on the event loop: nothing, if the tokenizer's pattern may take long for a short text."""
    return _INLINE_CHARS if getattr(model.pipeline.tokenizer, "is_linear", True) else 0


def _omitted_tools(request: Request, model: Model) -> Sequence[str]:
    """Tools that run on a provider's servers: agents send them unasked, so they are accepted and not offered. Nobody
    sends an MCP server unasked."""
    if model.kind != "text":
        return ()  # another server may have them
    if any(tool.server is not None for tool in request.tools):
        raise Unsupported(
            "MCP servers are off here: list them in the configuration ([mcp.servers]), or leave them out",
            code="mcp_off",
            param="mcp_servers",
        )
    return [f"tool_left_out: {t.type or t.name} is not run here" for t in request.tools if t.kind == "server"]


_IGNORED = {"field_ignored": "", "block_dropped": "content.", "item_ignored": "input.", "tool_left_out": "tools."}


def _ignored(warnings: Sequence[str]) -> tuple[str, ...]:
    """The fields, blocks, items and tools without effect that warnings name, as the reply's header has them."""
    split = [warning.partition(":") for warning in warnings[:MAX_WARNINGS]]
    named = [_IGNORED[kind] + name.split()[0] for kind, _, name in split if kind in _IGNORED and name.strip()]
    return tuple(dict.fromkeys(named))


def _with_tool_choice(request: Request) -> Request:
    """`tool_choice: none` offers no tools: a model cannot call what it never saw."""
    choice = request.tool_choice
    if request.tools and choice.mode == "none":
        return msgspec.structs.replace(request, tools=())
    if choice.mode == "named" and not any(tool.name == choice.name for tool in request.tools):
        raise InvalidRequest(f"tool_choice names the tool {choice.name!r}, which is not in tools", param="tool_choice")
    return request


def _encode_raw(
    request: Request, model: Model, window: int | None, watch: Watch | None = None
) -> list[tuple[list[int], str]]:
    """Prompts without a template, given as text or token ids."""
    renderer, tokenizer = model.pipeline.renderer, model.pipeline.tokenizer
    if request.infill is not None:
        gaps = [_encode_gap(request, str(prompt), request.infill, model, window) for prompt in request.prompts]
        return [(ids, tokenizer.decode(ids)) for ids in gaps]
    if request.messages and isinstance(prompt := request.prompts[0], str):
        text = renderer.raw_with_media(prompt, media_parts(request))
        return [(renderer.tokens(text, watch and watch(len(text))), text)]
    return [
        (renderer.raw(p, watch and watch(len(p))), p)
        if isinstance(p, str)
        else (checked_ids(p, model, "prompt"), tokenizer.decode(p))
        for p in request.prompts
    ]


def _with_token_ids(request: Request, model: Model) -> Request:
    """Texts among the token ids of a prompt, and those of `logit_bias`, become their tokens."""
    if model.text is None or model.kind == "chat":
        raise Unsupported("this model's tokens are not known here: send a text, and token ids in logit_bias")
    renderer, sampling = model.text.renderer, request.sampling
    prompts = tuple(_mixed_ids(mixed, renderer.raw, model.text.tokenizer.bos) for mixed in request.mixed_prompts)
    bias = dict(sampling.logit_bias or {})
    for text, value in request.biased_texts:
        bias |= dict.fromkeys(model.text.tokenizer.encode_plain(text), value)
    sampling = msgspec.structs.replace(sampling, logit_bias=bias or None)
    return msgspec.structs.replace(
        request, prompts=prompts or request.prompts, mixed_prompts=(), biased_texts=(), sampling=sampling
    )


def _mixed_ids(parts: Sequence[str | int], encode: Callable[[str], list[int]], bos: int | None) -> tuple[int, ...]:
    """Only a text at the beginning gets the token that begins a prompt."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        else:
            encoded = encode(part)
            ids += encoded[1:] if ids and encoded[:1] == [bos] else encoded
    return tuple(ids)


def _as_bare_prompt(request: Request, model: Model) -> Request:
    """For a model without a chat template: a text to continue, as Ollama reads it. Raises for a conversation."""
    parts = [part for message in request.messages for part in message.parts]
    texts = [part.text for part in parts if isinstance(part, Text)]
    if not request.is_text or len(texts) < len(parts) or request.messages[0].role == "system":
        model.pipeline.renderer.require_template()
    return msgspec.structs.replace(request, messages=(), prompts=("".join(texts),))


def _with_defaults(request: Request, model: Model) -> Request:
    """The model's system prompt and adapter, where the request has none. A bare prompt has no system prompt."""
    messages, prompt = request.messages, model.settings.system_prompt
    if prompt and messages and messages[0].role not in ("system", "developer"):
        messages = (Message("system", (Text(prompt),)), *messages)
    adapter = request.lora_adapter or model.settings.lora_adapter
    return msgspec.structs.replace(request, messages=messages, lora_adapter=adapter)


def _infill_chars(infill: Infill | None) -> int:
    if infill is None:
        return 0
    return len(infill.suffix) + len(infill.start) + sum(len(text) for file in infill.files or () for text in file)


def _encode_gap(request: Request, prompt: str, infill: Infill, model: Model, window: int | None) -> list[int]:
    """The prompt is cut so that the answer has room: an editor sends what is around the cursor, not what fits."""
    requested = request.max_tokens if request.max_tokens is not None else model.entry.max_tokens
    room = _UNLIMITED if window is None else window - min(requested or window // 4, window // 2)
    return infill_prompt(model.pipeline.tokenizer, prompt, infill, room=room, suffix_first=model.settings.spm_infill)


def _with_tokens_around_gap(request: Request, model: Model, can: Capabilities | None, window: int) -> Request:
    """For a server that takes bare prompts and no suffix, as vLLM does: the prompt is built here, if its tokenizer is
    here."""
    if request.infill is None or model.text is None or model.text.tokenizer.fim is None or (can and can.infill):
        return request
    gaps = [tuple(_encode_gap(request, str(prompt), request.infill, model, window)) for prompt in request.prompts]
    return msgspec.structs.replace(request, prompts=tuple(gaps), infill=None)


def checked_ids(ids: Sequence[int], model: Model, param: str) -> list[int]:
    """A client's own token ids. The engine would read an unknown one from beyond its tables."""
    if (highest := max(ids)) >= (size := model.pipeline.tokenizer.size):
        raise InvalidRequest(f"{param}: {highest} is not a token of this model (0 to {size - 1})", param=param)
    return list(ids)
