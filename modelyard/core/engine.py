"""The seam to every engine: two kinds, and no third.

A `TextEngine` takes token ids and gives token ids back; templates, stop strings and output parsing are the gateway's. A
`ChatEngine` takes a request and gives events back. An engine module `engines/<backend>` offers

    Options             a pydantic model: the backend's own fields of a model definition
    CAPABILITIES        what it can at best, known without its library; a model and its settings may allow less
    HOLDS_WEIGHTS       False where a second process may open the same engine for free
    REMOTE              True where requests leave this machine (absent means False)
    COUNTS_LOCALLY      True where a chat engine also offers `tokenizer_path` and `chat_template`: it need not be up
    OWN_PROCESS         True where it should get a process of its own unless the settings say otherwise (absent: False)
    own_process(…)      the same where it depends on the model's fields, which it is given as they are written
    LIVE_OVERRIDES      field → its type with its range: what one load may set for itself (absent: nothing)
    verify()            raises where its native library does not work on this machine (absent: it has none)
    explain(error, …)   why it did not open, out of the last lines of its process (absent: the error says it)
    kind(options)       "text" or "chat"
    create(spec)        the engine, not yet opened
    estimate(spec, …)   the memory it would take, before anything is loaded

and, for token engines, `tokenizer_path(options)`, `chat_template(options)` (None: look elsewhere) and, where the engine
has one, `PROMPT_FORMAT`, the built-in template to fall back on.

An engine never queues: the scheduler hands out no more than `capacity` leases at a time.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from msgspec import Struct, field

from modelyard.core.errors import ModelyardError
from modelyard.core.events import Event, Timings, Usage
from modelyard.core.request import Constraint, Priority, Request, Sampling
from modelyard.core.tokenizer import IdLogprob

T_co = TypeVar("T_co", covariant=True)


# --- what goes in ---------------------------------------------------------------------------------------------------


class TokenRun(Struct, frozen=True, tag="tokens", gc=False):
    ids: list[int]


class Media(Struct, frozen=True, tag="media"):
    kind: Literal["image", "audio"]
    sha256: str
    data: bytes
    n_tokens: int


class Prompt(Struct, frozen=True, kw_only=True, gc=False):
    """One job for a TextEngine. It crosses processes: values only."""

    parts: tuple[TokenRun | Media, ...]
    sampling: Sampling = Sampling()
    max_tokens: int = 1
    stop_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    cache: str = ""
    session: str | None = None
    priority: Priority = "main"
    adapters: tuple[tuple[str, float], ...] = ()
    logprobs: int | None = None
    deadline: float | None = None  # unix time: it crosses processes
    trace: str = ""
    dedup_key: str | None = None  # jobs that are the same in this, too, and in all that is asked, may share one run

    @property
    def n_tokens(self) -> int:
        return sum(len(p.ids) if isinstance(p, TokenRun) else p.n_tokens for p in self.parts)

    @property
    def ids(self) -> list[int]:
        """All token ids in order; media hold none."""
        if len(self.parts) == 1 and isinstance(self.parts[0], TokenRun):
            return self.parts[0].ids
        return [i for p in self.parts if isinstance(p, TokenRun) for i in p.ids]


# --- what comes out -------------------------------------------------------------------------------------------------


class Accepted(Struct, frozen=True, tag=True, gc=False):
    """The job has its place; prefill begins. `divergence` is the first token that no cached KV covered. `elsewhere` is
    how many of its tokens another sequence has, where that is more and copying it would not pay."""

    cached_tokens: int = 0
    divergence: int | None = None
    evicted: bool = False
    elsewhere: int = 0


class Progress(Struct, frozen=True, tag=True, gc=False):
    done: int
    total: int


class Tokens(Struct, frozen=True, tag=True, gc=False):
    ids: list[int]
    logprobs: list[IdLogprob] | None = None


class End(Struct, frozen=True, tag=True):
    """The job is over and its slot is free. `error` is set exactly when `reason` is "error"."""

    reason: Literal["stop", "length", "window", "cancelled", "error"]
    usage: Usage = Usage()
    timings: Timings = Timings()
    error: ModelyardError | None = None


Chunk = Accepted | Progress | Tokens | End


class Generation(Protocol[T_co]):
    """A running job. Iterating gives what has arrived since the last look, in batches that are never empty.

    Not an async generator: those die when a waiting `anext` is cancelled, and `aclose()` during `anext` raises.
    `cancel` is synchronous, idempotent and may be called from any thread; iteration still ends with its last item.
    """

    def __aiter__(self) -> Generation[T_co]: ...
    async def __anext__(self) -> Sequence[T_co]: ...
    def cancel(self) -> None: ...


# --- what an engine says of itself ----------------------------------------------------------------------------------


class CacheInfo(Struct, frozen=True):
    """A named KV context: `window` is ONE conversation's, never shared; `parallel` conversations fit at a time."""

    window: int
    parallel: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    description: str = ""
    # For engines that compute here; None is the engine's own setting for the model.
    n_batch: int | None = None
    n_ubatch: int | None = None
    n_threads: int | None = None
    flash_attn: bool | None = None


