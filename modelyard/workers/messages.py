"""Every message between gateways, the scheduler and workers, grouped by who receives it, and how it is written.

MessagePack lists with a tag in front, by msgspec: a peer that knows more fields than we do is understood, fields are
only ever added at the end, and nothing is ever unpickled. A `Hello` of another protocol version is refused in words.

    client                          worker
    Hello(version, …)          ──→
                               ←──  Welcome(version, …) | Refused(reason)
    OpenEngine(engine, …)      ──→
                               ←──  Loading* · (Opened | OpenFailed)
    AddRequest(InferRequest)   ──→
                               ←──  Frame[Accepted · Progress* · Step* · (Finish | Error)]   one a step and destination
    AbortRequest, Hold, GoOn   ──→
    Beat(n)                    ──→
                               ←──  Beat(n, …)                     whoever is silent for too long is lost
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct, field

from modelyard.core import engine as core
from modelyard.core.engine import CacheInfo, Control, EngineInfo, EngineStats, IdLogprob, Media, Prompt
from modelyard.core.errors import Internal, ModelyardError
from modelyard.core.events import Event, Timings, Usage
from modelyard.core.lease import ModelStatus
from modelyard.core.pool import ModelStateChange
from modelyard.core.request import Constraint, Priority, Request, Sampling
from modelyard.workers.packing import MalformedMessage, flatten_prompt, pack_error, unflatten_prompt, unpack_error

VERSION = 1
TOKENIZER_FEATURE = "tokenizer"  # in `Welcome.able`: `Study` is understood

T = TypeVar("T")


class LinkMessage(Struct, frozen=True, array_like=True, kw_only=False):
    """The base of all: a list on the wire."""


# --- both ways ------------------------------------------------------------------------------------------------------


class Heartbeat(LinkMessage, frozen=True, tag="beat"):
    """I live. A worker answers with the same number and with what its engines say of themselves."""

    number: int
    stats: dict[str, EngineStats] = field(default_factory=dict)


class Goodbye(LinkMessage, frozen=True, tag="bye"):
    """The sender leaves in peace. From a worker: it takes nothing new and ends when its answers have."""

    reason: str = ""


# --- for a worker ---------------------------------------------------------------------------------------------------


class Hello(LinkMessage, frozen=True, tag="hello"):
    """`name` is who asks, the same on all his links; `able` are optional parts of the protocol that he speaks."""

    version: int
    name: str
    able: tuple[str, ...] = ()


class OpenEngine(LinkMessage, frozen=True, tag="open"):
    """`options` is the engine's own Options as JSON. An engine of this id that is open already is taken over."""

    engine: str
    backend: str
    model: str
    options: bytes
    caches: dict[str, CacheInfo]
    modalities: tuple[str, ...] = ("text",)
    identity: str = ""


class CloseEngine(LinkMessage, frozen=True, tag="close"):
    engine: str


class InferRequest(LinkMessage, frozen=True):
    """`request_id` is the client's own number; `tokens` are little-endian u32; `media` stand after so many of them;
    `lora_adapter` are names with their strengths."""

    request_id: int
    tokens: bytes
    sampling_params: Sampling = Sampling()
    lora_adapter: tuple[tuple[str, float], ...] = ()
    max_tokens: int = 1
    stop_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    cache: str = ""
    session: str | None = None
    priority: Priority = "main"
    logprobs: int | None = None
    deadline: float | None = None
    trace: str = ""
    media: list[tuple[int, Media]] = []
    dedup_key: str | None = None


class AddRequest(LinkMessage, frozen=True, tag="add"):
    engine: str
    request: InferRequest


class AddChat(LinkMessage, frozen=True, tag="chat"):
    engine: str
    request_id: int
    request: Request


class AbortRequest(LinkMessage, frozen=True, tag="abort"):
    request_id: int


class PauseRequest(LinkMessage, frozen=True, tag="hold"):
    """Its reader lags: nothing more of this request until `GoOn`."""

    request_id: int


class ResumeRequest(LinkMessage, frozen=True, tag="go"):
    request_id: int


class ControlEngine(LinkMessage, frozen=True, tag="order"):
    request_id: int
    engine: str
    control: Control


class EmbedTokens(LinkMessage, frozen=True, tag="embed"):
    request_id: int
    engine: str
    batch: list[bytes]


class CountTokens(LinkMessage, frozen=True, tag="count"):
    request_id: int
    engine: str
    request: Request


class DropClient(LinkMessage, frozen=True, tag="forget"):
    """The client of this name is gone: end what it left behind, then answer `Done`."""

    request_id: int
    name: str


