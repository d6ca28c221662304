"""What a client asks for, in no protocol's words: messages, tools, sampling, constraints.

The normal form that every reader produces and every writer accepts:

- The system prompt is a leading `system` message; later `system` and `developer` messages stay where they stand.
- Tool results live in `tool` messages of their own; neighbouring results share one message.
- A plain string is one `Text`. Neighbouring texts are not merged: a client's blocks stay its blocks.
- A call's arguments are the text that stood on the wire. They may not be JSON: models and clients break them.

What is made at every request is `gc=False`, here and in the other seams: a value that holds only values can be part of
no cycle, and the collector need not know of it.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field, to_builtins
from msgspec.structs import replace


class Text(Struct, frozen=True, tag="text", gc=False):
    text: str


class Image(Struct, frozen=True, tag="image", gc=False):
    """A picture by URL: `data:` always works, `http(s):` and `file:` only where the settings allow them."""

    url: str
    detail: str | None = None


class Thinking(Struct, frozen=True, tag="thinking", gc=False):
    """Reasoning that comes back from the client. `signature` is opaque and may be foreign, empty or missing."""

    text: str
    signature: str = ""
    redacted: bool = False


class ToolCall(Struct, frozen=True, tag="tool_call", gc=False):
    """`custom` calls carry free text instead of JSON; `namespace` is the Responses API's, mapped back going out.
    `verbatim` arguments are the model's own text, remembered: they are rendered as they stand."""

    id: str
    name: str
    arguments: str
    namespace: str | None = None
    custom: bool = False
    verbatim: bool = False


class ToolReference(Struct, frozen=True, tag="tool_reference", gc=False):
    """The place in the conversation where a deferred tool was discovered."""

    name: str


ResultPart = Text | Image | ToolReference


class ToolResult(Struct, frozen=True, tag="tool_result", gc=False):
    call_id: str
    content: tuple[ResultPart, ...] = ()
    is_error: bool = False
    custom: bool = False


Part = Text | Image | Thinking | ToolCall | ToolResult | ToolReference
Role = Literal["system", "developer", "user", "assistant", "tool"]


class Message(Struct, frozen=True, gc=False):
    role: Role
    parts: tuple[Part, ...] = ()
    name: str | None = None


class Tool(Struct, frozen=True):
    """A tool on offer. `server` tools are run by somebody else's cloud: accepted, never offered to a local model."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    kind: Literal["function", "custom", "server"] = "function"
    type: str | None = None
    namespace: str | None = None
    strict: bool | None = None
    deferred: bool = False
    grammar: dict[str, Any] | None = None


class ToolChoice(Struct, frozen=True):
    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None


class Sampling(Struct, frozen=True, omit_defaults=True):
    """Every knob is optional: None means «not asked for», so that layers of defaults can be laid under it."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: tuple[str, ...] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    beam_size: int | None = None
    seed: int | None = None
    logit_bias: dict[int, float] | None = None

    def over(self, base: Sampling) -> Sampling:
        """These values where they are set, the base's elsewhere."""
        if self is DEFAULT_SAMPLING or self == DEFAULT_SAMPLING:
            return base
        return replace(base, **to_builtins(self))  # what is not set is left out by `omit_defaults`, in C


DEFAULT_SAMPLING = Sampling()  # readers give this very one, and it is known by `is`


class Constraint(Struct, frozen=True):
    """What the output must look like, as data: compiled where it is used, never an object that crosses a process.

    `text` is the schema (JSON) or the grammar. With a `trigger` the output is free until that text (or the token of
    that text) was generated; then the grammar holds for what comes after it, and when it is complete all is free again.
    """

    kind: Literal["json_object", "json_schema", "gbnf", "regex", "lark", "tools"]
    text: str = ""
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    trigger: str | None = None
    tools: tuple[str, ...] = ()


class Reasoning(Struct, frozen=True):
    """How the client wants the model to think; None leaves it to the model's settings."""

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None
    visible: bool | None = None
    summary: str | None = None
    strict: bool = False  # `enabled` is a demand: a model without that switch refuses instead of doing as it does


Priority = Literal["main", "background"]


class Request(Struct, frozen=True, kw_only=True, gc=False):
    model: str
    messages: tuple[Message, ...] = ()
    instructions: bool = False  # the leading system message is this request's alone: no continuation inherits it
    prompts: tuple[str | tuple[int, ...], ...] = ()  # raw prompts: no template is applied, `messages` is empty
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool | None = None
    sampling: Sampling = DEFAULT_SAMPLING
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None  # how many alternatives a token; 0 = the chosen one only; None = off
    constraint: Constraint | None = None
    reasoning: Reasoning = Reasoning()
    stream: bool = False
    include_usage: bool = False
    lora_adapter: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    documents: tuple[dict[str, Any], ...] = ()
    priority: Priority | None = None
    session: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    previous: str | None = None  # previous_response_id, resolved by the gateway's store
    store: bool | None = None
    encrypted_reasoning: bool = False  # the client wants reasoning back in a form it can return next turn
    echo: bool = False  # legacy completions: the prompt is part of the answer
    suffix: str | None = None
    allow_remote: bool = False  # the client consents that this request leaves the machine
    dialect: str = ""  # where a path speaks several: the one to answer in
    warnings: tuple[str, ...] = ()  # what the reader accepted but could not carry over; the gateway logs it


class EmbeddingRequest(Struct, frozen=True, kw_only=True):
    """Texts or token runs to turn into vectors. `dimensions` cuts each vector short and brings it back to length 1."""

    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


class Caller(Struct, frozen=True, kw_only=True, gc=False):
    """Who asks, and by which door. `key` names the API key (never its secret) and scopes everything remembered."""

    trace: str
    endpoint: str
    key: str = ""
    allow_remote: bool = False
    arrived: float | None = None  # when the request came in, on `time.perf_counter`'s clock
    deadline: float | None = None  # unix time: queue and engine give up on it then
    idempotency: str | None = None  # the client's own name for this request, the same when it sends it again
