"""A request that is ready to run: routed, rendered, tokenized, known to fit its window, and with its priority."""

from __future__ import annotations

import math
import re
import zlib
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from modelyard.core.engine import Capabilities, Media, Prompt, ReasoningBudget, TokenRun
from modelyard.core.errors import ContextOverflow, OutputOverflow
from modelyard.core.events import Usage
from modelyard.core.pool import LeaseRequest
from modelyard.core.request import Caller, Constraint, Message, Priority, Request, Sampling, Text, ToolCall, ToolResult
from modelyard.gateway.model import Model, media_kinds
from modelyard.gateway.server_tools import ServerTools
from modelyard.prompt.images import request_media
from modelyard.router.router import Target
from modelyard.telemetry.history import SkippedModel

if TYPE_CHECKING:
    from modelyard.gateway.compaction import CompactionPlan
    from modelyard.gateway.fallbacks import FallbackPlan


class OutputBudget(Struct, frozen=True, gc=False):
    """How many tokens may be generated, and which limit that number comes from."""

    max_tokens: int
    limit: Literal["max_tokens", "window"]


def output_budget(prompt_tokens: int, requested: int | None, window: int, strict: bool) -> OutputBudget:
    """Clamp the requested output to the window. At least one output token must fit."""
    free = window - prompt_tokens
    if free < 1:
        raise ContextOverflow(prompt_tokens, window)
    if requested is None:
        return OutputBudget(free, "window")
    if requested > free:
        if strict:
            raise OutputOverflow(prompt_tokens, requested, window)
        return OutputBudget(free, "window")
    return OutputBudget(requested, "max_tokens")


CHARS_PER_TOKEN = 4


