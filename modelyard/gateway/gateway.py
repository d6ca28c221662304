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

import msgspec

from modelyard.core.engine import Accepted, Capabilities, EmbeddingEngine, Embeddings, Engine, TextEngine
from modelyard.core.errors import Forbidden, InvalidRequest, ModelyardError, Unimplemented, Unsupported
from modelyard.core.events import Failed, Finished, Usage
from modelyard.core.lease import LeaseProvider, LeaseRequest
from modelyard.core.request import Caller, Constraint, EmbeddingRequest, Request
from modelyard.gateway.answer import ChoiceStream
from modelyard.gateway.cache_diagnostics import CacheDiagnostics
from modelyard.gateway.capabilities import CapabilityCache, check, has_images, holds_only_text, without_results_pictures
from modelyard.gateway.choices import MultiChoiceStream
from modelyard.gateway.constraints import constrain
from modelyard.gateway.dedup import RequestDeduplicator, SharedReader
from modelyard.gateway.model import Model
from modelyard.gateway.prepared_request import PreparedRequest, RenderedPrompt, output_budget
from modelyard.gateway.priority import priority
from modelyard.gateway.record import record
from modelyard.gateway.replay_memory import ReplayMemory, as_message, generated_reply, text_before_calls
from modelyard.prompt.media import Images
from modelyard.prompt.translation import translated
from modelyard.router.routes import Router, Target
from modelyard.telemetry.history import History
from modelyard.telemetry.metrics import Metrics
from modelyard.telemetry.request_capture import RequestCapture
from modelyard.tokenizer.shield import unshield

log = logging.getLogger("modelyard.gateway")

