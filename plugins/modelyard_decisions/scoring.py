"""How likely each option of each question is: the model reads the input once, and every question continues from its KV.

    input · question · end of the turn · option · end of the answer
    └─ once ┘ └────── once a question ─┘ └─ log probabilities ────┘

One row of logits has the first tokens of all options. An option needs no row of its own if that is all of it, or if its
first token is so unlikely that the rest cannot matter. The end of the answer is part of an option only where another
one begins with the same text: else nothing but this option begins like that.

As many questions are asked at a time as the cache has places for, at most `MAX_PLACES`: their rows are computed
together. The first one is asked alone, because the others copy the KV of the input from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import pairwise

from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.engine import Accepted, End, Engine, Media, Progress, Prompt, TextEngine, TokenRun
from modelyard.core.errors import ContextOverflow, Incomplete, Unsupported
from modelyard.core.events import Usage
from modelyard.core.request import Caller
from modelyard.core.tokenizer import IdLogprob
from modelyard.gateway.gateway import Gateway
from modelyard.gateway.model import Model, TextPipeline, media_kinds
from modelyard.gateway.request_work import RequestWork
from modelyard.prompt.images import request_media
from modelyard.router.router import Target
from modelyard_decisions.wire import MARK, DecisionRequest, Question

MAX_PLACES = 4
_ALTERNATIVES = 64  # of the first token that one row reports
_NEGLIGIBLE = 14.0  # nats below the best option: its share is less than a millionth
Part = TokenRun | Media


class Asked(Struct):
    """A question in tokens: what follows the input, and each of its options, with the end of an answer if it needs
    that."""

    ids: list[int]
    options: list[list[int]]


class Scored(Struct):
    logprobs: list[list[float]]
    usage: Usage


async def decide(gateway: Gateway, decision: DecisionRequest, caller: Caller, work: RequestWork) -> Scored:
    """The log probability of each option of each question."""
    target, model, can = await gateway.inputs.resolve(decision.request.model, caller)
    if model.kind != "text" or model.text is None or not can.prompt_logprobs or not can.generates:
        raise Unsupported(
            f"the engine of {model.name!r} reports no log probabilities of a prompt; use a model of llama_cpp",
            code="prompt_logprobs_unsupported",
            param="model",
        )
    engine = gateway.leases.engine(model.name)
    request, _ = await gateway.preparer.adapt(decision.request, caller, model, engine)
    pipeline = model.text
    text = await work.run(pipeline.renderer.text, request)
    head, found, tail = text.partition(MARK)
    if not found or MARK in tail:
        raise Unsupported(f"the chat template of {model.name!r} has no place for a question", param="model")
    media = request_media(request) if media_kinds(request) else ()
    parts: tuple[Part, ...] = await work.run(_parts, pipeline, head, media)
    asked = await work.run(lambda: [_tokens(pipeline, each, tail) for each in decision.questions])
    before = sum(len(part.ids) for part in parts if isinstance(part, TokenRun))
    longest = before + max(len(each.ids) + max(map(len, each.options)) for each in asked)
    if longest >= target.window:
        raise ContextOverflow(longest, target.window)
    sizes = [range(before), *(range(len(each.ids) + sum(map(len, each.options))) for each in asked)]

    async def read(engine: Engine) -> Scored:
        return await Scoring(engine, target, model, caller, parts, before).run(asked)

    slots = min(MAX_PLACES, len(asked))
    reading = gateway.inputs.read_inputs(read, target, caller, sizes, lambda made: made.usage.prompt, slots=slots)
    return await work.wait(reading)


def _parts(pipeline: TextPipeline, head: str, media: Sequence[Media]) -> tuple[Part, ...]:
    if media and pipeline.renderer.marks_media:
        return pipeline.renderer.parts(head, media)
    return (TokenRun(pipeline.renderer.tokens(head)), *media)


def _tokens(pipeline: TextPipeline, question: Question, tail: str) -> Asked:
    """The client's texts are plain text: none of them is a control token."""
    plain, texts = pipeline.tokenizer.encode_plain, sorted(question.texts)
    is_ambiguous = any(longer.startswith(text) for text, longer in pairwise(texts))
    end = _end_of_answer(pipeline) if is_ambiguous else ()
    ids = [*plain(question.prompt), *pipeline.renderer.tokens(tail)]
    return Asked(ids, [[*plain(text), *end] for text in question.texts])


