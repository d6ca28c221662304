"""The interface of every engine. There are two kinds.

A `TextEngine` takes token ids and returns token ids; templates, stop strings and output parsing are the gateway's. A
`ChatEngine` takes a request and returns events. An
`EnginePlugin` is what a backend is to the rest: the name in the configuration leads to it.

An engine does not queue: the scheduler grants at most `capacity` leases at a time.
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from msgspec import Struct, field

from modelyard.core.errors import ModelyardError
from modelyard.core.events import Event, Timings, Usage
from modelyard.core.request import Constraint, EmbeddingRequest, Priority, Request, RerankRequest, Sampling
from modelyard.core.tokenizer import IdLogprob

if TYPE_CHECKING:
    from pydantic import BaseModel

T_co = TypeVar("T_co", covariant=True)


# --- input ----------------------------------------------------------------------------------------------------------


class TokenRun(Struct, frozen=True, tag="tokens", gc=False):
    ids: list[int]


class Media(Struct, frozen=True, tag="media"):
    kind: Literal["image", "audio"]
    sha256: str
    data: bytes
    n_tokens: int


class ReasoningBounds(Struct, frozen=True):
    """A kind of reasoning: the texts around it, and the tokens that end it before the answer."""

    start: str
    ends: tuple[str, ...]
    closing: tuple[int, ...]


class ReasoningBudget(Struct, frozen=True):
    """After so many tokens of reasoning the engine generates the end of the block. `opened`: the prompt has opened a
    block of this kind."""

    tokens: int
    blocks: tuple[ReasoningBounds, ...]
    opened: int | None = None


class Prompt(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One generation for a TextEngine. It crosses processes, so it contains only values. `max_tokens` may be 0: then
    the prompt is only read."""

    parts: tuple[TokenRun | Media, ...]
    sampling: Sampling = Sampling()
    max_tokens: int = 1
    stop_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    reasoning: ReasoningBudget | None = None
    cache: str = ""
    scope: str = ""  # KV of another scope is never reused: whose it is would show in counts and times
    slot: int | None = None  # the sequence of the cache that it should have, if that is idle
    session: str | None = None
    priority: Priority = "main"
    adapters: tuple[tuple[str, float], ...] = ()
    logprobs: int | None = None
    post_sampling: bool = False  # `logprobs` are of the tokens that the samplers leave, as the last one draws them
    prompt_logprobs: int | None = None  # the same of the prompt's tokens, after the first; then no KV is reused
    logprobs_last: int | None = None  # … of so many of its last tokens only; KV before them is reused
    deadline: float | None = None  # `time.monotonic`; another process gets the seconds that are left
    trace: str = ""
    dedup_key: str | None = None  # equal prompts with an equal key may share one generation

    @property
    def n_tokens(self) -> int:
        total = 0
        for part in self.parts:
            total += len(part.ids) if isinstance(part, TokenRun) else part.n_tokens
        return total

    @property
    def has_media(self) -> bool:
        return len(self.parts) > 1 and any(isinstance(part, Media) for part in self.parts)

    @property
    def ids(self) -> list[int]:
        """All token ids in order; media have none."""
        if len(self.parts) == 1 and isinstance(self.parts[0], TokenRun):
            return self.parts[0].ids
        return [i for p in self.parts if isinstance(p, TokenRun) for i in p.ids]


# --- output ---------------------------------------------------------------------------------------------------------


class Accepted(Struct, frozen=True, tag="accepted", array_like=True, gc=False):
    """The engine has placed the prompt; prefill begins. `divergence` is the first token without cached KV. `elsewhere`:
    another sequence has this many of its tokens, which is more, but copying them would not pay."""

    cached_tokens: int = 0
    divergence: int | None = None
    evicted: bool = False
    elsewhere: int = 0


class Progress(Struct, frozen=True, tag="progress", array_like=True, gc=False):
    """How much of the prompt is read. `logprobs`: of the prompt's tokens that follow those of the last report."""

    done: int
    total: int
    logprobs: list[IdLogprob] | None = None


class Tokens(Struct, frozen=True, tag="t", array_like=True, gc=False):
    """Without ids it is the token that ended the output, which has only a log probability."""

    ids: list[int]
    logprobs: list[IdLogprob] | None = None


