"""READ FIRST. The life of a request, in one place:

    read by a protocol → resolve the route → inline the images → render · tokenize → check the window → lease
    → engine → detokenize → scan → events → written by the same protocol

`prepare` does everything that needs no engine and raises what is wrong before a byte is sent. `start` takes a place in
the queue, or refuses at once, and returns the answer to iterate over. Counting and rendering use the same path.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import msgspec

from modelyard.core.engine import Accepted, Embedder, Embeddings, TextEngine
from modelyard.core.errors import Forbidden, InvalidRequest, ModelyardError, Unimplemented, Unsupported
from modelyard.core.lease import Demand, Leases
from modelyard.core.request import Caller, EmbeddingRequest, Image, Message, Request, ToolResult
from modelyard.gateway.answer import Answer
from modelyard.gateway.choices import Choices
from modelyard.gateway.constrain import constrain
from modelyard.gateway.job import Job, Run, fit
from modelyard.gateway.model import Model
from modelyard.gateway.watch import Watch
from modelyard.prompt.media import Images
from modelyard.router.routes import Router, Target
from modelyard.telemetry.journal import Entry
from modelyard.telemetry.metrics import Metrics
from modelyard.vocab.shield import unshield

log = logging.getLogger("modelyard.gateway")

_INLINE_CHARS = 20_000  # fresh text up to here is tokenized on the loop (about 5 ms); more goes to a thread
_INLINE_MESSAGES = 300  # messages and tools up to here are rendered on the loop (about 5 ms); more in a thread


class Gateway:
    def __init__(
        self, *, router: Router, models: Mapping[str, Model], leases: Leases, images: Images, metrics: Metrics
    ) -> None:
        self.router, self.models, self.leases, self.images, self.metrics = router, models, leases, images, metrics
        self._watch = Watch()
        self._background: set[asyncio.Task[None]] = set()
        self._answers: WeakSet[Answer | Choices] = WeakSet()

    # --- the main road --------------------------------------------------------------------------------------------

    async def prepare(self, request: Request, caller: Caller) -> Job:
        target, model = self._resolve(request.model, caller)
        began = time.perf_counter()
        request = _offered(await self._with_images(request, model))
        wanted = request.max_tokens if request.max_tokens is not None else model.max_tokens
        runs = () if model.kind == "chat" else await self._runs(request, model, target, wanted)
        constraint, dropped = constrain(request, model, runs[0].text if runs else "")
        self._tell((*request.warnings, *dropped))
        return Job(
            request=request,
            caller=caller,
            target=target,
            model=model,
            runs=runs,
            sampling=request.sampling.over(model.sampling),
            constraint=constraint,
            created=int(time.time()),
            tokenize_s=time.perf_counter() - began,
        )

    def start(self, job: Job, entry: Entry | None = None) -> Answer | Choices:
        """A place in the queue and the answer that will come of it. Raises at once where waiting would be in vain."""
        if entry is not None:
            entry.prompt("\n\n".join(unshield(run.text) for run in job.runs))
        ticket = self.leases.request(job.demand())
        one = job.choices == 1
        answer = Answer(job, 0, ticket, self, entry) if one else Choices(job, ticket, self, entry)
        self._answers.add(answer)
        return answer

    def accepted(self, job: Job, choice: int, where: Accepted) -> None:
        """A job has its place: had the cache its system prompt? One look-up where nothing changed."""
        if choice == 0 and (found := self._watch.look(job, where)) is not None:
            self.metrics.prompt_changed(job.target.cache)
            log.warning("%s", found)

    # --- its steps ------------------------------------------------------------------------------------------------

    def _resolve(self, name: str, caller: Caller) -> tuple[Target, Model]:
        target = self.router.resolve(name, caller.endpoint)
        model = self.models[target.model]
        if model.remote and not (caller.allow_remote or target.allow_remote):
            raise Forbidden(
                f"the model {name!r} runs on a remote service; send the header x-modelyard-allow-remote: true, or set "
                "allow_remote = true on its route or your key",
                code="remote_not_allowed",
            )
        return target, model

    def _tell(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            self.metrics.warned(warning.partition(":")[0])  # what follows is the client's own text
            log.info("request: %s", warning)

    async def _with_images(self, request: Request, model: Model) -> Request:
        if not any(_has_image(message) for message in request.messages):
            return request
        if "image" not in model.modalities:
            raise Unsupported(
                f"the model {model.name!r} takes text only; send the request without images or to another model",
                code="modality_unsupported",
                param="messages",
            )
        return await self.images.inline(request)

    async def _runs(self, request: Request, model: Model, target: Target, wanted: int | None) -> tuple[Run, ...]:
        rendered = await self._rendered(request, model)
        return tuple(Run(ids, text, fit(len(ids), wanted, target.window, target.strict)) for ids, text in rendered)

    async def _rendered(self, request: Request, model: Model) -> list[tuple[list[int], str]]:
        renderer = model.parts.renderer
        if request.prompts:
            long = sum(map(len, request.prompts)) > _INLINE_CHARS
            return await asyncio.to_thread(_raw, request, model) if long else _raw(request, model)
        many = len(request.messages) + len(request.tools) > _INLINE_MESSAGES
        text = await asyncio.to_thread(renderer.text, request) if many else renderer.text(request)
        if len(text) > _INLINE_CHARS and renderer.fresh(text) > _INLINE_CHARS:
            return [(await asyncio.to_thread(renderer.tokens, text), text)]
        return [(renderer.tokens(text), text)]

    # --- side roads -----------------------------------------------------------------------------------------------

    async def count(self, request: Request, caller: Caller) -> int:
        """Prompt tokens of a request, by the same render path. It never queues and needs no loaded model."""
        _, model = self._resolve(request.model, caller)
        request = _offered(await self._with_images(request, model))
        if model.kind == "text":
            return sum(len(ids) for ids, _ in await self._rendered(request, model))
        engine = self.leases.engine(model.name)
        counted = None if engine is None or isinstance(engine, TextEngine) else await engine.count(request)
        if counted is None:
            raise Unimplemented(f"the engine of {model.name!r} cannot count tokens")
        return counted

    async def embed(self, request: EmbeddingRequest, caller: Caller) -> Embeddings:
        target, model = self._resolve(request.model, caller)
        long = sum(map(len, request.inputs)) > _INLINE_CHARS
        batch = await asyncio.to_thread(_batch, request, model) if long else _batch(request, model)
        for ids in batch:
            fit(len(ids), 1, target.window + 1, strict=False)
        ticket = self.leases.request(
            Demand(model=target.model, cache=target.cache, tokens=sum(map(len, batch)), key=caller.key)
        )
        try:
            engine = (await ticket.lease()).engine
            if not isinstance(engine, Embedder):
                raise Unsupported(f"the model {model.name!r} makes no embeddings", code="embeddings_unsupported")
            return await engine.embed(batch)
        finally:
            ticket.cancel()

    def model_for(self, name: str, caller: Caller) -> tuple[Target, Model]:
        return self._resolve(name, caller)

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that outlives its request; held here so that it is neither lost nor forgotten."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", exc_info=error)

    def stop(self, why: ModelyardError) -> None:
        """End every answer that waits or runs; its client is told why."""
        for answer in list(self._answers):
            answer.cancel(why)

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self.images.close()


def _offered(request: Request) -> Request:
    """`tool_choice: none` is kept by not offering any: a model cannot call what it never saw."""
    choice = request.tool_choice
    if request.tools and choice.mode == "none":
        return msgspec.structs.replace(request, tools=())
    if choice.mode == "named" and not any(tool.name == choice.name for tool in request.tools):
        raise InvalidRequest(f"tool_choice names the tool {choice.name!r}, which is not in tools", param="tool_choice")
    return request


def _raw(request: Request, model: Model) -> list[tuple[list[int], str]]:
    """Prompts as they are, in texts or in ids, with what they say."""
    renderer, vocab = model.parts.renderer, model.parts.vocab
    return [
        (renderer.raw(p), p) if isinstance(p, str) else (_ids(p, model, "prompt"), vocab.decode(p))
        for p in request.prompts
    ]


def _batch(request: EmbeddingRequest, model: Model) -> list[list[int]]:
    return [model.parts.vocab.encode(i) if isinstance(i, str) else _ids(i, model, "input") for i in request.inputs]


def _ids(ids: Sequence[int], model: Model, param: str) -> list[int]:
    """A client's own ids: one that the model does not have would be read from beyond its tables."""
    if (highest := max(ids)) >= (size := model.parts.vocab.size):
        raise InvalidRequest(f"{param}: {highest} is not a token of this model (0 to {size - 1})", param=param)
    return list(ids)


def _has_image(message: Message) -> bool:
    return any(
        isinstance(part, Image) or (isinstance(part, ToolResult) and any(isinstance(p, Image) for p in part.content))
        for part in message.parts
    )
