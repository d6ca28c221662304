"""A request that is ready to run: resolved, rendered, tokenized and known to fit its window."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.engine import Capabilities, Media, Prompt, TokenRun
from modelyard.core.errors import ContextOverflow, OutputOverflow
from modelyard.core.events import Usage
from modelyard.core.lease import LeaseRequest
from modelyard.core.request import Caller, Constraint, Priority, Request, Sampling
from modelyard.gateway.model import Model
from modelyard.gateway.priority import background_task_id
from modelyard.prompt.media import pictures
from modelyard.router.routes import Target


class OutputBudget(Struct, frozen=True, gc=False):
    """How many tokens may be generated, and what it means to use them all."""

    max_tokens: int
    limit: Literal["max_tokens", "window"]


def output_budget(prompt_tokens: int, wanted: int | None, window: int, strict: bool) -> OutputBudget:
    """Clamp the wanted output to the window. At least one token must fit: a prompt as long as the window does not."""
    left = window - prompt_tokens
    if left < 1:
        raise ContextOverflow(prompt_tokens, window)
    if wanted is None:
        return OutputBudget(left, "window")
    if wanted > left:
        if strict:
            raise OutputOverflow(prompt_tokens, wanted, window)
        return OutputBudget(left, "window")
    return OutputBudget(wanted, "max_tokens")


class RenderedPrompt(Struct, frozen=True, gc=False):
    """One prompt of a job; `text` is its rendered form with the shield's marks: the scanner reads its tail."""

    ids: list[int]
    text: str
    room: OutputBudget


class PreparedRequest(Struct, frozen=True, kw_only=True, gc=False):
    """What follows from it is asked by methods: a property costs three times as much, and every job is asked."""

    request: Request
    caller: Caller
    target: Target
    model: Model
    runs: tuple[RenderedPrompt, ...]  # empty for a ChatEngine: it renders by itself
    sampling: Sampling
    constraint: Constraint | None
    created: int
    tokenize_s: float
    able: Capabilities | None = None  # what the engine said of itself when the request was checked; None: it was not up
    priority: Priority = "main"

    @property
    def choices(self) -> int:
        return (len(self.runs) or 1) * self.request.n

    def session(self) -> str | None:
        """Session names are the client's own words: two keys that say the same must not meet. What runs in the
        background of a session is no part of its conversation, and must not take its place."""
        told = self.request.session
        if not told:
            return None
        return f"{self.caller.key}/{told}" + (
            f"~{background_task_id(self.request)}" if self.priority == "background" else ""
        )

    def is_repeatable(self) -> bool:
        """Whether asking the same again gives the same answer."""
        sampling = self.sampling
        return sampling.temperature == 0 or sampling.top_k == 1 or sampling.seed is not None

    def may_be_joined(self) -> bool:
        """A deadline is one client's own: nobody else's answer ends with it."""
        return self.caller.deadline is None and (self.is_repeatable() or self.caller.idempotency is not None)

    def joint(self, choice: int) -> str | None:
        """Under which name the same request by another gateway joins this one in a worker; None: none does."""
        if not self.may_be_joined():
            return None
        sure = None if self.is_repeatable() else self.caller.idempotency
        return repr((self.caller.key, choice, sure))  # nothing that a client says can make it another's

    def run(self, choice: int) -> RenderedPrompt | None:
        """The legacy API counts choices prompt by prompt: all answers to the first, then all to the second."""
        return self.runs[choice // self.request.n] if self.runs else None

    def characters(self, tokens: int) -> int:
        """How long the text of so many of the first prompt's tokens is."""
        return len(self.model.parts.vocab.decode(self.runs[0].ids[:tokens]))

    def counted(self, choice: int, usage: Usage) -> Usage:
        """What this choice adds to the sums: the first answer to a prompt has counted it for all."""
        return usage if choice % self.request.n == 0 else replace(usage, prompt=0, cached=0)

    def demand(self, *, again: bool = False) -> LeaseRequest:
        caller, runs = self.caller, self.runs
        return LeaseRequest(
            model=self.target.model,
            cache=self.target.cache,
            tokens=len(runs[0].ids) if len(runs) == 1 else sum([len(run.ids) for run in runs]),
            weight=self.choices,
            key=caller.key,
            session=self.session(),
            priority=self.priority,
            deadline=caller.deadline,
            trace=caller.trace,
            prompt=runs[0].ids if runs else (),
            again=again,
        )

    def chat(self, choice: int) -> Request:
        """The request as a ChatEngine gets it: for one answer, with the model's own defaults in it."""
        request, model = self.request, self.model
        return replace(
            request,
            n=1,
            sampling=_seeded(self.sampling, choice % request.n),
            max_tokens=request.max_tokens if request.max_tokens is not None else model.max_tokens,
            stop=(*model.stop, *request.stop),
        )

    def _pictures(self) -> tuple[Media, ...]:
        """Behind the tokens, among which the template has left a marker for each."""
        sees = "image" in self.model.modalities and self.model.parts.renderer.shows_images
        return pictures(self.request) if sees else ()

    def prompt(self, choice: int) -> Prompt:
        run, request, text = self.run(choice), self.request, self.model.text
        if run is None or text is None:
            raise ValueError("a chat engine takes the request itself")
        return Prompt(
            parts=(TokenRun(run.ids), *self._pictures()),
            sampling=_seeded(self.sampling, choice % request.n),
            max_tokens=run.room.max_tokens,
            stop_ids=text.stop_ids,
            constraint=self.constraint,
            cache=self.target.cache,
            session=self.session(),
            priority=self.priority,
            adapters=((request.lora_adapter, 1.0),) if request.lora_adapter else (),
            logprobs=request.logprobs,
            deadline=self.caller.deadline,
            trace=self.caller.trace,
            joint=self.joint(choice),
        )


def _seeded(sampling: Sampling, answer: int) -> Sampling:
    """The n answers to one seeded prompt differ from each other, and are the same n answers every time."""
    if answer == 0 or sampling.seed is None:
        return sampling
    return Sampling(seed=sampling.seed + answer).over(sampling)