class End(Struct, frozen=True, tag="end", array_like=True):
    """The generation is over and its slot is free. `error` is set if and only if `reason` is "error"."""

    reason: Literal["stop", "length", "window", "cancelled", "error"]
    usage: Usage = Usage()
    timings: Timings = Timings()
    error: ModelyardError | None = None


Chunk = Accepted | Progress | Tokens | End


class Generation(Protocol[T_co]):
    """A running generation. Iterating gives what has arrived since the last step, in batches that are never empty.

    Not an async generator: those end when a waiting `anext` is cancelled, and `aclose()` during `anext` raises.
    `cancel` is synchronous, idempotent and thread-safe; iteration still ends with its last item.
    """

    def __aiter__(self) -> Generation[T_co]: ...
    async def __anext__(self) -> Sequence[T_co]: ...
    def cancel(self) -> None: ...


# --- what an engine reports about itself ----------------------------------------------------------------------------


class CacheInfo(Struct, frozen=True):
    """A named KV context: `window` tokens for each of `parallel` conversations at a time."""

    window: int
    parallel: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    description: str = ""
    # For engines that compute in this process; None: the engine's setting for the model.
    n_batch: int | None = None
    n_ubatch: int | None = None
    n_threads: int | None = None
    flash_attn: bool | None = None
    kv_unified: bool | None = None


class Capabilities(Struct, frozen=True):
    modalities: tuple[str, ...] = ("text",)
    modalities_need: str = ""  # what this machine lacks for more of them: a sentence for the client
    generates: bool = True  # it continues texts
    chat: bool = True  # and takes conversations: not without a chat template, which the model's definition knows
    multi_turn: bool = True
    tools: bool = True
    structured: bool = False
    streaming: bool = True
    logprobs: bool = False
    prompt_logprobs: bool = False
    post_sampling: bool = False  # log probabilities after the samplers
    reasoning_budget: bool = False  # it ends reasoning after a number of tokens
    lora: bool = False
    embeddings: bool = False
    embeddings_optional: bool = False  # the model's setting `embeddings` would add them
    rerank: bool = False
    ignored: tuple[str, ...] = ()  # sampling fields that the engine accepts and ignores; reported to the client
    # Of an engine that renders by itself; for others the template decides (`Renderer.thinking_modes`), and whether the
    # vocabulary has tokens for a gap between two texts.
    thinking_modes: tuple[str, ...] = ("default",)
    infill: bool = False


class EngineInfo(Struct, frozen=True):
    backend: str
    caches: Mapping[str, CacheInfo] = field(default_factory=dict)
    capabilities: Capabilities = Capabilities()
    device: str = "cpu"
    page: int = 1  # granularity of KV reuse in tokens; 0: no KV is kept between requests

    @property
    def capacity(self) -> int:
        return sum(c.parallel for c in self.caches.values())


class SequenceStats(Struct, frozen=True):
    """One sequence of a cache. `session` owns its KV; `used` is the unix time of its last step."""

    id: int
    tokens: int = 0
    running: bool = False
    session: str | None = None
    used: float | None = None


class PrefixStats(Struct, frozen=True):
    """One leaf of a cache's tree of prefixes: `tokens` of KV, the first `shared` of which the leaf before it has, too.
    It is in the sequence `id`, parked in RAM, or `stored` in a file only."""

    tokens: int
    shared: int = 0
    id: int | None = None
    session: str | None = None
    stored: bool = False


class CacheStats(Struct, frozen=True):
    """Totals since the engine was opened. `evictions`: conversations that lost their KV to another. `prefixes`: all KV,
    from left to right in the tree."""

    reused_tokens: int = 0
    evaluated_tokens: int = 0
    evictions: int = 0
    sequences: tuple[SequenceStats, ...] = ()
    prefixes: tuple[PrefixStats, ...] = ()
    guessed_tokens: int = 0  # as of the engine
    accepted_tokens: int = 0