class Capabilities(Struct, frozen=True):
    modalities: tuple[str, ...] = ("text",)
    multi_turn: bool = True
    tools: bool = True
    structured: bool = False
    streaming: bool = True
    logprobs: bool = False
    lora: bool = False
    embeddings: bool = False
    ignored: tuple[str, ...] = ()  # sampling fields this engine accepts and cannot honour
    # Of an engine that renders by itself; for the others the template tells (`Renderer.thinking_modes`).
    thinking_modes: tuple[str, ...] = ("default",)


class EngineInfo(Struct, frozen=True):
    backend: str
    caches: Mapping[str, CacheInfo] = field(default_factory=dict)
    capabilities: Capabilities = Capabilities()
    device: str = "cpu"
    page: int = 1  # tokens of KV are kept and found again so many at a time; 0: none are kept between requests

    @property
    def capacity(self) -> int:
        return sum(c.parallel for c in self.caches.values())


class SequenceStats(Struct, frozen=True):
    """One place for a conversation. `session` is whose KV it holds; `used` the unix time of its last step."""

    id: int
    tokens: int = 0
    running: bool = False
    session: str | None = None
    used: float | None = None


class CacheStats(Struct, frozen=True):
    """Tokens since the engine was opened, and evictions: conversations that were thrown out for another."""

    reused_tokens: int = 0
    evaluated_tokens: int = 0
    evictions: int = 0
    sequences: tuple[SequenceStats, ...] = ()


class EngineStats(Struct, frozen=True):
    running: int = 0
    sequences: int = 0
    occupied_tokens: int = 0
    reused_tokens: int = 0
    evaluated_tokens: int = 0
    copied_tokens: int = 0  # of the reused ones: from another sequence's KV
    restored_tokens: int = 0  # held from the start, saved by an engine before this one
    guessed_tokens: int = 0  # by speculation; `accepted_tokens` of them came true
    accepted_tokens: int = 0
    caches: Mapping[str, CacheStats] = field(default_factory=dict)


class MemoryEstimate(Struct, frozen=True):
    """Bytes on `device`. `page_cache` comes on top of the total: clean pages of the model's file that are resident
    until the kernel needs their memory."""

    weights: int = 0
    kv: int = 0
    compute: int = 0
    device: str = "cpu"
    page_cache: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.compute


class EngineSpec(Struct, frozen=True):
    """What an engine is made from: a model's definition with its caches, all names and defaults resolved."""

    model: str
    options: Any  # the engine module's own Options
    caches: Mapping[str, CacheInfo]
    modalities: tuple[str, ...] = ("text",)
    python: str | None = None  # interpreter of the process that it gets; None: this one's


class Control(Struct, frozen=True):
    op: Literal["evict", "save", "restore", "load_adapter", "unload_adapter"]
    cache: str | None = None
    argument: str | None = None


OnProgress = Callable[[float, str], None]  # (fraction done, what is being done)


@runtime_checkable
class TextEngine(Protocol):
    info: EngineInfo
    lost: Future[ModelyardError]  # resolves when the engine dies: death is reported, nobody polls

    async def open(self, progress: OnProgress) -> None: ...
    def generate(self, prompt: Prompt) -> Generation[Chunk]: ...
    def stats(self) -> EngineStats: ...
    async def control(self, op: Control) -> None: ...
    async def close(self) -> None: ...


@runtime_checkable
class ChatEngine(Protocol):
    info: EngineInfo
    lost: Future[ModelyardError]

    async def open(self, progress: OnProgress) -> None: ...
    def chat(self, request: Request) -> Generation[Event]: ...
    async def count(self, request: Request) -> int | None: ...
    def stats(self) -> EngineStats: ...
    async def close(self) -> None: ...


Engine = TextEngine | ChatEngine


class Embeddings(Struct, frozen=True):
    vectors: list[list[float]]
    prompt_tokens: int


@runtime_checkable
class EmbeddingEngine(Protocol):
    """An engine that can also turn token runs into vectors."""

    async def embed(self, batch: Sequence[Sequence[int]]) -> Embeddings: ...


class AvailableMemory(Struct, frozen=True):
    """What an estimate is held against: free bytes of RAM and of each GPU, by UUID."""

    ram_free: int
    gpus: Mapping[str, int] = field(default_factory=dict)


class Node(Struct, frozen=True):
    """A machine on which a replica may be loaded: by its name, or this one, which has none. Of one whose `machine` is
    not known nobody judges what fits there."""

    name: str = ""
    machine: AvailableMemory | None = None


class EngineModule(Protocol):
    """The shape of a module in `engines/`."""

    Options: type
    CAPABILITIES: Capabilities
    HOLDS_WEIGHTS: bool

    def kind(self, options: Any) -> Literal["text", "chat"]: ...
    def create(self, spec: EngineSpec) -> Engine: ...
    def estimate(self, spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate: ...
