"""A client's request, independent of the protocol: messages, tools, sampling, constraints.

The normal form that every protocol reads into and writes from:

- The system prompt is a leading `system` message; later `system` and `developer` messages keep their position.
- Tool results are in `tool` messages; neighbouring results share one message.
- A plain string is one `Text`. Neighbouring texts are not merged.
- A call's arguments are the text on the wire. It may be invalid JSON.

Structs created for every request are `gc=False`: values cannot be part of a reference cycle.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from msgspec import Struct, field, to_builtins
from msgspec.structs import replace

FILE_ID = "file-id:"  # begins the URL of an image or document that is an uploaded file: here, or at an upstream
TOOL_SEARCH = ":tool_search"  # the `server` of calls with which the model finds deferred tools


class Text(Struct, frozen=True, tag="text", gc=False):
    text: str


MEDIA_MARK = "<__media__>"  # of llama-server: where the next file stands in a prompt without a template


class Image(Struct, frozen=True, tag="image", gc=False):
    """An image by URL: `data:` always works, `http(s):` and `file:` only if the settings allow them."""

    url: str
    detail: str | None = None


class Audio(Struct, frozen=True, tag="audio", gc=False):
    """A sound as a `data:` URL."""

    url: str


class Document(Struct, frozen=True, tag="document", gc=False):
    """A PDF by URL, like an image. The gateway replaces it by the images and the text of its pages."""

    url: str
    name: str = ""


class Thinking(Struct, frozen=True, tag="thinking", gc=False):
    """Reasoning returned by the client. `signature` is opaque and may be foreign, empty or missing."""

    text: str
    signature: str = ""
    redacted: bool = False


class ToolCall(Struct, frozen=True, tag="tool_call", gc=False):
    """`custom` calls carry free text instead of JSON; `namespace` is the Responses API's, restored in the reply.
    `verbatim` arguments are the model's generated text and are rendered unchanged. `server` is the label of the MCP
    server whose tool the gateway called, or calls once the client approves it. `vendor_type` is that of a tool whose
    calls have an item of their own (`Tool.vendor`)."""

    id: str
    name: str
    arguments: str
    namespace: str | None = None
    custom: bool = False
    verbatim: bool = False
    server: str | None = None
    vendor_type: str | None = None


class ToolReference(Struct, frozen=True, tag="tool_reference", gc=False):
    """The point in the conversation where a deferred tool was discovered."""

    name: str


ResultPart = Text | Image | Audio | Document | ToolReference


class ToolResult(Struct, frozen=True, tag="tool_result", gc=False):
    call_id: str
    content: tuple[ResultPart, ...] = ()
    is_error: bool = False
    custom: bool = False


class ToolApproval(Struct, frozen=True, tag="tool_approval", gc=False):
    """The client approves a call that the gateway asked about; the gateway runs it, and its result comes here."""

    call_id: str


class ItemReference(Struct, frozen=True, tag="item_reference", gc=False):
    """An output item of a stored response. The gateway replaces it by the item's parts, and leaves it out if it is
    `optional` and not stored."""

    id: str
    optional: bool = False


class Compaction(Text, frozen=True, tag="compaction", gc=False):
    """A summary of the conversation before it, in a reply. A client sends it back, and it is read as a text."""


Part = Text | Image | Audio | Document | Thinking | ToolCall | ToolResult | ToolReference | ToolApproval | ItemReference
Role = Literal["system", "developer", "user", "assistant", "tool"]


class Message(Struct, frozen=True, gc=False):
    role: Role
    parts: tuple[Part, ...] = ()
    name: str | None = None


SUMMARY = "Summary of the conversation before this point:\n\n"  # begins the text that a compaction is read as


def summary_message(summary: str) -> Message:
    return Message("user", (Text(SUMMARY + summary),))


class ToolSelection(Struct, frozen=True):
    """Some tools of a server: those with one of the `names`, and if `read_only` is set, only those whose server says
    that they are (True) or are not (False)."""

    names: tuple[str, ...] | None = None  # None: any
    read_only: bool | None = None

    def has(self, name: str, read_only: bool) -> bool:
        return (self.names is None or name in self.names) and self.read_only in (None, read_only)


class ToolServer(Struct, frozen=True, kw_only=True):
    """An MCP server that a request names. `label` names it in the reply; without a `url` it is one of the
    configuration. Calls of the tools in `asks` need the client's approval, except those in `approved`."""

    label: str
    url: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    tools: ToolSelection = ToolSelection()
    excluded: tuple[str, ...] = ()
    asks: ToolSelection | None = None
    approved: ToolSelection | None = None
    is_listed: bool = False  # the conversation has the list of its tools, so the reply does not repeat it

    def offers(self, tool: str, read_only: bool) -> bool:
        return self.tools.has(tool, read_only) and tool not in self.excluded

    def asks_about(self, tool: str, read_only: bool) -> bool:
        if self.asks is None or not self.asks.has(tool, read_only):
            return False
        return self.approved is None or not self.approved.has(tool, read_only)