class FetchTokenizer(LinkMessage, frozen=True, tag="study"):
    """The tokenizer of this engine, for a gateway without its files; those of the hashes in `have` it has already."""

    request_id: int
    engine: str
    have: tuple[str, ...] = ()


class ShutdownWorker(LinkMessage, frozen=True, tag="dismiss"):
    """From the scheduler to a worker that it started: nothing is left to do, end."""


ToWorker = (
    Hello
    | Heartbeat
    | OpenEngine
    | CloseEngine
    | AddRequest
    | AddChat
    | AbortRequest
    | PauseRequest
    | ResumeRequest
    | ControlEngine
    | EmbedTokens
    | CountTokens
    | DropClient
    | FetchTokenizer
    | ShutdownWorker
    | Goodbye
)


# --- for a client of a worker ---------------------------------------------------------------------------------------


class HostedEngineInfo(LinkMessage, frozen=True):
    """An engine that the worker holds open."""

    engine: str
    model: str
    identity: str
    kind: Literal["text", "chat"]
    info: EngineInfo


class Welcome(LinkMessage, frozen=True, tag="welcome"):
    version: int
    worker: str
    pid: int
    engines: list[HostedEngineInfo] = []
    able: tuple[str, ...] = ()


class ConnectionRefused(LinkMessage, frozen=True, tag="refused"):
    reason: str


class LoadProgress(LinkMessage, frozen=True, tag="loading"):
    engine: str
    done: float
    doing: str


class EngineOpened(LinkMessage, frozen=True, tag="opened"):
    engine: str
    kind: Literal["text", "chat"]
    info: EngineInfo
    embeds: bool = False


class EngineOpenFailed(LinkMessage, frozen=True, tag="failed"):
    engine: str
    error: ModelyardError


class EngineClosed(LinkMessage, frozen=True, tag="closed"):
    engine: str


class EngineLost(LinkMessage, frozen=True, tag="lost"):
    """The engine died; its worker lives."""

    engine: str
    error: ModelyardError


class RequestAccepted(LinkMessage, frozen=True, tag="a"):
    request_id: int
    cached_tokens: int = 0
    divergence: int | None = None
    evicted: bool = False
    elsewhere: int = 0


class PrefillProgress(LinkMessage, frozen=True, tag="p"):
    request_id: int
    done: int
    total: int


class TokenStep(LinkMessage, frozen=True, tag="s"):
    """One or more tokens, little-endian u32."""

    request_id: int
    tokens: bytes
    logprobs: list[IdLogprob] | None = None


class RequestFinished(LinkMessage, frozen=True, tag="f"):
    request_id: int
    reason: Literal["stop", "length", "window", "cancelled"]
    usage: Usage = Usage()
    timings: Timings = Timings()


class RequestFailed(LinkMessage, frozen=True, tag="e"):
    """The error carries its message and code."""

    request_id: int
    error: ModelyardError
    usage: Usage = Usage()
    timings: Timings = Timings()


class ChatEvents(LinkMessage, frozen=True, tag="c"):
    """What a chat engine said; the last one ends the request."""

    request_id: int
    events: list[Event]


RequestUpdate = RequestAccepted | PrefillProgress | TokenStep | RequestFinished | RequestFailed | ChatEvents


class UpdateBatch(LinkMessage, frozen=True, tag="frame"):
    """All that one step made for one client. `stats` come along where an engine has just become idle."""

    items: list[RequestUpdate]
    stats: dict[str, EngineStats] = field(default_factory=dict)


class WorkerReply(LinkMessage, frozen=True, tag="done"):
    """The answer to `Order`, `Embed`, `Count`, `Forget` and `Study`; `stats` are what an order has changed;
    `tokenizer` is its hash, and `files` are none where the asker has them."""

    request_id: int
    error: ModelyardError | None = None
    vectors: list[bytes] = []
    tokens: int | None = None
    stats: dict[str, EngineStats] = field(default_factory=dict)
    tokenizer: str = ""
    files: dict[str, bytes] = field(default_factory=dict)


ToClient = (
    Heartbeat
    | Welcome
    | ConnectionRefused
    | LoadProgress
    | EngineOpened
    | EngineOpenFailed
    | EngineClosed
    | EngineLost
    | UpdateBatch
    | WorkerReply
    | Goodbye
)


# --- how they are written -------------------------------------------------------------------------------------------


def _written(value: Any) -> Any:
    if isinstance(value, ModelyardError):
        return pack_error(value)
    raise NotImplementedError(f"{type(value).__name__} does not travel")


def _read(kind: type, value: Any) -> Any:
    if kind is ModelyardError:
        return unpack_error(value)
    raise NotImplementedError(f"{kind.__name__} does not travel")