def estimated_tokens(request: Request) -> int:
    """Of a prompt whose tokens only another server could count."""
    parts = [part for message in request.messages for part in message.parts]
    parts += [each for part in parts if isinstance(part, ToolResult) for each in part.content]
    chars = sum(len(part.text) for part in parts if isinstance(part, Text))
    prompts = sum(len(p) // (CHARS_PER_TOKEN if isinstance(p, str) else 1) for p in request.prompts)
    return prompts + chars // CHARS_PER_TOKEN


class RenderedPrompt(Struct, frozen=True, gc=False):
    """One tokenized prompt. `text` is its rendered form with the shield's marks; the scanner reads its tail."""

    ids: list[int]
    text: str
    budget: OutputBudget


class PreparedRequest(Struct, frozen=True, kw_only=True, gc=False):
    request: Request
    caller: Caller
    target: Target
    model: Model
    prompts: tuple[RenderedPrompt, ...]  # empty for a ChatEngine that renders by itself
    sampling: Sampling
    constraint: Constraint | None
    not_enforced: tuple[str, ...] = ()  # keywords of schemas that the constraint leaves out
    created: int
    tokenize_s: float
    capabilities: Capabilities | None = None  # the engine's, as checked; None: the engine was not loaded
    priority: Priority = "main"
    reasoning: ReasoningBudget | None = None  # for a TextEngine
    plan: FallbackPlan | None = None  # other models of the route that may answer instead
    skipped: tuple[SkippedModel, ...] = ()  # models of the route that could not
    wait_until: float | None = None  # `time.monotonic`; for a slot, then the next model is tried
    server_tools: ServerTools | None = None  # of MCP servers, which the gateway calls
    compaction: CompactionPlan | None = None  # this is the request for a summary; what follows it
    compacted: str = ""  # how much of the conversation its route had summarised, as a header
    edits: tuple[dict[str, Any], ...] = ()  # what was cleared of the conversation, as the reply has it
    ignored: tuple[str, ...] = ()  # what the client sent and has no effect

    @property
    def choices(self) -> int:
        return (len(self.prompts) or len(self.request.prompts) or 1) * self.request.n

    def session_key(self) -> str | None:
        """The session name scoped by API key, because clients choose the names. A background task of a session gets
        its own key, so that it does not evict the conversation's KV."""
        session = self.request.session
        if not session:
            return None
        suffix = f"~{background_task_id(self.request)}" if self.priority == "background" else ""
        return f"{self.caller.key}/{session}{suffix}"

    @property
    def kv_scope(self) -> str:
        """KV is reused among requests of one scope: of one API key, unless the keys share the cache."""
        return "" if self.target.share_across_keys else self.caller.key

    def is_deterministic(self) -> bool:
        """Whether the same request gives the same reply again."""
        sampling = self.sampling
        return sampling.temperature == 0 or sampling.top_k == 1 or sampling.seed is not None

    def is_shareable(self) -> bool:
        """Whether an identical request may read the same stream. A deadline belongs to one client only, and tools that
        the gateway calls may do something."""
        caller = self.caller
        if caller.deadline is not None or self.server_tools is not None:
            return False
        return caller.idempotency is not None or self.is_deterministic()

    def dedup_key(self, choice: int) -> str | None:
        """Under which key a worker may merge this prompt with the same one of another gateway; None: never.

        `repr` quotes the client's strings, so no client can build another one's key.
        """
        if not self.is_shareable():
            return None
        idempotency = None if self.is_deterministic() else self.caller.idempotency
        return repr((self.caller.key, choice, idempotency))

    def rendered(self, choice: int) -> RenderedPrompt | None:
        """The legacy API counts choices prompt by prompt: all replies to the first, then all to the second."""
        return self.prompts[choice // self.request.n] if self.prompts else None

    def text_length(self, tokens: int) -> int:
        """Characters of the first prompt's first `tokens` tokens."""
        return len(self.model.pipeline.tokenizer.decode(self.prompts[0].ids[:tokens]))

    def billed_usage(self, choice: int, usage: Usage) -> Usage:
        """What this choice adds to the totals: only the first reply to a prompt counts the prompt."""
        return usage if choice % self.request.n == 0 else replace(usage, prompt=0, cached=0)

    def lease_request(self, *, is_retry: bool = False) -> LeaseRequest:
        caller, prompts = self.caller, self.prompts
        return LeaseRequest(
            model=self.target.model,
            cache=self.target.cache,
            tokens=len(prompts[0].ids) if len(prompts) == 1 else sum([len(prompt.ids) for prompt in prompts]),
            weight=self.choices,
            key=caller.key,
            session=self.session_key(),
            priority=self.priority,
            deadline=caller.deadline if self.wait_until is None else min(self.wait_until, caller.deadline or math.inf),
            trace=caller.trace,
            prompt=prompts[0].ids if prompts else (),
            is_retry=is_retry or caller.is_retry,
            keep_alive=self.request.keep_alive,
        )

    def engine_request(self, choice: int) -> Request:
        """The request as a ChatEngine takes it: for one reply, with the model's defaults applied."""
        request, model = self.request, self.model
        return replace(
            request,
            prompts=request.prompts[choice // request.n :][:1],
            n=1,
            sampling=_with_seed(self.sampling, choice % request.n),
            max_tokens=request.max_tokens if request.max_tokens is not None else model.entry.max_tokens,
            stop=(*model.entry.stop, *request.stop),
            kv_scope=self.kv_scope,
        )

    def engine_prompt(self, choice: int) -> Prompt:
        """The request as a TextEngine takes it."""
        rendered, request, model = self.rendered(choice), self.request, self.model
        if rendered is None or model.text is None:
            raise ValueError("a chat engine takes the request itself")
        parts: tuple[TokenRun | Media, ...] = (TokenRun(rendered.ids),)
        if len(model.modalities) > 1 and media_kinds(request):
            media, renderer = request_media(request), model.text.renderer
            # Without marks they come after the tokens: the template left a placeholder for each.
            parts = renderer.parts(rendered.text, media) if renderer.marks_media else (*parts, *media)
        sampling = self.sampling if request.n == 1 else _with_seed(self.sampling, choice % request.n)
        return Prompt(
            parts=parts,
            sampling=sampling,
            max_tokens=rendered.budget.max_tokens,
            stop_ids=model.text.stop_ids,
            constraint=self.constraint,
            reasoning=self.reasoning,
            cache=self.target.cache,
            scope=self.kv_scope,
            slot=request.slot,
            session=self.session_key(),
            priority=self.priority,
            adapters=((request.lora_adapter, 1.0),) if request.lora_adapter else (),
            logprobs=request.logprobs,
            post_sampling=request.post_sampling,
            prompt_logprobs=request.prompt_logprobs,
            deadline=self.caller.deadline,
            trace=self.caller.trace,
            dedup_key=self.dedup_key(choice),
        )

    def continued_prompt(self, choice: int, ids: list[int], sampling: Sampling) -> Prompt:
        """The prompt and what was generated for it, for the rest of the output with these values."""
        prompt = self.engine_prompt(choice)
        last = max(at for at, part in enumerate(prompt.parts) if isinstance(part, TokenRun))
        run = prompt.parts[last]
        continued = TokenRun([*run.ids, *ids]) if isinstance(run, TokenRun) else run
        return replace(
            prompt,
            parts=(*prompt.parts[:last], continued, *prompt.parts[last + 1 :]),
            sampling=sampling.over(prompt.sampling),
            max_tokens=prompt.max_tokens - len(ids),
            dedup_key=None,
        )


def _with_seed(sampling: Sampling, choice: int) -> Sampling:
    """The n replies to one seeded prompt differ from each other and are reproducible."""
    if choice == 0 or sampling.seed is None:
        return sampling
    return Sampling(seed=sampling.seed + choice).over(sampling)


# --- the priority of a request ----------------------------------------------------------------------------------------

_SMALL_TIER = re.compile(r"(?:^|[^a-z])haiku(?:[^a-z]|$)")
_SIDE_TASK = re.compile(r"\b(?:titles?|topic|summar(?:y|ies|i[sz]e\w*)|classif\w+|commit message)\b", re.IGNORECASE)
_TASK_CHARS = 400  # of the instructions that are searched for the task
_SHORT_ANSWER_TOKENS = 8192
_ID_CHARS = 4096  # of the instructions that identify a background task


def priority(request: Request) -> Priority:
    """Which requests run in the background: an agent's side requests, recognised by their shape.

    Some of them use the main model's name and session, so neither tells them apart. In this order:

        1. the request's own `priority`
        2. it offers tools                            main: a conversation, or a sub-agent's
        3. its model name is of the small tier        background
        4. calls in its history, and no tools         background: a summary for a conversation that is compacted
        5. only server-side tools                     background: a search on behalf of a conversation
        6. a single exchange of a session that asks   background: a title, a classification of a command
           for JSON of a schema, or for a short
           answer with a stop string, or whose
           instructions name such a task

    Everything else is main. A wrong "background" costs little: the request waits behind others for a bounded number of
    turns, and its KV is evicted first. A wrong "main" may evict a conversation's KV, which this exists to prevent.
    """
    if request.priority is not None:
        return request.priority
    if request.tools:
        return "main" if any(tool.kind != "server" for tool in request.tools) else "background"
    name = request.model.lower()
    if "haiku" in name and _SMALL_TIER.search(name) is not None:
        return "background"
    for message in request.messages:
        for part in message.parts:
            if type(part) is ToolCall:
                return "background"
    if request.session is not None and _is_single_exchange(request) and _is_small_task(request):
        return "background"
    return "main"


def background_task_id(request: Request) -> str:
    """Tell a session's background tasks apart by their instructions: the KV of each is worth keeping."""
    return f"{zlib.crc32(_instructions(request)[:_ID_CHARS].encode('utf-8', 'surrogatepass')):08x}"


def _is_single_exchange(request: Request) -> bool:
    """A prefilled reply at the end is not a second exchange."""
    roles = [message.role for message in request.messages if message.role in ("user", "assistant")]
    return "assistant" not in roles[:-1] and roles.count("user") <= 2


def _is_small_task(request: Request) -> bool:
    if request.constraint is not None and request.constraint.kind == "json_schema":
        return True
    is_short = request.max_tokens is not None and request.max_tokens <= _SHORT_ANSWER_TOKENS
    if request.stop and is_short and not request.stream:
        return True
    return _SIDE_TASK.search(_instructions(request)[:_TASK_CHARS]) is not None


def _instructions(request: Request) -> str:
    first = request.messages[0] if request.messages else Message("user")
    if first.role not in ("system", "developer"):
        return ""
    return "\n".join(part.text for part in first.parts if isinstance(part, Text))