class Tool(Struct, frozen=True):
    """An offered tool. `server` tools run at a provider: accepted, but not offered to a local model. If there is a
    `server`, it stands for all tools of this MCP server, which the gateway lists and calls. `vendor` is the client's
    entry for a tool that it runs and whose schema a vendor publishes under the name `type`; members of a set share it.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    kind: Literal["function", "custom", "server"] = "function"
    type: str | None = None
    namespace: str | None = None
    strict: bool | None = None
    deferred: bool = False
    grammar: dict[str, Any] | None = None
    server: ToolServer | None = None
    vendor: dict[str, Any] | None = None


class ToolChoice(Struct, frozen=True):
    """`server`: the named tool, or any tool, of this MCP server."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str | None = None
    server: str | None = None


class Sampling(Struct, frozen=True, omit_defaults=True):
    """Every field is optional; None means "not set", so that defaults apply."""

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
    top_n_sigma: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    adaptive_target: float | None = None
    adaptive_decay: float | None = None
    repeat_last_n: int | None = None  # tokens that penalties look back at; -1: all
    samplers: tuple[str, ...] | None = None  # those that are used, in their order
    min_tokens: int | None = None  # before one that ends the output
    ignore_eos: bool | None = None  # no token ends the output

    def min_output(self, max_tokens: int) -> int:
        """How many tokens come before one may end the output."""
        return max_tokens if self.ignore_eos else min(self.min_tokens or 0, max_tokens)

    def over(self, base: Sampling) -> Sampling:
        """These values if they are set, else the base's."""
        if self is DEFAULT_SAMPLING or self == DEFAULT_SAMPLING:
            return base
        return replace(base, **to_builtins(self))  # `omit_defaults` drops unset fields


DEFAULT_SAMPLING = Sampling()  # a singleton, compared with `is`


class Constraint(Struct, frozen=True):
    """A constraint on the output, as data; the engine compiles it.

    `text` is the schema (JSON) or the grammar. With a `trigger` the output is free until that text (or its token) was
    generated; then the grammar applies until it is complete, and the output is free again. `schema` is the response
    schema (JSON) that a grammar includes beside reasoning and calls.
    """

    kind: Literal["json_object", "json_schema", "gbnf", "regex", "lark", "tools"]
    text: str = ""
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    trigger: str | None = None
    tools: tuple[str, ...] = ()
    schema: str = ""


class Reasoning(Struct, frozen=True):
    """The client's reasoning settings; None: the model's settings apply."""

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None
    visible: bool | None = None
    both_names: bool = False  # Chat: the reply has it as `reasoning` too
    in_text: Literal["only", "too"] | None = None  # Chat: the text has it, between tags; the field only with "too"
    summary: str | None = None
    strict: bool = False  # refuse the request if the model has no such switch


class Infill(Struct, frozen=True):
    """What is behind a gap in a text, `suffix`, and what is in it already, `start`. `files` are names and texts of
    other files of the project; None: the model is not told that there is a project."""

    suffix: str
    start: str = ""
    files: tuple[tuple[str, str], ...] | None = None


Priority = Literal["main", "background"]


class ClearToolUses(Struct, frozen=True):
    """Results of tools that the model is not shown again: of all calls but the newest `keep`, where the prompt has more
    than `above_tokens` and the conversation more calls than `above_uses`; not of the tools in `exclude`, and only if
    that makes `at_least` tokens. `inputs`: the arguments of those calls too, of all tools or of the named ones."""

    keep: int = 3
    above_tokens: int = 100_000
    above_uses: int = 0
    at_least: int = 0
    exclude: tuple[str, ...] = ()
    inputs: bool | tuple[str, ...] = False


class ContextManagement(Struct, frozen=True):
    """What becomes of a long conversation before the model reads it: `modelyard.gateway.compaction`. The newest turns
    whose reasoning is shown are `keep_thinking`; None: of all. Beyond `compact_above` tokens, or `compact_now`, it is
    summarised; with `compact_now` or `pause` the reply is the summary alone. `instructions` are for the summary: with
    `compact_now` in place of our own."""

    clear_tool_uses: ClearToolUses | None = None
    keep_thinking: int | None = None
    compact_above: int | None = None
    compact_now: bool = False
    pause: bool = False
    instructions: str = ""


class Fallback(Struct, frozen=True):
    """Another model that may answer, named by the client, and what it is asked in place of the request's own."""

    model: str
    max_tokens: int | None = None
    reasoning: Reasoning | None = None