_encoder = msgspec.msgpack.Encoder(enc_hook=_written)
encode: Callable[[LinkMessage], bytes] = _encoder.encode


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """From bytes to one of these messages; whatever else comes is `Malformed`."""
    decoder = msgspec.msgpack.Decoder(kind, dec_hook=_read)

    def read(data: bytes) -> Any:
        try:
            return decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise MalformedMessage(str(error)) from None

    return read


read_for_worker: Callable[[bytes], ToWorker] = decoder(ToWorker)
read_for_client: Callable[[bytes], ToClient] = decoder(ToClient)


def version_mismatch(theirs: int) -> str | None:
    """Why we cannot talk, or None."""
    if theirs == VERSION:
        return None
    older = "the other side is older" if theirs < VERSION else "this side is older"
    return f"protocol version {theirs} is not {VERSION}: {older}; run the same Modelyard on both sides"


def to_chunk(item: RequestUpdate, ids: Callable[[bytes], list[int]]) -> core.Chunk:
    """The engine's word for it."""
    if type(item) is TokenStep:
        return core.Tokens(ids(item.tokens), item.logprobs)
    if isinstance(item, RequestAccepted):
        return core.Accepted(item.cached_tokens, item.divergence, item.evicted, item.elsewhere)
    if isinstance(item, PrefillProgress):
        return core.Progress(item.done, item.total)
    if isinstance(item, RequestFinished):
        return core.End(item.reason, item.usage, item.timings)
    if isinstance(item, RequestFailed):
        return core.End("error", item.usage, item.timings, item.error)
    raise MalformedMessage("a token engine said events")


def to_update(request_id: int, chunk: core.Chunk, packed: Callable[[list[int]], bytes]) -> RequestUpdate:
    if type(chunk) is core.Tokens:
        return TokenStep(request_id, packed(chunk.ids), chunk.logprobs)
    if isinstance(chunk, core.Accepted):
        return RequestAccepted(request_id, chunk.cached_tokens, chunk.divergence, chunk.evicted, chunk.elsewhere)
    if isinstance(chunk, core.Progress):
        return PrefillProgress(request_id, chunk.done, chunk.total)
    assert isinstance(chunk, core.End)  # noqa: S101  there is no fifth
    if chunk.reason != "error":
        return RequestFinished(request_id, chunk.reason, chunk.usage, chunk.timings)
    error = chunk.error or Internal("the engine failed and did not say why")
    return RequestFailed(request_id, error, chunk.usage, chunk.timings)


def stats_of(engines: Mapping[str, core.Engine]) -> dict[str, EngineStats]:
    return {name: engine.stats() for name, engine in engines.items()}


# Every message between gateways and workers on one side and the scheduler on the other, grouped by who receives it.
#
#     gateway                         scheduler
#     Join(version, name, held)  ──→                                a new conversation; `held` are places it still uses
#                                ←──  Joined · State*               models and engines, whenever they change
#     Ask(ticket, …)             ──→
#                                ←──  (Queued)? · (Granted | Denied)
#     Leave(ticket)              ──→                                given back, or given up
#                                ←──  Revoked(ticket)
#     Command · Look · Keep …    ──→
#                                ←──  Answer(id)
#
# Tokens do not pass here: a grant names the worker and the engine, and the gateway speaks to it directly.


class WireLeaseRequest(LinkMessage, frozen=True):
    """A demand on its way; `prompt` are the first tokens, where it matters which replica knows them."""

    model: str
    cache: str
    tokens: int = 0
    weight: int = 1
    key: str = ""
    session: str | None = None
    priority: Priority = "main"
    deadline: float | None = None
    trace: str = ""
    prompt: bytes = b""
    is_retry: bool = False


# --- for the scheduler ------------------------------------------------------------------------------------------------


class JoinGateway(LinkMessage, frozen=True, tag="join"):
    """A gateway comes, or comes back under the same name. `held` are the places in which its answers still run."""

    version: int
    name: str
    held: tuple[tuple[int, WireLeaseRequest], ...] = ()


class RegisterWorker(LinkMessage, frozen=True, tag="enlist"):
    """A worker offers itself, again and again; `engines` are open there already. `machine` is the name of the one that
    it runs on, with what is free there: bytes of RAM, and of each GPU by its UUID."""

    version: int
    name: str
    endpoint: str
    engines: tuple[HostedEngineInfo, ...] = ()
    machine: str = ""
    ram_free: int = 0
    gpus: dict[str, int] = field(default_factory=dict)


class RequestLease(LinkMessage, frozen=True, tag="ask"):
    """`avoid` are engines that the gateway has just lost: the scheduler may not know of that yet."""

    ticket: int
    demand: WireLeaseRequest
    avoid: tuple[str, ...] = ()