class EngineStats(Struct, frozen=True):
    running: int = 0
    sequences: int = 0
    occupied_tokens: int = 0
    reused_tokens: int = 0
    evaluated_tokens: int = 0
    copied_tokens: int = 0  # of the reused tokens: copied from another sequence
    restored_tokens: int = 0  # loaded from a KV snapshot at the start
    guessed_tokens: int = 0  # drafted by speculation; `accepted_tokens` of them were right
    accepted_tokens: int = 0
    caches: Mapping[str, CacheStats] = field(default_factory=dict)
    adapters: tuple[tuple[str, float], ...] = ()  # loaded LoRA adapters: name and scale


class MemoryEstimate(Struct, frozen=True):
    """Bytes on `device`. `page_cache` comes on top of the total: clean pages of the model's file that are resident
    until the kernel needs their memory. `gpu_layers` of `layers` are on the GPU, if the engine can split a model, but
    for `ram_weights` of them; the rest of the bytes is in RAM."""

    weights: int = 0
    kv: int = 0
    compute: int = 0
    device: str = "cpu"
    page_cache: int = 0
    gpu_layers: int = 0
    layers: int = 0
    ram_weights: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.compute


class EngineSpec(Struct, frozen=True, omit_defaults=True):
    """What an engine is created from, and how many of them the pool runs. It crosses processes, so it contains only
    values; there `options` are those fields of the engine's Options that are set."""

    model: str
    options: Any  # the engine's Options
    caches: Mapping[str, CacheInfo] = field(default_factory=dict)
    modalities: tuple[str, ...] = ("text",)
    python: str | None = None  # interpreter for its process; None: the current one
    backend: str = ""
    identity: str = ""  # equal for two specs that create the same engine
    own_process: bool = False
    replicas: int = 1
    replica_max: int = 1
    target_inflight: int | None = None  # concurrent requests per replica, over all its caches
    autoload: bool = False
    enabled: bool = False  # loaded when a reload adds it; at the start the server loads it
    idle_ttl_s: float | None = None  # None: never unloaded when idle
    fault: ModelyardError | None = None  # a file or a library is missing: creating the engine fails with this
    is_faulty: bool = False  # a load is known to fail: `fault`, or what this machine lacks


class Control(Struct, frozen=True):
    op: Literal["evict", "save", "restore", "load_adapter", "unload_adapter", "save_slot", "restore_slot", "erase_slot"]
    cache: str | None = None
    argument: str | None = None
    slot: int = 0  # the sequence of the cache, whose KV is of `scope`; `argument` names its file
    scope: str = ""


class MovedKv(Struct, frozen=True):
    """What was saved, restored or erased."""

    tokens: int
    bytes: int


OnProgress = Callable[[float, str], None]  # (fraction, current step)


@runtime_checkable
class TextEngine(Protocol):
    info: EngineInfo
    lost: Future[ModelyardError]  # resolves when the engine dies

    async def open(self, progress: OnProgress) -> None: ...
    def generate(self, prompt: Prompt) -> Generation[Chunk]: ...
    def stats(self) -> EngineStats: ...
    async def control(self, op: Control) -> MovedKv | None: ...
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


class Ranking(Struct, frozen=True):
    """Documents by their numbers in the request, each with its score; the higher, the more relevant."""

    scores: list[tuple[int, float]]
    prompt_tokens: int


@runtime_checkable
class EmbeddingEngine(Protocol):
    """A text engine that also computes vectors: the embedding of each input, or the scores of a model that ranks."""

    async def embed(self, batch: Sequence[Sequence[int]]) -> Embeddings: ...


@runtime_checkable
class MediaEngine(Protocol):
    """A text engine that knows how many tokens images and audio take."""

    async def count_media(self, media: Sequence[Media]) -> list[int]: ...


@runtime_checkable
class ForwardingEngine(Protocol):
    """A chat engine whose server also embeds and ranks."""

    async def embed_inputs(self, request: EmbeddingRequest) -> Embeddings: ...
    async def rerank(self, request: RerankRequest) -> Ranking: ...


class AvailableMemory(Struct, frozen=True):
    """Free bytes of RAM and of each GPU (by UUID)."""

    ram_free: int
    gpus: Mapping[str, int] = field(default_factory=dict)


