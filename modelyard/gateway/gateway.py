"""READ FIRST. The life of a request, from top to bottom:

    Gateway.read          bytes → Request; `previous_response_id` and `conversation` are resolved
    Gateway.prepare       resolve the route → check capabilities → restore replayed turns → fetch images
                          → render → tokenize → check the window → build the constraint
    Gateway.start         join an identical running request, or take a place in the queue
    ToolRounds            generate, call tools of MCP servers, generate …       (only if there are such tools)
    ChoiceStream          wait for the lease → start the engine → pass its output on, batch by batch
    TextOutput            token ids → detokenize → scan → events        (an engine that generates tokens)
    ChatOutput            events → events                               (an engine that speaks a chat protocol)

`http` reads the body, calls the first three and iterates over the stream; the protocol writes its events.
`read` and `prepare` need no engine and raise before a byte is sent. Every stream ends in one Finished or Failed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
import types
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from modelyard.accounts.accounts import Accounts
from modelyard.accounts.keys import may_use
from modelyard.core.engine import (
    Accepted,
    Capabilities,
    Chunk,
    EmbeddingEngine,
    Embeddings,
    End,
    Engine,
    ForwardingEngine,
    Generation,
    MediaEngine,
    Progress,
    Prompt,
    Ranking,
    TextEngine,
    TokenRun,
    Tokens,
)
from modelyard.core.errors import (
    ENGINE_DIED,
    Cancelled,
    ContextOverflow,
    Forbidden,
    Incomplete,
    Internal,
    InvalidRequest,
    ModelyardError,
    Timeout,
    TooLarge,
    Unavailable,
    Unimplemented,
    Unsupported,
)
from modelyard.core.events import (
    BlockDelta,
    BlockEnd,
    BlockStart,
    CacheReuse,
    Event,
    Failed,
    Finished,
    Measured,
    PromptRead,
    Reply,
    Started,
    StopReason,
    Timings,
    TokenLogprob,
    Usage,
)
from modelyard.core.limits import MAX_WARNINGS
from modelyard.core.pool import Lease, LeaseProvider, LeaseRequest, RequestSnapshot, Ticket
from modelyard.core.protocol import INLINE_BYTES, WireProtocol
from modelyard.core.request import (
    Caller,
    EmbeddingRequest,
    Infill,
    Message,
    Request,
    RerankRequest,
    Reservation,
    Text,
)
from modelyard.core.tokenizer import IdLogprob
from modelyard.gateway.cache_diagnostics import CacheDiagnostics, PromptRecord
from modelyard.gateway.choices import MultiChoiceStream
from modelyard.gateway.constraints import constrain
from modelyard.gateway.dedup import RequestDeduplicator, SharedReader
from modelyard.gateway.fallbacks import FallbackStream, prepare_first
from modelyard.gateway.files import Files
from modelyard.gateway.model import (
    VERBATIM,
    CapabilityCache,
    Model,
    check_capabilities,
    check_embeddings,
    check_rerank,
    ignored_parameters,
    require_place_for_images,
    without_tool_media,
)
from modelyard.gateway.prepared_request import (
    CHARS_PER_TOKEN,
    OutputBudget,
    PreparedRequest,
    RenderedPrompt,
    estimated_tokens,
    output_budget,
    priority,
)
from modelyard.gateway.replay_memory import ReplayMemory, as_message, generated_reply, text_before_calls
from modelyard.gateway.request_work import RequestWork
from modelyard.gateway.server_tools import ServerTools, offer_tools
from modelyard.gateway.stored_responses import StoredResponses
from modelyard.gateway.tool_rounds import ToolRounds
from modelyard.mcp.servers import McpServers
from modelyard.prompt.images import Images, request_media
from modelyard.prompt.infill import infill_prompt
from modelyard.prompt.media import media_kinds
from modelyard.prompt.translation import translated
from modelyard.router.router import Router, Target
from modelyard.scanner.scanner import Scanner
from modelyard.telemetry.history import History, RequestRecord
from modelyard.telemetry.metrics import Metrics
from modelyard.telemetry.request_capture import RequestCapture, current_capture
from modelyard.tokenizer.shield import unshield
from modelyard.tokenizer.slices import OnProgress, encode_long

log = logging.getLogger("modelyard.gateway")

_HISTORY_REQUESTS = 1000
# Larger inputs are handled in a thread, so that they do not block every stream. Each limit is 1 to 5 ms of work.
_INLINE_CHARS = 20_000  # of uncached text to tokenize
_INLINE_MESSAGES = 300  # messages and tools to render
_MAX_EARLIER = 32 << 20  # characters of stored turns that a request continues
_WARNING_CHARS = 500  # of a warning in the log
_UNLIMITED = 1 << 40  # tokens

R = TypeVar("R", EmbeddingRequest, RerankRequest)
Read = TypeVar("Read")

Watch = Callable[[int], OnProgress]  # for a text of so many characters


@types.coroutine
def end_of_stage() -> Generator[None, None, None]:
    """Let the requests that arrived at the same time reach this point, too.

    They then run stage by stage, each stage for all of them while its code and data are in the CPU's caches: 0.7 of the
    CPU time per request with 32 clients. The wait for an engine in another thread or process does the same.
    """
    yield  # as `asyncio.sleep(0)`


class Gateway:
    def __init__(
        self,
        *,
        router: Router,
        models: Mapping[str, Model],
        leases: LeaseProvider,
        images: Images,
        metrics: Metrics,
        history: History | None = None,
        replay: ReplayMemory | None = None,
        stored: StoredResponses | None = None,
        files: Files | None = None,
        mcp: McpServers | None = None,
        accounts: Accounts | None = None,
    ) -> None:
        self.accounts = accounts or Accounts()
        self.router, self.models, self.leases, self.images, self.metrics = router, models, leases, images, metrics
        self.history = history or History(_HISTORY_REQUESTS)
        self.capabilities = CapabilityCache()
        self.stored, self.files, self.mcp = stored, files, mcp
        self.draining = False  # the server is ending: it lets requests finish and takes no new ones
        self._diagnostics = CacheDiagnostics()
        self._replay = replay or ReplayMemory()
        self._dedup = RequestDeduplicator()
        self._streams: set[ChoiceStream | MultiChoiceStream] = set()
        self._rounds: set[ToolRounds] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._defining: dict[str, asyncio.Future[Model]] = {}
        self.newest_start: dict[int, float] = {}  # when the last request of an engine started, by the engine's `id`

    # --- read, prepare, start -------------------------------------------------------------------------------------

    async def read(
        self,
        protocol: WireProtocol,
        body: bytes,
        headers: Mapping[str, str],
        key: str,
        work: RequestWork | None = None,
        stored: StoredResponses | None = None,
    ) -> Request:
        """`work` can be cancelled, here and in the next steps, if the request is large. `stored` are the responses that
        the request may continue, if they are not the gateway's."""
        if len(body) > INLINE_BYTES:
            request = await (work or RequestWork()).run(protocol.read_request, body, headers)
        else:
            request = protocol.read_request(body, headers)
        continues = request.previous is not None or request.conversation is not None or request.has_references
        if not continues:
            return request
        if (stored := stored or self.stored) is None:
            raise Unsupported("responses are not stored here: send the whole conversation as input", param="input")
        request = await stored.resume(request, key)
        size = estimated_tokens(request) * CHARS_PER_TOKEN - len(body)
        if size > _MAX_EARLIER:
            raise TooLarge(f"the stored turns of this conversation have {size} characters; at most {_MAX_EARLIER} fit")
        if work is not None and work.reservation is not None:
            work.reservation.grow(max(0, size))
        return request

    async def prepare(
        self,
        request: Request,
        caller: Caller,
        work: RequestWork | None = None,
        server_tools: ServerTools | None = None,
        target: Target | None = None,
    ) -> PreparedRequest:
        """`server_tools` are those of an earlier round of the request. `target` is that of an earlier round, or one of
        several models of a route."""
        given = (request, server_tools, target)
        began, urgency = time.perf_counter(), caller.priority or priority(request)
        self.accounts.check_budget(caller.key)
        if target is None and (target := self.router.resolve(request.model, caller.endpoint)).fallbacks:
            return await prepare_first(self, request, caller, work, target)
        target, model, engine = self._admit(target, request.model, caller, request.allow_remote)
        if model.define is not None:
            model = await self._defined(model)
        if self.mcp is not None and server_tools is None:
            request, server_tools = await self._offer(self.mcp, request, target, model, engine)
            began = time.perf_counter()
        request, capabilities = await self._adapt(request, caller, model, engine)
        if request.infill is not None and model.kind == "chat":
            request = _with_tokens_around_gap(request, model, capabilities or model.capabilities, target.window)
        requested = request.max_tokens if request.max_tokens is not None else model.max_tokens
        prompts: list[RenderedPrompt] = []
        for ids, text in await self._render(request, model, target.window, work or RequestWork(0, caller.deadline)):
            prompts.append(RenderedPrompt(ids, text, output_budget(len(ids), requested, target.window, target.strict)))
        if caller.reservation is not None:
            request, prompts = _within_budget(request, prompts, caller.reservation, model, requested or target.window)
        constraint, warnings = request.constraint, request.warnings
        if constraint is not None or request.tools:
            structured = capabilities is None or capabilities.structured
            make = partial(constrain, request, model, prompts[0].text if prompts else "", structured=structured)
            constraint, dropped = make() if work is None or work.size <= INLINE_BYTES else await work.run(make)
            warnings = (*warnings, *dropped, *_omitted_tools(request, model))
        if prompts and self._is_replaced(model):
            request, server_tools, target = given
            return await self.prepare(request, caller, work, server_tools, target)
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
            constraint=constraint,
            created=int(time.time()),
            tokenize_s=time.perf_counter() - began,
            capabilities=capabilities,
            priority=urgency,
            reasoning=reasoning,
            server_tools=server_tools,
        )

    def start(self, prepared: PreparedRequest, capture: RequestCapture | None = None) -> EventSource:
        """Raise at once where waiting would be in vain: a full queue, a rate limit, a model that is not loaded."""
        if prepared.plan is not None:
            return FallbackStream(prepared, prepared.plan, self, capture)
        if prepared.server_tools is None:
            return self.generate(prepared, capture)
        rounds = ToolRounds(prepared, prepared.server_tools, self, capture)
        self._rounds.add(rounds)
        return rounds

    def generate(
        self, prepared: PreparedRequest, capture: RequestCapture | None = None
    ) -> ChoiceStream | MultiChoiceStream | SharedReader:
        """One generation, without the calls of servers' tools."""
        if capture is not None and prepared.model.kind == "text":
            capture.prompt("\n\n".join(unshield(prompt.text) for prompt in prepared.prompts))
        is_shareable = prepared.is_shareable()
        if is_shareable and (shared := self._dedup.find(prepared)) is not None:
            self.metrics.request_joined(prepared.model.name)
            self.accounts.add(prepared.caller.key, prepared.model.name, Usage())
            return shared
        ticket = self.leases.request(prepared.lease_request())
        if not ticket.granted:
            self.history.add_queue_length(time.time(), ticket.position)
        stream: ChoiceStream | MultiChoiceStream
        if prepared.choices == 1:
            stream = ChoiceStream(prepared, 0, ticket, self, capture)
        else:

            def open_choice(choice: int, part: Ticket) -> ChoiceStream:
                return ChoiceStream(prepared, choice, part, self, capture, retry=False)

            stream = MultiChoiceStream(prepared, ticket, open_choice, self.forget)
        self._streams.add(stream)
        return self._dedup.share(stream) if is_shareable else stream

    async def load(self, request: Request, caller: Caller) -> Reply:
        """An empty reply when the model is loaded, as any request would load it. With `keep_alive` 0 a loaded model is
        unloaded as soon as it is idle."""
        target, _, engine = self._resolve(request.model, caller, request.allow_remote)
        if engine is not None or request.keep_alive != 0:
            ticket = self.leases.request(
                LeaseRequest(
                    model=target.model,
                    cache=target.cache,
                    key=caller.key,
                    deadline=caller.deadline,
                    trace=caller.trace,
                    keep_alive=request.keep_alive,
                )
            )
            try:
                await ticket.lease()
            finally:
                ticket.cancel()
        return Reply(Started(caller.trace, request.model, int(time.time())), (), Finished("end", Usage()))

    def has_window(self, model: str) -> bool:
        """Whether its window is known: that of a remote model may not be set, and the default says nothing about it."""
        entry = self.router.catalog.models.get(model)
        return entry is None or entry.has_window or not self.models[model].remote

    # --- the steps of prepare -------------------------------------------------------------------------------------

    def _resolve(self, name: str, caller: Caller, consent: bool = False) -> tuple[Target, Model, Engine | None]:
        """The route's target, its model, and the model's engine if it is loaded."""
        return self._admit(self.router.resolve(name, caller.endpoint), name, caller, consent)

    def _admit(self, target: Target, name: str, caller: Caller, consent: bool) -> tuple[Target, Model, Engine | None]:
        if caller.allowed and not may_use(caller.allowed, target.model, target.cache, target.route):
            raise _not_allowed(name, caller)
        model = self.models.get(target.model)
        if model is None:  # resolved before a reload
            raise Unavailable(f"the model {target.model!r} is no longer configured", code="model_gone")
        if model.remote and not _may_leave(caller, target, consent):
            raise _remote_not_allowed(name, caller)
        engine = self.leases.engine(target.model)
        return _with_loaded_window(target, engine), model, engine

    def _is_replaced(self, model: Model) -> bool:
        """Whether a reload has replaced the model while a request was rendered: the tokens may be of another vocabulary
        than that of the engine that would get them."""
        held = self.models.get(model.name)
        return held is not None and held.text is not model.text

    async def _defined(self, model: Model) -> Model:
        """A model of the library is defined at its first request: reading all of them would delay the start."""
        name, define = model.name, model.define
        if define is None:
            return model
        if (work := self._defining.get(name)) is None:
            work = self._defining[name] = asyncio.ensure_future(asyncio.to_thread(define))
            work.add_done_callback(lambda _: self._defining.pop(name, None))
        defined = await asyncio.shield(work)
        if self.models.get(name) is model:  # otherwise the configuration was reloaded meanwhile
            self.models = {**self.models, name: defined}
        return defined

    async def _offer(
        self, mcp: McpServers, request: Request, target: Target, model: Model, engine: Engine | None
    ) -> tuple[Request, ServerTools | None]:
        """With the tools of the servers that the request names, and of its route if the model can call tools."""
        can = self.capabilities.effective(model, None if engine is None else engine.info.capabilities)
        return await offer_tools(mcp, request, target.mcp if can.tools else (), forwards=model.kind == "chat")

    async def _adapt(
        self, request: Request, caller: Caller, model: Model, engine: Engine | None
    ) -> tuple[Request, Capabilities | None]:
        """The request as this model takes it, and the engine's capabilities (None: not loaded). Raise if it cannot."""
        capabilities = None if engine is None else engine.info.capabilities
        effective = self.capabilities.effective(model, capabilities)
        if effective.generates and not model.talks and not request.prompts:
            request = _as_bare_prompt(request, model)
        if model.system_prompt is not None or model.lora_adapter is not None:
            request = _with_defaults(request, model)
        if not self._replay.is_empty:
            request = await self._replay.restore(request, caller.key)
        if request.tools or request.tool_choice.mode != "auto":
            request = _with_tool_choice(request)
        media = media_kinds(request)
        if media:
            if self.files is not None:
                request = await self.files.inline(request, caller, is_remote=model.remote)
                media = media_kinds(request)
            request = await self._adapt_media(request, media, model, effective)
            media = media_kinds(request)
        check_capabilities(request, effective, model.name, media=media)
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

    async def _render(
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
            if sum(map(len, request.prompts)) + _infill_chars(request.infill) <= _inline_chars(model):
                return _encode_raw(request, model, window)
            return await work.run(_encode_raw, request, model, window, partial(work.watch_window, window=window))
        is_large = work.size > INLINE_BYTES
        is_long = is_large or len(request.messages) + len(request.tools) > _INLINE_MESSAGES
        text = None if is_long else renderer.quick_text(request)
        if text is None:
            text = await work.run(renderer.text, request)
        inline = _inline_chars(model)
        if is_large or (len(text) > inline and renderer.fresh(text) > inline):
            return [(await work.run(renderer.tokens, text, work.watch_window(len(text), window)), text)]
        await end_of_stage()  # render
        ids = renderer.tokens(text)
        await end_of_stage()  # tokenize
        return [(ids, text)]

    def _report(self, warnings: Sequence[str]) -> None:
        for warning in warnings[:MAX_WARNINGS]:
            kind = warning.partition(":")[0]  # the rest is the client's text
            self.metrics.warned(kind if kind.isidentifier() else "other")
            log.info("request: %s", warning[:_WARNING_CHARS])
        if len(warnings) > MAX_WARNINGS:
            log.info("request: %d more warnings", len(warnings) - MAX_WARNINGS)

    # --- called by the streams ------------------------------------------------------------------------------------

    def on_accepted(self, stream: ChoiceStream, accepted: Accepted, engine: Engine) -> None:
        """The engine has placed the prompt: record how much of it its cache had, and why not more."""
        stream.accepted, prepared = accepted, stream.prepared
        if stream.choice != 0:
            return
        if (change := self._diagnostics.system_prompt_change(prepared, accepted)) is not None:
            self.metrics.system_prompt_changed(prepared.target.cache)
            log.warning("%s", change)
        if (found := self._diagnostics.reuse(prepared, accepted, engine.info.page)) is not None:
            stream.reuse, stream.prompt_record = found
            self.metrics.cache_lookup(prepared.target.cache, found[0])

    def remember(self, stream: ChoiceStream, usage: Usage) -> None:
        """Keep the generated tokens and calls: the next prompt of this session begins with them."""
        prepared, ids = stream.prepared, stream.output.ids
        if ids and prepared.prompts:
            prepared.model.pipeline.renderer.learn(prepared.prompts[0].ids, ids)
        reply = generated_reply(prepared, stream.events, ids, usage)
        if reply is None:
            return
        if stream.prompt_record is not None:
            stream.prompt_record.reply = as_message(reply)
        kept = self._replay.keep(reply, prepared.caller.key, text_before_calls(prepared, reply, ids))
        if kept:
            self.run_in_background(self._replay.share(kept, prepared.caller.key))

    def forget(self, stream: ChoiceStream | MultiChoiceStream) -> None:
        self._streams.discard(stream)

    def forget_rounds(self, rounds: ToolRounds) -> None:
        self._rounds.discard(rounds)

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that outlives its request. The reference keeps the task from being garbage-collected."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)

    # --- requests that generate nothing ---------------------------------------------------------------------------

    async def count(self, request: Request, caller: Caller, work: RequestWork | None = None) -> int:
        """Prompt tokens, by the same steps as `prepare`. It does not queue and needs no loaded model."""
        target, model, engine = self._resolve(request.model, caller, request.allow_remote)
        if model.define is not None:
            model = await self._defined(model)
        if self.mcp is not None:
            request, _ = await self._offer(self.mcp, request, target, model, engine)
        request, _ = await self._adapt(request, caller, model, engine)
        work = work or RequestWork(0, caller.deadline)
        counts_media = model.count_media is not None and engine is None
        if rendered := await self._render(request, model, None, work, counts_media=counts_media):
            count = sum(len(ids) for ids, _ in rendered)
            has_media = bool(media_kinds(request))
            return count + await self._count_media(request, rendered[0][0], model, engine) if has_media else count
        counted = None if engine is None or isinstance(engine, TextEngine) else await engine.count(request)
        if counted is None:
            raise Unimplemented(f"the engine of {model.name!r} cannot count tokens")
        return counted

    async def _count_media(self, request: Request, ids: list[int], model: Model, engine: Engine | None) -> int:
        """The tokens of a request's images and audio, by its engine if it is loaded, else by its files. Some engines
        tell only with an answer; the prompt is in their cache then."""
        media = request_media(request)
        counter: object = engine
        if isinstance(counter, MediaEngine):
            return sum(await counter.count_media(media))
        if model.count_media is not None:
            return sum(await asyncio.to_thread(model.count_media, media))
        if not isinstance(engine, TextEngine):
            raise Unimplemented(f"the tokens of images can be counted once {model.name!r} is loaded")
        usage = Usage()
        async for chunks in engine.generate(Prompt(parts=(TokenRun(ids), *media))):
            if isinstance(last := chunks[-1], End):
                usage = last.usage
                if last.error is not None:
                    raise last.error
        return usage.prompt - len(ids)

    async def embed(self, request: EmbeddingRequest, caller: Caller, work: RequestWork | None = None) -> Embeddings:
        target, model, can = await self._resolve_reader(request.model, caller)
        check_embeddings(can, model.name)
        chars = sum(map(len, request.inputs))
        batch = await self._encode(_encode_inputs, request, target, model, chars, caller, work, request.truncate)

        async def read(engine: Engine) -> Embeddings:
            if isinstance(engine, EmbeddingEngine):
                return await engine.embed(batch)
            if isinstance(engine, ForwardingEngine):
                return await engine.embed_inputs(request)
            raise Unsupported(f"the model {model.name!r} makes no embeddings", code="embeddings_unsupported")

        return await self._read_inputs(read, target, caller, batch, lambda made: made.prompt_tokens, request.keep_alive)

    async def rerank(self, request: RerankRequest, caller: Caller, work: RequestWork | None = None) -> Ranking:
        """The documents, the most relevant first."""
        target, model, can = await self._resolve_reader(request.model, caller)
        check_rerank(can, model.name)
        chars = sum(map(len, request.documents)) + len(request.query) * len(request.documents)
        batch = await self._encode(_encode_pairs, request, target, model, chars, caller, work)

        async def read(engine: Engine) -> Ranking:
            if isinstance(engine, EmbeddingEngine):
                made = await engine.embed(batch)
                return Ranking([(at, vector[0]) for at, vector in enumerate(made.vectors)], made.prompt_tokens)
            if isinstance(engine, ForwardingEngine):
                return await engine.rerank(request)
            raise Unsupported(f"the model {model.name!r} ranks no documents", code="rerank_unsupported")

        found = await self._read_inputs(read, target, caller, batch, lambda made: made.prompt_tokens)
        best = sorted(found.scores, key=lambda scored: -scored[1])
        return Ranking(best[: request.top_n], found.prompt_tokens)

    async def _resolve_reader(self, name: str, caller: Caller) -> tuple[Target, Model, Capabilities]:
        """As `_resolve`, with what the model can do."""
        self.accounts.check_budget(caller.key)
        target, model, engine = self._resolve(name, caller)
        if model.define is not None:
            model = await self._defined(model)
        if model.fault is not None:
            raise model.failed()
        loaded = None if engine is None else engine.info.capabilities
        return target, model, self.capabilities.effective(model, loaded)

    async def _encode(
        self,
        encode: Callable[[R, Model, Watch | None], list[list[int]]],
        request: R,
        target: Target,
        model: Model,
        chars: int,
        caller: Caller,
        work: RequestWork | None,
        truncate: bool = False,
    ) -> list[list[int]]:
        """The token ids of each input, all of which fit the window. Empty if only the engine has the tokenizer.
        `truncate` cuts a longer one before its last token, which may be the mark of its end."""
        if model.kind != "text" and model.text is None:
            return []
        if chars > _inline_chars(model):
            work = work or RequestWork(0, caller.deadline)
            window = None if truncate else target.window
            batch = await work.run(encode, request, model, partial(work.watch_window, window=window))
        else:
            batch = encode(request, model, None)
        if truncate:
            batch = [ids if len(ids) <= target.window else ids[: target.window - 1] + ids[-1:] for ids in batch]
        if (longest := max(map(len, batch))) > target.window:
            raise ContextOverflow(longest, target.window)
        return batch

    async def _read_inputs(
        self,
        read: Callable[[Engine], Awaitable[Read]],
        target: Target,
        caller: Caller,
        batch: Sequence[Sequence[int]],
        count: Callable[[Read], int],
        keep_alive: float | None = None,
    ) -> Read:
        """Wait for a slot, let the engine read the inputs, and record what it took."""
        lease_request = LeaseRequest(
            model=target.model,
            cache=target.cache,
            tokens=sum(map(len, batch)),
            key=caller.key,
            priority=caller.priority or "main",
            deadline=caller.deadline,
            trace=caller.trace,
            keep_alive=keep_alive,
        )
        if caller.reservation is not None:
            caller.reservation.hold(target.model, lease_request.tokens, 0)
        began, queued = time.perf_counter(), 0.0
        ticket = self.leases.request(lease_request)
        status, usage, failed = "end", Usage(), True
        try:
            lease = await ticket.lease()
            queued = time.perf_counter() - began
            async with asyncio.timeout(_seconds_left(caller.deadline)):
                made = await read(lease.engine)
            usage, failed = Usage(count(made)), False
            self.metrics.inputs_read(target.model, usage)
            return made
        except ModelyardError as error:
            status = error.code or error.kind
            raise
        except TimeoutError:
            status = Timeout.default_code or ""
            raise Timeout("the request was not finished in the time that the client allows") from None
        except asyncio.CancelledError:
            status = "cancelled"
            raise
        finally:
            ticket.cancel()
            timings = Timings(queue=queued, total=time.perf_counter() - (caller.arrived or began))
            cost = self.accounts.add(caller.key, target.model, usage, failed=failed)
            self.history.add(
                RequestRecord(
                    trace=caller.trace,
                    model=target.model,
                    cache=target.cache,
                    endpoint=caller.endpoint,
                    key=caller.key,
                    at=time.time(),
                    status=status,
                    failed=failed,
                    usage=usage,
                    timings=timings,
                    cost=cost,
                )
            )

    def target(self, name: str, endpoint: str) -> Target:
        """Where requests for this name go, with the window that the cache was loaded with."""
        target = self.router.resolve(name, endpoint)
        return _with_loaded_window(target, self.leases.engine(target.model))

    def names(self, allowed: tuple[str, ...], endpoint: str) -> Sequence[str]:
        """The public names of models that a key with these `allowed` may use."""
        names = self.router.names()
        if not allowed:
            return names
        targets = {name: self.router.resolve(name, endpoint) for name in names}
        return [name for name, at in targets.items() if may_use(allowed, at.model, at.cache, at.route)]

    def visible_models(self, allowed: tuple[str, ...]) -> Collection[str]:
        """The models that a key with these `allowed` may know of."""
        if not allowed:
            return self.leases.status().keys()
        return {self.router.resolve(name, "").model for name in self.names(allowed, "")}

    def model_for(self, name: str, caller: Caller) -> tuple[Target, Model]:
        return self._resolve(name, caller)[:2]

    async def defined_model(self, name: str, caller: Caller) -> tuple[Target, Model]:
        """With its tokenizer and template."""
        target, model = self.model_for(name, caller)
        return target, await self._defined(model)

    # --- running requests -----------------------------------------------------------------------------------------

    def running(self) -> dict[str, RunningRequest]:
        """The streams of this process by trace, with their counts so far."""
        running = {stream.prepared.caller.trace: _running(stream) for stream in self._streams}
        for rounds in self._rounds:
            caller, usage, tools = rounds.prepared.caller, rounds.usage, rounds.running_tools
            if tools or caller.trace not in running:
                running[caller.trace] = RunningRequest(
                    usage.prompt, usage.cached, usage.prompt, usage.output, caller.endpoint, tools
                )
        return running

    def calling_tools(self) -> list[RequestSnapshot]:
        """The requests whose tools run now: the pool does not know them, because they hold no slot meanwhile."""
        return [rounds.snapshot() for rounds in self._rounds if rounds.running_tools]

    def watch(self, trace: str) -> tuple[str, str] | None:
        """The prompt of a running request, and its raw output since the first call. None: it does not run here, or
        another server renders its prompt."""
        for stream in self._streams:
            if stream.prepared.caller.trace == trace:
                output = _first_choice(stream).output
                rendered = stream.prepared.rendered(0)
                if isinstance(output, TextOutput) and rendered is not None:
                    return unshield(rendered.text), output.watch()
        return None

    def cancel(self, trace: str, reason: ModelyardError) -> int:
        """Ends a request that shares the stream of another one or calls tools, and returns how many there were: the
        pool, which ends all others, does not know it."""
        calling = [rounds for rounds in self._rounds if rounds.running_tools and rounds.prepared.caller.trace == trace]
        for rounds in calling:
            rounds.cancel(reason)
        return int(self._dedup.cancel(trace, reason)) + len(calling)

    def end_requests(self, key: str, reason: ModelyardError) -> None:
        """All that this key has waiting or running here."""
        for stream in [one for one in (*self._rounds, *self._streams) if one.prepared.caller.key == key]:
            stream.cancel(reason)

    # --- the end --------------------------------------------------------------------------------------------------

    def stop(self, reason: ModelyardError) -> None:
        """End every stream that waits or runs; its client receives the reason."""
        for stream in (*self._rounds, *self._streams):
            stream.cancel(reason)

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.images.close()
        if self.mcp is not None:
            await self.mcp.close()


class RunningRequest(msgspec.Struct, frozen=True):
    """How far a request is: tokens of its prompt, how many were cached and how many are read by now, and its output.
    `tools` of MCP servers are running for it."""

    prompt: int
    cached: int
    read: int
    output: int
    endpoint: str
    tools: tuple[str, ...] = ()


def _running(stream: ChoiceStream | MultiChoiceStream) -> RunningRequest:
    output = _first_choice(stream).output
    usage, endpoint = output.usage, stream.prepared.caller.endpoint
    read = output.read if isinstance(output, TextOutput) and not output.tokens else usage.prompt
    return RunningRequest(usage.prompt, usage.cached, read, output.tokens, endpoint)


def _first_choice(stream: ChoiceStream | MultiChoiceStream) -> ChoiceStream:
    return stream if isinstance(stream, ChoiceStream) else stream.streams[0]


def _may_leave(caller: Caller, target: Target, consent: bool) -> bool:
    """Whether the request may be sent to another server. What a key may do is not the request's decision: its own
    consent counts only on a server without keys."""
    if caller.forbid_remote:
        return False
    return target.allow_remote or caller.allow_remote or (consent and not caller.key)


def _not_allowed(name: str, caller: Caller) -> Forbidden:
    return Forbidden(f"the key {caller.key!r} may not use the model {name!r}", code="model_not_allowed")


def _remote_not_allowed(name: str, caller: Caller) -> Forbidden:
    how = "send the header x-modelyard-allow-remote: true (in the pool dialect also the field allow_remote), or set"
    if caller.key:
        how = f"the key {caller.key!r} may not use it; the administrator can set"
    where = "your key" if caller.forbid_remote else "its route or your key" if caller.key else "its route"
    return Forbidden(
        f"the model {name!r} runs on a remote service; {how} allow_remote = true on {where}", code="remote_not_allowed"
    )


def _with_loaded_window(target: Target, engine: Engine | None) -> Target:
    """A load may have set another window than the configuration."""
    cache = engine.info.caches.get(target.cache) if engine is not None else None
    if cache is None or cache.window == target.window:
        return target
    return msgspec.structs.replace(target, window=cache.window)


def _within_budget(
    request: Request, prompts: list[RenderedPrompt], reservation: Reservation, model: Model, most: int
) -> tuple[Request, list[RenderedPrompt]]:
    """With no more output than the budget of the key has left. `most` is what a server that renders by itself may
    write."""
    wanted = max((prompt.budget.max_tokens for prompt in prompts), default=most)
    tokens = sum(len(prompt.ids) for prompt in prompts) if prompts else estimated_tokens(request)
    allowed = reservation.hold(model.name, tokens, wanted, (len(prompts) or len(request.prompts) or 1) * request.n)
    if allowed >= wanted:
        return request, prompts
    budget = OutputBudget(allowed, "max_tokens")
    cut = [p if p.budget.max_tokens <= allowed else msgspec.structs.replace(p, budget=budget) for p in prompts]
    return msgspec.structs.replace(request, max_tokens=min(allowed, request.max_tokens or allowed)), cut


def _inline_chars(model: Model) -> int:
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
    return [
        (renderer.raw(p, watch and watch(len(p))), p)
        if isinstance(p, str)
        else (_checked_ids(p, model, "prompt"), tokenizer.decode(p))
        for p in request.prompts
    ]


def _as_bare_prompt(request: Request, model: Model) -> Request:
    """For a model without a chat template: a text to continue, as Ollama reads it. Raises for a conversation."""
    parts = [part for message in request.messages for part in message.parts]
    texts = [part.text for part in parts if isinstance(part, Text)]
    if not request.is_text or len(texts) < len(parts) or request.messages[0].role == "system":
        model.pipeline.renderer.require_template()
    return msgspec.structs.replace(request, messages=(), prompts=("".join(texts),))


def _with_defaults(request: Request, model: Model) -> Request:
    """The model's system prompt and adapter, where the request has none. A bare prompt has no system prompt."""
    messages, prompt = request.messages, model.system_prompt
    if prompt and messages and messages[0].role not in ("system", "developer"):
        messages = (Message("system", (Text(prompt),)), *messages)
    adapter = request.lora_adapter or model.lora_adapter
    return msgspec.structs.replace(request, messages=messages, lora_adapter=adapter)


def _infill_chars(infill: Infill | None) -> int:
    if infill is None:
        return 0
    return len(infill.suffix) + len(infill.start) + sum(len(text) for file in infill.files or () for text in file)


def _encode_gap(request: Request, prompt: str, infill: Infill, model: Model, window: int | None) -> list[int]:
    """The prompt is cut so that the answer has room: an editor sends what is around the cursor, not what fits."""
    requested = request.max_tokens if request.max_tokens is not None else model.max_tokens
    room = _UNLIMITED if window is None else window - min(requested or window // 4, window // 2)
    return infill_prompt(model.pipeline.tokenizer, prompt, infill, room=room, suffix_first=model.spm_infill)


def _with_tokens_around_gap(request: Request, model: Model, can: Capabilities | None, window: int) -> Request:
    """For a server that takes bare prompts and no suffix, as vLLM does: the prompt is built here, if its tokenizer is
    here."""
    if request.infill is None or model.text is None or model.text.tokenizer.fim is None or (can and can.infill):
        return request
    gaps = [tuple(_encode_gap(request, str(prompt), request.infill, model, window)) for prompt in request.prompts]
    return msgspec.structs.replace(request, prompts=tuple(gaps), infill=None)


def _encode_inputs(request: EmbeddingRequest, model: Model, watch: Watch | None) -> list[list[int]]:
    """Texts with the tokens that the model expects around them; a client's own token ids as they are."""
    tokenizer = model.pipeline.tokenizer
    first, last = tokenizer.wrapping

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(text) if watch is None else encode_long(tokenizer, text, watch(len(text)))
        return [*first, *ids, *last]

    return [encode(i) if isinstance(i, str) else _checked_ids(i, model, "input") for i in request.inputs]


def _encode_pairs(request: RerankRequest, model: Model, watch: Watch | None) -> list[list[int]]:
    renderer, template = model.pipeline.renderer, model.pipeline.rerank_template
    batch: list[list[int]] = []
    for document in request.documents:
        batch.append(renderer.pair(request.query, document, template))
        if watch is not None:
            watch(len(document))(len(batch[-1]), len(document))  # raises if the client has left or it is too long
    return batch


def _seconds_left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _checked_ids(ids: Sequence[int], model: Model, param: str) -> list[int]:
    """A client's own token ids. The engine would read an unknown one from beyond its tables."""
    if (highest := max(ids)) >= (size := model.pipeline.tokenizer.size):
        raise InvalidRequest(f"{param}: {highest} is not a token of this model (0 to {size - 1})", param=param)
    return list(ids)


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


class ChoiceStream:
    """One reply while it runs: waits for its lease, starts the engine, passes events on, releases the lease.

    Iterating gives `(choice, events)` and ends after Finished or Failed. `cancel` may be called at any time on the
    event loop: in the queue, in prefill, in the stream; the reader then gets Failed. The reader calls `close` when it
    stops reading. The lease is released when the engine reports a free slot, which may be later: `_drain` waits for it.
    """

    __slots__ = (
        "_cancel_reason",
        "_cancelled",
        "_capture",
        "_closed",
        "_engine",
        "_engine_started",
        "_engine_was_lost",
        "_first_output",
        "_gateway",
        "_generation",
        "_last_output",
        "_lease",
        "_may_retry",
        "_started",
        "_ticket",
        "accepted",
        "choice",
        "events",
        "ignored",
        "output",
        "prepared",
        "prompt_record",
        "reuse",
    )

    def __init__(
        self,
        prepared: PreparedRequest,
        choice: int,
        ticket: Ticket,
        gateway: Gateway,
        capture: RequestCapture | None = None,
        *,
        retry: bool = True,
    ) -> None:
        self.prepared, self.choice = prepared, choice
        self._ticket, self._gateway, self._capture = ticket, gateway, capture
        self._lease: Lease | None = None
        self._engine: Any = None
        self._engine_was_lost = False  # before this request reached it
        self._generation: Generation[Any] | None = None
        self._may_retry = retry and not prepared.model.remote  # a remote engine retries by itself
        self._cancelled = self._closed = False
        self._cancel_reason: ModelyardError | None = None
        self.output: TextOutput | ChatOutput
        if prepared.model.kind == "chat":
            self.output = ChatOutput(prepared, choice)
        else:
            self.output = TextOutput(prepared, choice, new_call_id, capture.output if capture is not None else None)
        self.accepted: Accepted | None = None
        self.reuse: CacheReuse | None = None  # how much of the prompt the cache had
        self.prompt_record: PromptRecord | None = None  # where the diagnostics keep this prompt
        self.ignored: tuple[str, ...] = ()  # requested sampling parameters that the engine does not support
        keep_events = prepared.request.tools and choice == 0 and prepared.model.kind == "text"
        self.events: list[Event] | None = [] if keep_events else None
        self._started = time.perf_counter()
        self._engine_started: float | None = None
        self._first_output: float | None = None
        self._last_output = 0.0

    def __aiter__(self) -> ChoiceStream:
        return self

    async def __anext__(self) -> tuple[int, list[Event]]:
        output = self.output
        if output.over:
            raise StopAsyncIteration
        events: list[Event] = []
        while not events:
            try:
                if self._generation is None:
                    self._generation = self._start_engine(await self._ticket.lease())
                    if self.prepared.model.kind == "text":
                        await end_of_stage()  # start
                batch = await self._generation.__anext__()
                failure = batch[-1].error if isinstance(batch[-1], (End, Failed)) else None
                if failure is not None and self._should_retry(batch, failure):
                    self._retry()
                    continue
                if type(batch[0]) is Accepted:
                    self._gateway.on_accepted(self, batch[0], self._engine)
                before = output.tokens
                events = output.feed(batch)
                if output.tokens > before:
                    self._observe(output.tokens - before)
                if self.events is not None:
                    self.events += events
            except StopAsyncIteration:
                events = output.fail(Incomplete("the engine's stream ended without a final event"))
            except ModelyardError as error:
                events = output.fail(error)
            except Exception as error:
                log.exception("a stream failed")
                events = output.fail(Internal(f"{type(error).__name__} while generating"))
        if isinstance(last := events[-1], (Finished, Failed)):
            events[-1] = self._end(last)
        return self.choice, events

    def _start_engine(self, lease: Lease) -> Generation[Any]:
        self._lease = lease
        lease.on_revoke(self.cancel)
        self._engine_started = time.perf_counter()
        if self._may_retry:  # a second attempt is not the one that killed the engine of the first
            self._gateway.newest_start[id(lease.engine)] = self._engine_started
        prepared, gateway = self.prepared, self._gateway
        model, request = prepared.model, prepared.request
        gateway.metrics.queue_wait.observe(model.name, lease.waited)
        if self._cancelled:
            raise Cancelled("the client disconnected")
        engine: Any = lease.engine
        self._engine, self._engine_was_lost = engine, engine.lost.done()
        capabilities = engine.info.capabilities
        if capabilities is not prepared.capabilities and capabilities != prepared.capabilities:
            # The engine was loaded or replaced after `prepare`.
            effective = gateway.capabilities.effective(model, capabilities)
            check_capabilities(request, effective, model.name, media=media_kinds(request))
        if ignored := ignored_parameters(request, capabilities):
            self.ignored = ignored
            gateway.metrics.warned("parameter_ignored")
            log.info("request: the engine of %s ignores %s", model.name, ", ".join(ignored))
        # By the definition's kind: `isinstance` with a runtime-checkable Protocol is slow.
        started: Generation[Any]
        if model.kind == "text":
            started = engine.generate(prepared.engine_prompt(self.choice))
        elif self._capture is None:
            started = engine.chat(prepared.engine_request(self.choice))
        else:
            token = current_capture.set(self._capture)
            try:
                started = engine.chat(prepared.engine_request(self.choice))
            finally:
                current_capture.reset(token)
        return started

    def _observe(self, tokens: int) -> None:
        now, model, metrics = time.perf_counter(), self.prepared.model.name, self._gateway.metrics
        if self._first_output is None:
            self._first_output = now
            metrics.first_token.observe(model, now - self._started)
        else:
            metrics.inter_token.observe(model, (now - self._last_output) / tokens, tokens)
        self._last_output = now

    def _end(self, last: Finished | Failed) -> Finished | Failed:
        """Count the request, keep what its next turn needs, and add it to the history. Return the last event with the
        gateway's own times."""
        prepared, gateway, accepted = self.prepared, self._gateway, self.accepted
        request, caller, model = prepared.request, prepared.caller, prepared.model
        status: str
        measured = gateway_timings(
            last.timings if isinstance(last, Finished) else Timings(),
            now=time.perf_counter(),
            arrived=caller.arrived,
            started=self._started,
            engine_started=self._engine_started,
            first_output=self._first_output,
            queue_s=self._lease.waited if self._lease is not None else 0.0,
            tokenize_s=prepared.tokenize_s,
            remote=model.remote,
        )
        if isinstance(last, Finished):
            usage, status = last.usage, last.reason
            last = Finished(last.reason, usage, last.stop_string, measured)
            gateway.metrics.generation_finished(model.name, prepared.billed_usage(self.choice, usage), status)
            if self.choice == 0:
                if self.prompt_record is not None:
                    self.prompt_record.output = usage.output
                if request.tools:
                    gateway.remember(self, usage)
            newest, engine = gateway.newest_start, id(self._engine)
            if newest.get(engine) == self._engine_started:
                del newest[engine]
        else:
            # An engine that is closed at the same time may report its own reason.
            error = self._cancel_reason or last.error
            last, usage, status = Failed(error), self.output.usage, error.code or error.kind
        cost = self._bill(usage, failed=isinstance(last, Failed))
        record = RequestRecord(
            trace=caller.trace,
            model=model.name,
            cache=prepared.target.cache,
            endpoint=caller.endpoint,
            key=caller.key,
            session=request.session,
            at=time.time(),
            status=status,
            failed=isinstance(last, Failed),
            usage=usage,
            timings=measured,
            divergence=accepted.divergence if accepted is not None else None,
            evicted=accepted is not None and accepted.evicted,
            reuse=self.reuse,
            cost=cost,
            skipped=prepared.skipped,
        )
        if prepared.server_tools is None:
            gateway.history.add(record)
        else:
            prepared.server_tools.records.append(record)  # `ToolRounds` adds one for all rounds
        if self._lease is not None:
            self._lease.spend(usage.output)
        return last

    def _bill(self, usage: Usage, *, failed: bool) -> float:
        """Count the request for its key, and what it costs. A prompt that no engine has accepted is free."""
        prepared, choice, tools = self.prepared, self.choice, self.prepared.server_tools
        billed = prepared.billed_usage(choice, usage) if self.output.emitted_start else Usage()
        is_first = choice == 0 and (tools is None or not tools.records)  # choice of the first round
        return self._gateway.accounts.add(
            prepared.caller.key, prepared.model.name, billed, failed=failed, requests=int(is_first)
        )

    # --- a second attempt -----------------------------------------------------------------------------------------

    def _should_retry(self, batch: Sequence[Any], error: ModelyardError) -> bool:
        """Once, if the engine was lost before any output and the client is still connected."""
        if not isinstance(error, Unavailable) or not self._may_retry or self._cancelled or self.output.has_output:
            return False
        if error.code == ENGINE_DIED and self._is_suspect(batch):
            return False
        return not any(isinstance(item, (Tokens, BlockDelta)) for item in batch)

    def _is_suspect(self, batch: Sequence[Any]) -> bool:
        """Whether this request may have killed the engine, and would kill the next one: the engine had not accepted it
        yet, or no other request was started after it that still ran."""
        if self._engine_was_lost:
            return False
        is_accepted = self.output.emitted_start or isinstance(batch[0], (Accepted, Started))
        newest = self._gateway.newest_start.get(id(self._engine))
        return not is_accepted or newest is None or newest == self._engine_started

    def _retry(self) -> None:
        self._may_retry = False
        self._generation = None
        self._release()
        self._ticket = self._gateway.leases.request(self.prepared.lease_request(is_retry=True))

    # --- the end --------------------------------------------------------------------------------------------------

    def cancel(self, reason: ModelyardError | None = None) -> None:
        """Idempotent. The reader gets Failed(reason or Cancelled) next, unless the stream is over."""
        if self._cancelled:
            return
        self._cancelled, self._cancel_reason = True, reason
        if self._generation is not None:
            self._generation.cancel()
        else:
            self._ticket.cancel()

    def close(self) -> None:
        """The reader has stopped reading, at the end or before. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._gateway.forget(self)
        if not self.output.over:  # the server stops, or the connection is broken
            self._bill(self.output.usage, failed=True)
        if self._generation is None:
            self._ticket.cancel()
        elif self.output.slot_free:
            self._release()
        else:
            self._generation.cancel()
            self._gateway.run_in_background(self._drain(self._generation))

    async def _drain(self, generation: Generation[Any]) -> None:
        """Drop the tokens that the engine generated ahead; release the slot when the engine reports it free."""
        try:
            async for _ in generation:
                pass
        finally:
            self._release()

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


def gateway_timings(
    engine: Timings,
    *,
    now: float,
    started: float,
    tokenize_s: float,
    queue_s: float = 0.0,
    arrived: float | None = None,
    engine_started: float | None = None,
    first_output: float | None = None,
    remote: bool,
) -> Timings:
    """The engine's own figures, completed with what the gateway measured. All times are of one clock.

    A remote engine's first token includes the network, so it does not count as the model's.
    """
    first_token, decode = engine.first_token, engine.decode
    if engine_started is not None and first_output is not None and not remote:
        first_token = first_output - engine_started if first_token is None else first_token
        decode = now - first_output if decode is None else decode
    in_gateway = now - started + tokenize_s
    return Timings(
        queue=queue_s,
        tokenize=tokenize_s,
        prefill=engine.prefill,
        first_token=first_token,
        decode=decode,
        backend=None if engine_started is None else now - engine_started,
        engine=in_gateway,
        total=in_gateway if arrived is None else now - arrived,
    )


class TextOutput:
    """Token ids → detokenize → scan → events. Pure.

    `over`: Finished or Failed was emitted. `slot_free`: the engine has released its slot, which may be later: after a
    stop string the client has its Finished while the engine may be a step behind. `has_output`: content was emitted.
    `tokens` counts those of the output, `read` those of the prompt that the engine has evaluated. `watched` is the raw
    text since an administrator opened the request.
    """

    __slots__ = (
        "_accepted_at",
        "_cached_tokens",
        "_choice",
        "_detokenizer",
        "_first_at",
        "_late_stop",
        "_on_text",
        "_prepared",
        "_prompt_logprobs",
        "_prompt_tokens",
        "_rendered",
        "_scanner",
        "_started",
        "_stop_logprob",
        "emitted_start",
        "has_output",
        "ids",
        "over",
        "read",
        "slot_free",
        "tokens",
        "watched",
    )

    def __init__(
        self,
        prepared: PreparedRequest,
        choice: int,
        new_id: Callable[[], str],
        on_text: Callable[[str], None] | None,
    ) -> None:
        rendered, pipeline, request, model = (
            prepared.rendered(choice),
            prepared.model.text,
            prepared.request,
            prepared.model,
        )
        if rendered is None or pipeline is None:
            raise ValueError("a text engine needs a rendered prompt")
        self._prepared, self._rendered, self._choice, self._on_text = prepared, rendered, choice, on_text
        visible = request.reasoning.visible
        self._detokenizer = pipeline.tokenizer.detokenizer()
        self._late_stop: tuple[str, ...] | None = None  # from the token on that may end the output
        stop = model.stop + pipeline.stop_strings + request.stop
        if prepared.sampling.min_tokens:
            self._late_stop, stop = stop, pipeline.stop_strings
        self._scanner = Scanner(
            VERBATIM if request.echo and request.prompt_logprobs is not None else pipeline.format_for(request),
            tools=request.tools,
            stop=stop,
            prefill="" if request.prompts else pipeline.renderer.tail(rendered.text),
            new_id=new_id,
            show_thinking=model.show_thinking if visible is None else visible,
            tool_stream=model.tool_stream,
            parallel=request.parallel_tool_calls is not False,
            specials=pipeline.specials,
            token_text=self._token_text if request.logprobs is not None else None,
        )
        self._prompt_tokens, self._cached_tokens, self.tokens = len(rendered.ids), 0, 0
        self.ids: list[int] | None = [] if request.tools else None  # an agent's next prompt repeats them
        self._prompt_logprobs: list[IdLogprob] = []
        self._started: Started | None = None  # held back until the prompt's log probabilities have arrived
        self._stop_logprob: IdLogprob | None = None  # of the token that ended the output
        self._accepted_at = self._first_at = 0.0  # set if the request asks for times
        self.read = 0
        self.watched: list[str] | None = None
        self.over = self.slot_free = self.has_output = self.emitted_start = False

    @property
    def usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._cached_tokens, self.tokens, self._scanner.reasoning_tokens)

    @property
    def warnings(self) -> Sequence[str]:
        return self._scanner.warnings

    def _token_text(self, token: int) -> tuple[str, bytes]:
        raw = self._prepared.model.pipeline.tokenizer.token_bytes(token)
        return raw.decode("utf-8", "replace"), raw

    def feed(self, batch: Sequence[Chunk]) -> list[Event]:
        events: list[Event] = []
        for chunk in batch:
            if isinstance(chunk, Tokens):
                if self._started is not None:
                    self._start_late(events)
                if not self.over:
                    self._feed_tokens(chunk, events)
            elif isinstance(chunk, End):
                self.slot_free = True
                if self._started is not None and chunk.error is None:
                    self._start_late(events)
                if not self.over:
                    self._finish(chunk, events)
            elif isinstance(chunk, Progress):
                self.read = chunk.done
                self._prompt_logprobs += chunk.logprobs or ()
                if self._prepared.request.progress and not self._started:
                    events.append(self._prompt_read(chunk.done))
            elif isinstance(chunk, Accepted) and not self.emitted_start:
                self.emitted_start = True
                prepared, self._cached_tokens = self._prepared, chunk.cached_tokens
                self.read = chunk.cached_tokens
                echo = self._echo() if prepared.request.echo else ""
                started = Started(prepared.caller.trace, prepared.request.model, prepared.created, self.usage, echo)
                if prepared.request.prompt_logprobs is None:
                    events.append(started)
                else:
                    self._started = started
                if prepared.request.timings is not None:
                    self._accepted_at = time.perf_counter()
                    if prepared.request.progress and not self._started:
                        events.append(self._prompt_read(chunk.cached_tokens))
        return events

    def watch(self) -> str:
        """The raw text since the first call, which begins to keep it."""
        if self.watched is None:
            kept: list[str] = []
            self.watched, before = kept, self._on_text

            def on_text(text: str) -> None:
                kept.append(text)
                if before is not None:
                    before(text)

            self._on_text = on_text
        return "".join(self.watched)

    def _prompt_read(self, done: int) -> PromptRead:
        usage = self.usage
        return PromptRead(usage.prompt, usage.cached, done, time.perf_counter() - self._accepted_at)

    def _measured(self) -> list[Event]:
        """Before the text of the newest tokens."""
        request, now, events = self._prepared.request, time.perf_counter(), list[Event]()
        if not self._first_at:
            self._first_at = now
            if request.progress:
                events.append(self._prompt_read(self.usage.prompt))
        if request.timings == "all":
            timings = Timings(first_token=self._first_at - self._accepted_at, decode=now - self._first_at)
            events.append(Measured(self.usage, timings))
        return events

    def _echo(self) -> str:
        request = self._prepared.request
        prompt = request.prompts[self._choice // request.n]
        return prompt if isinstance(prompt, str) else self._rendered.text

    def _start_late(self, events: list[Event]) -> None:
        started, self._started = self._started, None
        if started is not None:
            events.append(msgspec.structs.replace(started, prompt_logprobs=self._written_prompt_logprobs()))

    def _written_prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """One for each token of the prompt. A token that was put in front of the client's text has none itself."""
        ids, bos = self._rendered.ids, self._prepared.model.pipeline.tokenizer.bos
        text, raw = self._token_text(ids[0])
        is_added = ids[0] == bos and not self._rendered.text.startswith(text)
        first = TokenLogprob("" if is_added else text, math.nan, raw, id=ids[0])
        return (first, *map(self._write_logprob, self._prompt_logprobs))

    def _write_logprob(self, logprob: IdLogprob) -> TokenLogprob:
        def written(token: int, value: float) -> TokenLogprob:
            text, raw = self._token_text(token)
            return TokenLogprob(text, value, raw, id=token)

        top = tuple(written(token, value) for token, value in logprob.top)
        return msgspec.structs.replace(written(logprob.id, logprob.logprob), top=top, rank=logprob.rank)

    def _feed_tokens(self, chunk: Tokens, events: list[Event]) -> None:
        scanner = self._scanner
        if not chunk.ids:
            self._stop_logprob = chunk.logprobs[0] if chunk.logprobs and self._prepared.request.echo else None
            return
        if self._late_stop is not None:
            chunk = self._feed_unstoppable(chunk, self._late_stop, events)
            if self.over:
                return
        if self.ids is not None:
            self.ids += chunk.ids
        pieces = self._detokenizer.feed(chunk.ids, chunk.logprobs)
        if self._on_text is not None:
            self._on_text("".join(piece.text for piece in pieces))
        scanned = scanner.feed(pieces)
        self.tokens += len(chunk.ids)
        if self._accepted_at:
            events += self._measured()
        if scanned:
            self.has_output = True
            events += scanned
        if scanner.is_done:  # a stop string or a complete call: drop what the engine generated ahead
            events += scanner.finish()
            reason: StopReason = "stop_string" if scanner.stop_string is not None else "tool_calls"
            self.over = True
            events.append(Finished(reason, self.usage, scanner.stop_string))

    def _feed_unstoppable(self, chunk: Tokens, stop: tuple[str, ...], events: list[Event]) -> Tokens:
        """Feeds the tokens before which no stop string counts; returns the others."""
        left = (self._prepared.sampling.min_tokens or 0) - self.tokens
        if left >= len(chunk.ids):
            return chunk
        self._late_stop = None
        if left > 0:
            self._feed_tokens(Tokens(chunk.ids[:left], chunk.logprobs and chunk.logprobs[:left]), events)
            chunk = Tokens(chunk.ids[left:], chunk.logprobs and chunk.logprobs[left:])
        self._scanner.set_stop_strings(stop)
        return chunk

    def _finish(self, end: End, events: list[Event]) -> None:
        if end.reason in ("error", "cancelled"):
            events += self.fail(end.error or Cancelled("the request was cancelled"))
            return
        scanner = self._scanner
        if rest := self._detokenizer.finish(truncated=end.reason != "stop"):
            events += scanner.feed(rest)
        last = scanner.finish(truncated=end.reason != "stop")
        events += last if self._stop_logprob is None else self._with_stop_logprob(last, self._stop_logprob)
        # Only the engine knows how many tokens images take.
        self._prompt_tokens = max(self._prompt_tokens, end.usage.prompt)
        reason: StopReason
        if scanner.stop_string is not None:
            reason = "stop_string"
        elif end.reason == "window":
            reason = "window"
        elif end.reason == "length":
            reason = self._rendered.budget.limit
        else:
            reason = "tool_calls" if scanner.has_complete_call else "end"
        self.over = True
        events.append(Finished(reason, self.usage, scanner.stop_string, end.timings))

    def _with_stop_logprob(self, last: list[Event], stop: IdLogprob) -> list[Event]:
        """The token that ended the output counts where the prompt's tokens count; it has no text."""
        written = (msgspec.structs.replace(self._write_logprob(stop), token=""),)
        for at, event in enumerate(last):
            if isinstance(event, BlockEnd):
                return [*last[:at], BlockDelta(event.index, "", written), *last[at:]]
        return [*last, BlockStart(0, "text"), BlockDelta(0, "", written), BlockEnd(0)]

    def fail(self, error: ModelyardError) -> list[Event]:
        self.over = True
        return [Failed(error)]


class ChatOutput:
    """Events of a ChatEngine under our request id and the client's model name. The event contract is enforced.

    Where the prompt's tokens are known, usage starts with them, and an output cut by the window differs from one
    cut by the client's `max_tokens`. Hidden reasoning is dropped. Attributes as in `TextOutput`; a delta counts as one
    token, because the engine reports its usage at the end.
    """

    warnings: Sequence[str] = ()
    ids: list[int] | None = None  # only the engine knows them

    def __init__(self, prepared: PreparedRequest, choice: int = 0) -> None:
        self._prepared, self._rendered, self._choice = prepared, prepared.rendered(choice), choice
        visible = prepared.request.reasoning.visible
        self._hide_thinking = not (prepared.model.show_thinking if visible is None else visible)
        self._hidden: set[int] = set()
        self.usage, self.tokens = Usage(), 0
        self.over = self.slot_free = self.has_output = self.emitted_start = False

    def feed(self, batch: Sequence[Event]) -> list[Event]:
        events: list[Event] = []
        for event in batch:
            if self.over:
                break
            if isinstance(event, (BlockStart, BlockDelta, BlockEnd)):
                if isinstance(event, BlockDelta):
                    self.has_output, self.tokens = True, self.tokens + 1
                events += self._without_thinking(event) if self._hide_thinking else (event,)
            elif isinstance(event, Started):
                if not self.emitted_start:
                    events.append(self._start(event))
            elif isinstance(event, PromptRead):
                if self._prepared.request.progress:
                    events.append(event)
            elif isinstance(event, Measured):
                if self._prepared.request.timings == "all":
                    events.append(event)
            else:
                self.over = self.slot_free = True
                events.append(self._last(event))
        return events

    def _start(self, event: Started) -> Started:
        prepared = self._prepared
        self.emitted_start = True
        self.usage = event.usage if event.usage.prompt or self._rendered is None else Usage(len(self._rendered.ids))
        return Started(
            prepared.caller.trace,
            prepared.request.model,
            prepared.created,
            self.usage,
            self._echo,
            event.prompt_logprobs,
        )

    @property
    def _echo(self) -> str:
        """With log probabilities the server repeats the prompt itself."""
        request = self._prepared.request
        if not request.echo or request.prompt_logprobs is not None:
            return ""
        prompt = request.prompts[self._choice // request.n]
        return prompt if isinstance(prompt, str) else ""

    def _last(self, event: Finished | Failed) -> Finished | Failed:
        if isinstance(event, Failed):
            self._count_so_far()
            return event
        self.usage = event.usage
        rendered = self._rendered
        if event.reason == "max_tokens" and rendered is not None and rendered.budget.limit == "window":
            return msgspec.structs.replace(event, reason="window")
        return event

    def _without_thinking(self, event: BlockStart | BlockDelta | BlockEnd) -> Sequence[Event]:
        """Nothing of a thinking block; the blocks after it are renumbered."""
        if isinstance(event, BlockStart) and event.kind == "thinking":
            self._hidden.add(event.index)
        if event.index in self._hidden:
            return ()
        before = sum(index < event.index for index in self._hidden)
        return (msgspec.structs.replace(event, index=event.index - before),)

    def fail(self, error: ModelyardError) -> list[Event]:
        self.over = True
        self._count_so_far()
        return [Failed(error)]

    def _count_so_far(self) -> None:
        """A server that reports its usage at the end has not reported any."""
        prompt, output = self.usage.prompt, self.usage.output
        if self.has_output and not prompt:
            prompt = estimated_tokens(self._prepared.request)
        self.usage = msgspec.structs.replace(self.usage, prompt=prompt, output=max(output, self.tokens))


# What `Gateway.start` returns; all read alike.
EventSource = ChoiceStream | MultiChoiceStream | SharedReader | ToolRounds | FallbackStream