class ReleaseLease(LinkMessage, frozen=True, tag="leave"):
    """`spent` output tokens were made there."""

    ticket: int
    spent: int = 0


class PoolCommand(LinkMessage, frozen=True, tag="command"):
    """`argument` is JSON: the overrides of a load, `force`, a number of replicas, a trace."""

    id: int
    verb: Literal["load", "unload", "drain", "scale", "cancel", "reload"]
    model: str = ""
    argument: bytes = b"null"


class GetSnapshot(LinkMessage, frozen=True, tag="look"):
    id: int
    what: Literal["snapshot", "requests"]


class StoreOperation(LinkMessage, frozen=True, tag="keep"):
    """The store that all gateways share. A value is put, none is looked up, `delete` says what it says."""

    id: int
    scope: bytes
    key: bytes
    value: bytes | None = None
    delete: bool = False


ToScheduler = (
    JoinGateway
    | RegisterWorker
    | RequestLease
    | ReleaseLease
    | PoolCommand
    | GetSnapshot
    | StoreOperation
    | Heartbeat
    | Goodbye
)


# --- for a gateway --------------------------------------------------------------------------------------------------


class EngineLocation(LinkMessage, frozen=True):
    """Where an engine is open."""

    model: str
    endpoint: str
    engine: str
    kind: Literal["text", "chat"]
    info: EngineInfo
    embeds: bool = False


class JoinAccepted(LinkMessage, frozen=True, tag="joined"):
    version: int


class PoolState(LinkMessage, frozen=True, tag="state"):
    """`edition` counts how often the configuration was read anew."""

    models: dict[str, ModelStatus]
    engines: tuple[EngineLocation, ...] = ()
    replicas: dict[str, int] = field(default_factory=dict)
    figures: dict[str, dict[str, int]] = field(default_factory=dict)
    edition: int = 0


class LeaseQueued(LinkMessage, frozen=True, tag="queued"):
    ticket: int
    position: int


class LeaseGranted(LinkMessage, frozen=True, tag="granted"):
    ticket: int
    endpoint: str
    engine: str
    weight: int = 1
    waited: float = 0.0


class LeaseDenied(LinkMessage, frozen=True, tag="denied"):
    ticket: int
    error: ModelyardError


class LeaseRevoked(LinkMessage, frozen=True, tag="revoked"):
    ticket: int
    error: ModelyardError


class ModelChanged(LinkMessage, frozen=True, tag="changed"):
    change: ModelStateChange


class SchedulerReply(LinkMessage, frozen=True, tag="answer"):
    """`value` is MessagePack of what was asked for, or the stored bytes themselves."""

    id: int
    error: ModelyardError | None = None
    value: bytes | None = None


ToGateway = (
    JoinAccepted
    | ConnectionRefused
    | PoolState
    | LeaseQueued
    | LeaseGranted
    | LeaseDenied
    | LeaseRevoked
    | ModelChanged
    | SchedulerReply
    | Heartbeat
    | Goodbye
)

read_for_scheduler: Callable[[bytes], ToScheduler] = decoder(ToScheduler)
read_for_gateway: Callable[[bytes], ToGateway] = decoder(ToGateway)


# A job's prompt as it travels to a worker, and back into what an engine takes. Pure; a new field stands in both.


def to_infer_request(id: int, prompt: Prompt) -> InferRequest:
    tokens, media = flatten_prompt(prompt)
    return InferRequest(
        request_id=id,
        tokens=tokens,
        sampling_params=prompt.sampling,
        lora_adapter=prompt.adapters,
        max_tokens=prompt.max_tokens,
        stop_ids=prompt.stop_ids,
        constraint=prompt.constraint,
        cache=prompt.cache,
        session=prompt.session,
        priority=prompt.priority,
        logprobs=prompt.logprobs,
        deadline=prompt.deadline,
        trace=prompt.trace,
        media=media,
        dedup_key=prompt.dedup_key,
    )


def to_prompt(asked: InferRequest) -> Prompt:
    """Raises Malformed where its tokens are none."""
    return Prompt(
        parts=unflatten_prompt(asked.tokens, asked.media),
        sampling=asked.sampling_params,
        max_tokens=asked.max_tokens,
        stop_ids=asked.stop_ids,
        constraint=asked.constraint,
        cache=asked.cache,
        session=asked.session,
        priority=asked.priority,
        adapters=asked.lora_adapter,
        logprobs=asked.logprobs,
        deadline=asked.deadline,
        trace=asked.trace,
        dedup_key=asked.dedup_key,
    )