def _end_of_answer(pipeline: TextPipeline) -> tuple[int, ...]:
    """With it the probability is that of the whole text, and not of all that begin with it."""
    source, tokenizer = pipeline.renderer.template_source, pipeline.tokenizer
    texts = {token: tokenizer.token_bytes(token).decode("utf-8", "replace") for token in pipeline.stop_ids}
    return tuple(sorted(texts, key=lambda token: texts[token] not in source)[:1])


class Scoring:
    """One request on an engine whose places it has leased."""

    def __init__(
        self, engine: Engine, target: Target, model: Model, caller: Caller, parts: tuple[Part, ...], before: int
    ) -> None:
        if not isinstance(engine, TextEngine):
            raise Unsupported(f"the engine of {model.name!r} takes no token ids")
        self._engine, self._parts, self._before = engine, parts, before
        scope = "" if target.share_across_keys else caller.key
        self._prompt = Prompt(
            parts=(),
            max_tokens=0,
            prompt_logprobs=0,
            cache=target.cache,
            scope=scope,
            priority=caller.priority or "main",
            deadline=caller.deadline,
            trace=caller.trace,
        )
        cache = engine.info.caches.get(target.cache)
        self._places = min(MAX_PLACES, cache.parallel if cache is not None else 1)
        self._cached: int | None = None

    async def run(self, asked: Sequence[Asked]) -> Scored:
        scores: dict[int, list[float]] = {}
        waiting = iter(range(len(asked)))
        await self._ask(asked, scores, iter([next(waiting)]))
        places = min(self._places, max(1, len(asked) - 1))
        tasks = [asyncio.ensure_future(self._ask(asked, scores, waiting)) for _ in range(places)]
        try:
            await asyncio.gather(*tasks)
        except BaseException:  # one failed, or the client left: the others end, and their places are free
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        total = self._before + sum(len(each.ids) + sum(map(len, each.options)) for each in asked)
        usage = Usage(total, min(self._cached or 0, self._before))
        return Scored([scores[at] for at in range(len(asked))], usage)

    async def _ask(self, asked: Sequence[Asked], scores: dict[int, list[float]], numbers: Iterator[int]) -> None:
        for number in numbers:
            question = asked[number]
            first, *others = question.options
            tokens = await self._score(question.ids, first, _ALTERNATIVES)
            found = dict(tokens[0].top) | {tokens[0].id: tokens[0].logprob}
            sums = [sum(each.logprob for each in tokens)]
            for option in others:
                best, known = max(sums), found.get(option[0])
                if known is None or (len(option) > 1 and known > best - _NEGLIGIBLE):
                    known = sum(each.logprob for each in await self._score(question.ids, option))
                sums.append(known)
            scores[number] = sums

    async def _score(self, ids: list[int], option: list[int], alternatives: int = 0) -> list[IdLogprob]:
        """The option's tokens."""
        generation = self._engine.generate(self._with(ids, option, alternatives))
        logprobs: list[IdLogprob] = []
        try:
            async for chunks in generation:
                for chunk in chunks:
                    if isinstance(chunk, Progress):
                        logprobs += chunk.logprobs or ()
                    elif isinstance(chunk, Accepted) and self._cached is None:
                        self._cached = chunk.cached_tokens
                    elif isinstance(chunk, End):
                        if chunk.error is not None:
                            raise chunk.error
                        # Only the engine knows how many tokens images take.
                        self._before = max(self._before, chunk.usage.prompt - len(ids) - len(option))
        except asyncio.CancelledError:
            generation.cancel()
            async for _ in generation:  # the place is free when it ends
                pass
            raise
        logprobs = logprobs[-len(option) :]
        if len(logprobs) < len(option):
            raise Incomplete("the engine did not report the log probabilities of an option")
        return logprobs

    def _with(self, ids: list[int], option: list[int], alternatives: int) -> Prompt:
        """Behind the last text of the input: where media have no marks, they come after all text."""
        at = max(place for place, part in enumerate(self._parts) if isinstance(part, TokenRun))
        run = self._parts[at]
        whole = TokenRun([*(run.ids if isinstance(run, TokenRun) else ()), *ids, *option])
        parts = (*self._parts[:at], whole, *self._parts[at + 1 :])
        return replace(self._prompt, parts=parts, logprobs_last=len(option), prompt_logprobs=alternatives)