_REMEMBERED = 1000  # requests, where nobody says how many
_INLINE_CHARS = 20_000  # fresh text up to here is tokenized on the loop (about 5 ms); more goes to a thread
_INLINE_MESSAGES = 300  # messages and tools up to here are rendered on the loop (about 5 ms); more in a thread


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
        recall: ReplayMemory | None = None,
    ) -> None:
        self.router, self.models, self.leases, self.images, self.metrics = router, models, leases, images, metrics
        self.history = history or History(_REMEMBERED)
        self.abilities = CapabilityCache()
        self._watch = CacheDiagnostics()
        self._recall = recall or ReplayMemory()
        self._background: set[asyncio.Task[None]] = set()
        self._answers: set[ChoiceStream | MultiChoiceStream] = set()
        self._joints = RequestDeduplicator()

    # --- the main road --------------------------------------------------------------------------------------------

    async def prepare(self, request: Request, caller: Caller) -> PreparedRequest:
        target, model, engine = self._resolve(request.model, caller, request.allow_remote)
        began, is_text = time.perf_counter(), holds_only_text(request)
        urgency = priority(request, is_text=is_text)
        able = None if engine is None else engine.info.capabilities
        if not self._recall.is_blank:
            request = await self._recall.restored(request, caller.key)
        request, has_pictures = self._fitting(request, model, able, is_text=is_text)
        if has_pictures:
            request = await self.images.inline(request)
        wanted = request.max_tokens if request.max_tokens is not None else model.max_tokens
        runs: list[RenderedPrompt] = []
        for ids, text in await self._rendered(request, model) if _renders(request, model) else ():
            runs.append(RenderedPrompt(ids, text, output_budget(len(ids), wanted, target.window, target.strict)))
        has_form = request.constraint is not None or request.tools
        constraint, dropped = _constrained(request, model, runs, able) if has_form else (None, ())
        if request.warnings or dropped or request.tools:
            self._tell((*request.warnings, *dropped, *_left_out(request, model)))
        return PreparedRequest(
            request=request,
            caller=caller,
            target=target,
            model=model,
            runs=tuple(runs),
            sampling=request.sampling.over(model.sampling),
            constraint=constraint,
            created=int(time.time()),
            tokenize_s=time.perf_counter() - began,
            able=able,
            priority=urgency,
        )

    def start(
        self, job: PreparedRequest, entry: RequestCapture | None = None
    ) -> ChoiceStream | MultiChoiceStream | SharedReader:
        """A place in the queue and the answer that will come of it, or a seat at the same one that runs already. Raises
        at once where waiting would be in vain."""
        if entry is not None:
            entry.prompt("\n\n".join(unshield(run.text) for run in job.runs))
        if (joined := self._joints.find(job)) is not None:
            self.metrics.joined(job.model.name)
            return joined
        demand = job.demand()
        ticket = self.leases.request(demand)
        if not ticket.granted:
            self.history.saw_queue(time.time(), ticket.position)
        is_one = demand.weight == 1
        answer = ChoiceStream(job, 0, ticket, self, entry) if is_one else MultiChoiceStream(job, ticket, self, entry)
        self._answers.add(answer)
        return self._joints.opened(answer)

    def left(self, answer: ChoiceStream | MultiChoiceStream) -> None:
        """Nobody reads it any more."""
        self._answers.discard(answer)

    def granted(self, job: PreparedRequest, engine: Engine) -> None:
        """A job has its engine, which may not be the one that was up when it was prepared."""
        if (told := engine.info.capabilities) is not job.able and told != job.able:
            request, can = job.request, self.abilities.of(job.model, told)
            check(request, can, job.model.name, images=has_images(request))

    def accepted(self, answer: ChoiceStream, where: Accepted, engine: Engine) -> None:
        """A job has its place: what had the cache of its prompt? Costs a look-up where nothing changed."""
        answer.where, job = where, answer.job
        if answer.choice != 0:
            return
        if (found := self._watch.look(job, where)) is not None:
            self.metrics.prompt_changed(job.target.cache)
            log.warning("%s", found)
        if (told := self._watch.reuse(job, where, engine.info.page)) is not None:
            answer.reuse, answer.asked = told
            self.metrics.looked_up(job.target.cache, told[0])

    def ended(self, answer: ChoiceStream, last: Finished | Failed) -> None:
        """An answer is over: it is counted and remembered."""
        if isinstance(last, Finished):
            job, choice = answer.job, answer.choice
            self.metrics.finished(job.model.name, job.counted(choice, last.usage), last.reason)
            if choice == 0:
                if answer.asked is not None:
                    answer.asked.output = last.usage.output
                if job.request.tools:
                    self._heard(answer, last.usage)
        self.history.add(record(answer, last, time.time()))

    def _heard(self, answer: ChoiceStream, usage: Usage) -> None:
        """What the next prompt of this session will begin with."""
        job, ids = answer.job, answer.ids
        reply = generated_reply(answer, usage)
        if ids and (run := job.run(0)) is not None:
            job.model.parts.renderer.learn(run.ids, ids)
        if reply is None:
            return
        if answer.asked is not None:
            answer.asked.reply = as_message(reply)
        text = text_before_calls(job, reply, ids)
        if shared := self._recall.keep(reply, job.caller.key, text):
            self.background(self._recall.share(shared, job.caller.key))

    # --- its steps ------------------------------------------------------------------------------------------------

    def _resolve(self, name: str, caller: Caller, consent: bool = False) -> tuple[Target, Model, Engine | None]:
        """Where it goes, to which model, and that model's engine, if it is up."""
        target = self.router.resolve(name, caller.endpoint)
        model = self.models[target.model]
        if model.remote and not (consent or caller.allow_remote or target.allow_remote):
            raise Forbidden(
                f"the model {name!r} runs on a remote service; send the header x-modelyard-allow-remote: true (in the "
                "pool dialect also the field allow_remote), or set allow_remote = true on its route or your key",
                code="remote_not_allowed",
            )
        engine = self.leases.engine(target.model)
        return _as_loaded(target, engine), model, engine

    def _tell(self, warnings: Sequence[str]) -> None:
        for warning in warnings:
            self.metrics.warned(warning.partition(":")[0])  # what follows is the client's own text
            log.info("request: %s", warning)

    def _fitting(
        self, request: Request, model: Model, able: Capabilities | None, *, is_text: bool = False
    ) -> tuple[Request, bool]:
        """The request as the model can take it, or why it cannot; and whether pictures are to be brought in."""
        can, images = self.abilities.of(model, able), not is_text and has_images(request)
        if request.tools or request.tool_choice.mode != "auto":
            request = _offered(request)
        if images and "image" not in can.modalities:
            request = without_results_pictures(request)
            images = has_images(request)
        check(request, can, model.name, images=images)
        return translated(request) if model.translates else request, images

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
        _, model, engine = self._resolve(request.model, caller, request.allow_remote)
        able = None if engine is None else engine.info.capabilities
        request, has_pictures = self._fitting(await self._recall.restored(request, caller.key), model, able)
        if has_pictures:
            request = await self.images.inline(request)
        if _renders(request, model):
            return sum(len(ids) for ids, _ in await self._rendered(request, model))
        counted = None if engine is None or isinstance(engine, TextEngine) else await engine.count(request)
        if counted is None:
            raise Unimplemented(f"the engine of {model.name!r} cannot count tokens")
        return counted

    async def embed(self, request: EmbeddingRequest, caller: Caller) -> Embeddings:
        target, model, _ = self._resolve(request.model, caller)
        long = sum(map(len, request.inputs)) > _INLINE_CHARS
        batch = await asyncio.to_thread(_batch, request, model) if long else _batch(request, model)
        for ids in batch:
            output_budget(len(ids), 1, target.window + 1, strict=False)
        ticket = self.leases.request(
            LeaseRequest(model=target.model, cache=target.cache, tokens=sum(map(len, batch)), key=caller.key)
        )
        try:
            engine = (await ticket.lease()).engine
            if not isinstance(engine, EmbeddingEngine):
                raise Unsupported(f"the model {model.name!r} makes no embeddings", code="embeddings_unsupported")
            return await engine.embed(batch)
        finally:
            ticket.cancel()

    def target(self, name: str, endpoint: str) -> Target:
        """Where requests by this name go, with the window that the cache was loaded with."""
        target = self.router.resolve(name, endpoint)
        return _as_loaded(target, self.leases.engine(target.model))

    def model_for(self, name: str, caller: Caller) -> tuple[Target, Model]:
        return self._resolve(name, caller)[:2]

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


def _as_loaded(target: Target, engine: Engine | None) -> Target:
    """One load of a model may have set another window than the configuration."""
    cache = engine.info.caches.get(target.cache) if engine is not None else None
    if cache is None or cache.window == target.window:
        return target
    return msgspec.structs.replace(target, window=cache.window)


def _renders(request: Request, model: Model) -> bool:
    """Whether the prompt's tokens are known here: always for a token engine; for an engine that renders by itself where
    its tokenizer is known, too, and the prompt is text alone."""
    if model.kind == "text":
        return True
    return model.text is not None and not request.prompts and not has_images(request)


def _constrained(
    request: Request, model: Model, runs: Sequence[RenderedPrompt], able: Capabilities | None
) -> tuple[Constraint | None, Sequence[str]]:
    structured = able is None or able.structured
    return constrain(request, model, runs[0].text if runs else "", structured=structured)


def _left_out(request: Request, model: Model) -> Sequence[str]:
    """Tools that run on their maker's servers: accepted, because agents send them unasked, and not offered here."""
    if model.kind != "text":
        return ()  # another server may have them
    return [f"tool_left_out: {t.type or t.name} is not run here" for t in request.tools if t.kind == "server"]


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