class Request(Struct, frozen=True, kw_only=True, gc=False):
    model: str
    messages: tuple[Message, ...] = ()
    instructions: bool = False  # the leading system message applies to this request only
    prompts: tuple[str | tuple[int, ...], ...] = ()  # without a template; `messages` has their media only
    mixed_prompts: tuple[tuple[str | int, ...], ...] = ()  # the same with texts among token ids, until it is prepared
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None  # of MCP servers' tools
    sampling: Sampling = DEFAULT_SAMPLING
    biased_texts: tuple[tuple[str, float], ...] = ()  # whose tokens `logit_bias` gets, when it is prepared
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None  # alternatives per token; 0: the chosen one only; None: off
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    post_sampling: bool = False  # as `Prompt.post_sampling`
    constraint: Constraint | None = None
    reasoning: Reasoning = Reasoning()
    stream: bool = False
    include_usage: bool = False
    progress: bool = False  # a stream reports how much of the prompt is read
    timings: Literal["last", "all"] | None = None  # which chunks of the reply have the times of its parts
    lora_adapter: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool | None = None  # False: the prompt ends with the last message; None: see the renderer
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None  # a name: that part of it
    documents: tuple[dict[str, Any], ...] = ()
    priority: Priority | None = None
    session: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    previous: str | None = None  # previous_response_id, or a thread's previous_message_id; resolved by the gateway
    thread: bool = False  # Messages: the conversation is kept under the reply's id
    store: bool | None = None
    background: bool = False  # Responses: it runs without its client, which asks for the result later
    conversation: str | None = None  # the stored conversation that it continues, resolved by the gateway
    has_references: bool = False  # its messages contain ItemReference, resolved by the gateway
    earlier: int = 0  # how many of the first messages are instructions or come from that conversation
    load_only: bool = False  # the model is loaded, or with `keep_alive` 0 unloaded; nothing is generated
    keep_alive: float | None = None  # seconds that the model stays loaded without a request after this one; inf: always
    warm_up: bool = False  # the engine reads the prompt for a later request; what it generates is dropped
    encrypted_reasoning: bool = False  # return reasoning in a form that the client can send back
    echo: bool = False  # legacy completions: repeat the prompt in the reply
    infill: Infill | None = None  # each prompt is the text before a gap that the model fills
    is_text: bool = False  # its messages are a text to continue, if the model has no chat template
    repeated: dict[str, Any] | None = None  # fields of the body that the reply repeats and nothing else reads
    reply_fields: tuple[str, ...] = ()  # the fields of the reply that the client wants; empty: all
    allow_remote: bool = False  # the client consents to remote engines; it counts on a server without keys
    kv_scope: str = ""  # as `Prompt.scope`; the gateway sets it
    slot: int | None = None  # as `Prompt.slot`
    dialect: str = ""  # on a path with several dialects: the reply's dialect
    context: ContextManagement | None = None
    fallbacks: tuple[Fallback, ...] = ()  # tried after the route's own
    applied_edits: tuple[dict[str, Any], ...] = ()  # of `context`, as the reply has them; the gateway sets it
    warnings: tuple[str, ...] = ()  # accepted fields without effect; the gateway logs and counts them


class EmbeddingRequest(Struct, frozen=True, kw_only=True):
    """Texts or token ids to embed. `dimensions` truncates each vector and normalises it again. `truncate`
    reads only as much of a long input as fits the window."""

    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    truncate: bool = False
    keep_alive: float | None = None  # as in `Request`
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


class RerankRequest(Struct, frozen=True, kw_only=True):
    """Documents to order by their relevance to a query. `top_n` limits the reply."""

    model: str
    query: str
    documents: tuple[str, ...]
    top_n: int | None = None
    return_documents: bool = False
    dialect: Literal["jina", "tei"] = "jina"  # the shape of the reply
    user: str | None = None


DEFAULT_MODEL = "default"  # of bodies in which the model is optional: the name that the router falls back from
LOCAL_USER = "uid:"  # begins what scopes the state of another user of the machine, on a server without keys


def is_api_key(key: str) -> bool:
    """Whether a caller's `key` names an API key, and not a user of a server without keys."""
    return bool(key) and not key.startswith(LOCAL_USER)


class Reservation(Protocol):
    """What a request has reserved of the server's memory and of its key's budget: `modelyard.accounts.admission`."""

    def grow(self, size: int) -> None: ...
    async def hold(self, model: str, prompt: int, output: int, choices: int = 1) -> int: ...


class Caller(Struct, frozen=True, kw_only=True, gc=False):
    """Who sent the request, and to which endpoint. `key` names the API key (never its secret) and scopes all state. On
    a server without keys it is "" for the server's own user, and `uid:…` for another one of the machine."""

    trace: str
    endpoint: str
    key: str = ""
    allow_remote: bool = False  # consent to remote engines: of the key, or of the request on a server without keys
    forbid_remote: bool = False  # by the key; nothing overrides it
    is_retry: bool = False  # of a request that was counted against its key before
    allowed: tuple[str, ...] = ()  # the models, caches and routes that the key may use; empty: all
    arrived: float | None = None  # when the request came in, on `time.perf_counter`'s clock
    deadline: float | None = None  # `time.monotonic`; queue and engine drop the request then
    idempotency: str | None = None  # the client's idempotency key
    priority: Priority | None = None  # of all its requests; None: each request's own
    reservation: Reservation | None = None
