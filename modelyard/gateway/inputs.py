"""Requests that generate nothing: counting the tokens of a prompt, embeddings and reranking."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from modelyard.core.engine import (
    Capabilities,
    EmbeddingEngine,
    Embeddings,
    End,
    Engine,
    ForwardingEngine,
    MediaEngine,
    Prompt,
    Ranking,
    TextEngine,
    TokenRun,
)
from modelyard.core.errors import ContextOverflow, ModelyardError, Timeout, Unimplemented, Unsupported
from modelyard.core.events import Timings, Usage
from modelyard.core.pool import LeaseRequest
from modelyard.core.request import Caller, EmbeddingRequest, Request, RerankRequest
from modelyard.gateway.lookup import ModelLookup
from modelyard.gateway.model import Model, check_embeddings, check_rerank, media_kinds
from modelyard.gateway.prepare import Preparer, Watch, checked_ids, inline_chars
from modelyard.gateway.request_work import RequestWork
from modelyard.gateway.stream import StreamServices
from modelyard.prompt.images import request_media
from modelyard.router.router import Target
from modelyard.telemetry.history import RequestRecord
from modelyard.tokenizer.slices import encode_long

R = TypeVar("R", EmbeddingRequest, RerankRequest)
Read = TypeVar("Read")


class InputReader:
    """Prompts and texts that an engine reads, or that are only tokenized."""

    def __init__(self, lookup: ModelLookup, preparer: Preparer, services: StreamServices) -> None:
        self._lookup, self._preparer, self._services = lookup, preparer, services

    async def count(self, request: Request, caller: Caller, work: RequestWork | None = None) -> int:
        """Prompt tokens, by the same steps as `prepare`. It does not queue and needs no loaded model."""
        target, model, engine = self._lookup.find(request.model, caller, request.allow_remote)
        if model.define is not None:
            model = await self._lookup.defined(model)
        if (mcp := self._preparer.mcp) is not None:
            request, _ = await self._preparer.offer(mcp, request, target, model, engine)
        request, _ = await self._preparer.adapt(request, caller, model, engine)
        work = work or RequestWork(0, caller.deadline)
        counts_media = model.count_media is not None and engine is None
        if rendered := await self._preparer.render(request, model, None, work, counts_media=counts_media):
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
        target, model, can = await self.resolve(request.model, caller)
        check_embeddings(can, model.name)
        chars = sum(map(len, request.inputs))
        batch = await self._encode(_encode_inputs, request, target, model, chars, caller, work, request.truncate)

        async def read(engine: Engine) -> Embeddings:
            if isinstance(engine, EmbeddingEngine):
                return await engine.embed(batch)
            if isinstance(engine, ForwardingEngine):
                return await engine.embed_inputs(request)
            raise Unsupported(f"the model {model.name!r} makes no embeddings", code="embeddings_unsupported")

        return await self.read_inputs(read, target, caller, batch, lambda made: made.prompt_tokens, request.keep_alive)

    async def rerank(self, request: RerankRequest, caller: Caller, work: RequestWork | None = None) -> Ranking:
        """The documents, the most relevant first."""
        target, model, can = await self.resolve(request.model, caller)
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

        found = await self.read_inputs(read, target, caller, batch, lambda made: made.prompt_tokens)
        best = sorted(found.scores, key=lambda scored: -scored[1])
        return Ranking(best[: request.top_n], found.prompt_tokens)

    async def resolve(self, name: str, caller: Caller) -> tuple[Target, Model, Capabilities]:
        """As `ModelLookup.find`, with what the model can do."""
        self._services.accounts.check_budget(caller.key)
        target, model, engine = self._lookup.find(name, caller)
        if model.define is not None:
            model = await self._lookup.defined(model)
        if model.fault is not None:
            raise model.failed()
        return target, model, self._lookup.effective(model, engine)

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
        if chars > inline_chars(model):
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

    async def read_inputs(
        self,
        read: Callable[[Engine], Awaitable[Read]],
        target: Target,
        caller: Caller,
        batch: Sequence[Sequence[int]],
        count: Callable[[Read], int],
        keep_alive: float | None = None,
        slots: int = 1,
    ) -> Read:
        """Wait for a slot, or several, let the engine read the inputs, and record what it took."""
        lease_request = LeaseRequest(
            model=target.model,
            cache=target.cache,
            tokens=sum(map(len, batch)),
            weight=slots,
            key=caller.key,
            priority=caller.priority or "main",
            deadline=caller.deadline,
            trace=caller.trace,
            keep_alive=keep_alive,
        )
        if caller.reservation is not None:
            await caller.reservation.hold(target.model, lease_request.tokens, 0)
        began, queued = time.perf_counter(), 0.0
        ticket = self._services.leases.request(lease_request)
        status, usage, failed = "end", Usage(), True
        try:
            lease = await ticket.lease()
            queued = time.perf_counter() - began
            async with asyncio.timeout(_seconds_left(caller.deadline)):
                made = await read(lease.engine)
            usage, failed = Usage(count(made)), False
            self._services.metrics.inputs_read(target.model, usage)
            return made
        except ModelyardError as error:
            status = error.code or error.kind
            raise
        except TimeoutError:
            status = Timeout.default_code or ""
            raise Timeout("the request was not finished in the time that the client allows") from None
        except asyncio.CancelledError:
            status, failed = "cancelled", False
            raise
        finally:
            ticket.cancel()
            timings = Timings(queue=queued, total=time.perf_counter() - (caller.arrived or began))
            cost = self._services.accounts.add(caller.key, target.model, usage, failed=failed)
            self._services.history.add(
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


def _encode_inputs(request: EmbeddingRequest, model: Model, watch: Watch | None) -> list[list[int]]:
    """Texts with the tokens that the model expects around them; a client's own token ids as they are."""
    tokenizer = model.pipeline.tokenizer
    first, last = tokenizer.wrapping

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(text) if watch is None else encode_long(tokenizer, text, watch(len(text)))
        return [*first, *ids, *last]

    return [encode(i) if isinstance(i, str) else checked_ids(i, model, "input") for i in request.inputs]


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