class Node(Struct, frozen=True):
    """A machine on which a replica may be loaded; the local one has no name. If its memory is unknown, nothing is
    checked against it."""

    name: str = ""
    memory: AvailableMemory | None = None


# --- the plug-in ----------------------------------------------------------------------------------------------------


def _estimate_nothing(spec: EngineSpec, machine: AvailableMemory) -> MemoryEstimate:
    del spec, machine
    return MemoryEstimate()


def _no_faults(spec: EngineSpec) -> Iterable[tuple[str, str]]:
    del spec
    return ()


class EnginePlugin(Struct, frozen=True, kw_only=True):
    """A backend: `ENGINE` of a module in `engines/`, or the object of an entry point `modelyard.engines`.

    Importing it must be cheap: `create` and `verify` import its library. `options` below is an instance of `Options`.
    """

    Options: type[BaseModel]  # the backend's fields of a model's section
    create: Callable[[EngineSpec], Engine]  # the engine, not yet opened
    kind: Literal["text", "chat"] = "text"  # an option with this name takes precedence
    capabilities: Capabilities = Capabilities()  # the most it can do; a model and its settings may allow less
    # What a model with these options can do before it is loaded; the path is that of a copy of its header.
    capabilities_of: Callable[[Any, Path | None], Capabilities] | None = None
    holds_weights: bool = True  # every gateway process would load them; False: it may open the same engine for free
    remote: bool = False  # requests leave this machine
    own_process: Callable[[Any], bool] = lambda _: False  # by default; the settings may say otherwise
    tokenizer_path: Callable[[Any], Path] | None = None  # of its file; None: the setting tokenizer_path is needed
    counts_locally: bool = False  # of a chat engine: its tokens are counted here with that file
    prompt_format: str | None = None  # the built-in template to fall back on
    marks_media: bool = False  # a prompt has images and audio between its tokens, not after them
    # The tokens of images and audio before the model is loaded, with its interpreter.
    count_media: Callable[[Any, Sequence[Media], str | None], list[int]] | None = None
    live_overrides: Mapping[str, Any] = {}  # field → type with range: what one load may override
    local_options: frozenset[str] = frozenset()  # those that name files: a worker takes its own configuration's only
    kv_types: Collection[str] | None = None  # names of `type_k` and `type_v`; None: it does not use these settings
    known_names: Mapping[str, Sequence[str]] = {}  # option → names that its library knows; others get a warning
    verify: Callable[[], None] = lambda: None  # raises if its library does not work on this machine
    prepare: Callable[[Any], object] | None = None  # fetches what it needs at its first use; gets a ProgressReporter
    # The memory it would take, before anything is loaded; may read files.
    estimate: Callable[[EngineSpec, AvailableMemory], MemoryEstimate] = _estimate_nothing
    # Options that cannot work here, with a reason each: missing files, programs, keys.
    faults: Callable[[EngineSpec], Iterable[tuple[str, str]]] = _no_faults
    # Why it did not open, from the last lines of its process.
    explain: Callable[[ModelyardError, Sequence[str]], ModelyardError] | None = None
    # A model folder of the library without a section in a file: 2 if the format is its own, 1 if it runs every Hugging
    # Face folder, 0 if it is not for it. The engine with the highest number runs the model.
    takes_folder: Callable[[Path], int] = lambda _: 0
    # Options of such a model, by the number of values in its KV cache and whether it is on a GPU. Raises if it cannot
    # run here.
    library_options: Callable[[int, bool], Mapping[str, Any]] = lambda *_: {}
    find_model: Callable[[str], Path | None] | None = (
        None  # by the name in the settings; None: a path, or the library's
    )
    # For `doctor`: the name of its library or program, the packages that bring the library, and where the program is.
    title: str = ""
    distributions: Sequence[str] = ()
    find_program: Callable[[], str] | None = None
    # For `modelyard optimize`: a package with the module `knobs` (`core/knobs.py`), and optionally `bench` and `loss`;
    # and whether `knobs.fitted(spec)` tells what the engine's own program would set on a machine with GPUs.
    tuning: str | None = None
    has_fitted: bool = False

    def kind_of(self, options: object) -> Literal["text", "chat"]:
        kind: Literal["text", "chat"] = getattr(options, "kind", self.kind)
        return kind
