"""Every message between gateways, the scheduler and workers, grouped by receiver, and its encoding.

MessagePack lists with a tag in front, by msgspec. A peer that knows more fields than we do is understood, fields are
only ever added at the end, and nothing is ever unpickled. Another protocol version is refused with a reason.

    client of a worker              worker
    Hello(version, …)          ──→
                               ←──  Welcome(version, …) | ConnectionRefused(reason)
    OpenEngine(engine, …)      ──→
                               ←──  LoadProgress* · (EngineOpened | EngineOpenFailed)
    AddRequest(InferRequest)   ──→
                               ←──  UpdateBatch[RequestAccepted · PrefillProgress* · TokenStep* ·
                                    (RequestFinished | RequestFailed)]      one batch per engine step and client
    AbortRequest, PauseRequest, ResumeRequest ──→
    Heartbeat(n)               ──→
                               ←──  Heartbeat(n, …)                         a silent peer is lost

    gateway                         scheduler
    JoinGateway(version, …)    ──→                                          a new connection; lists the leases in use
                               ←──  JoinAccepted · PoolState*               models and engines, whenever they change
    RequestLease(ticket, …)    ──→
                               ←──  LeaseQueued? · (LeaseGranted | LeaseDenied)
    ReleaseLease(ticket)       ──→                                          returned, or no longer wanted
                               ←──  LeaseRevoked(ticket)
    PoolCommand, GetSnapshot, GetLog, StoreOperation, ObjectOperation ──→
                               ←──  SchedulerReply(id)

Tokens do not pass the scheduler: a grant names the worker and the engine, and the gateway talks to the worker directly.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import or_
from typing import Any, Literal

import msgspec
from msgspec import Struct, field
from msgspec.structs import asdict

from modelyard.core import engine as core
from modelyard.core import errors
from modelyard.core.engine import (
    CacheInfo,
    Control,
    EngineInfo,
    EngineSpec,
    EngineStats,
    Media,
    Prompt,
    ReasoningBudget,
    TokenRun,
)
from modelyard.core.errors import Internal, InvalidRequest, ModelyardError
from modelyard.core.events import Event, Timings, Usage
from modelyard.core.pool import LeaseRequest, ModelStateChange, ModelStatus
from modelyard.core.request import Constraint, EmbeddingRequest, Priority, Request, RerankRequest, Sampling
from modelyard.core.tokenizer import IdLogprob
from modelyard.workers.definitions import define, message_options

VERSION = 6  # 6: a worker tells which requests it has read
TOKENIZER_FEATURE = "tokenizer"  # in `Welcome.features`: the worker understands `FetchTokenizer`
FORWARD_FEATURE = "forward"  # the worker understands `EmbedInputs` and `RerankDocuments`
LOG_FEATURE = "log"  # in `Hello.features`: the client wants `WorkerLog`
_AFFINITY_TOKENS = 4096  # tokens of a prompt that the scheduler uses to choose a replica

# --- wire forms of token ids, vectors, prompts and errors -----------------------------------------------------------

_BIG_ENDIAN = sys.byteorder == "big"  # the wire is little-endian
_ERRORS: dict[str, type[ModelyardError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, ModelyardError)
}
# The attributes that an error may carry. Others, and values of other types, are not accepted from the wire.
_ATTRIBUTES: dict[str, tuple[type, ...]] = {
    "message": (str,),
    "code": (str,),
    "param": (str,),
    "retry_after": (int, float),
    "id": (str,),
    "prompt_tokens": (int,),
    "max_tokens": (int,),
    "window": (int,),
    "position": (int,),
}
# Defaults of the attributes that only some classes have.
_DEFAULTS: dict[type[ModelyardError], dict[str, Any]] = {
    errors.Internal: {"id": ""},
    errors.Overloaded: {"position": None},
    errors.ContextOverflow: {"prompt_tokens": 0, "window": 0},
    errors.OutputOverflow: {"prompt_tokens": 0, "max_tokens": 0, "window": 0},
}


class MalformedMessage(ValueError):
    """Bytes that are not a message of the protocol, or a message that is not allowed here."""


def pack_ids(ids: Iterable[int]) -> bytes:
    try:
        return _pack(array("I", ids))
    except (OverflowError, TypeError):
        raise InvalidRequest("the prompt holds token ids outside 0…4294967295") from None


def unpack_ids(data: bytes) -> list[int]:
    return _unpack("I", data).tolist()


def pack_vector(vector: Iterable[float]) -> bytes:
    return _pack(array("d", vector))


def unpack_vector(data: bytes) -> list[float]:
    return _unpack("d", data).tolist()


def _pack(numbers: array[Any]) -> bytes:
    if _BIG_ENDIAN:
        numbers.byteswap()
    return numbers.tobytes()


def _unpack(code: str, data: bytes) -> array[Any]:
    numbers = array(code)
    if len(data) % numbers.itemsize:
        raise MalformedMessage(f"{len(data)} bytes are not a list of {numbers.itemsize}-byte numbers")
    numbers.frombytes(data)
    if _BIG_ENDIAN:
        numbers.byteswap()
    return numbers


def flatten_prompt(prompt: Prompt) -> tuple[bytes, list[tuple[int, Media]]]:
    """All tokens of a prompt as one run, and its media with the number of tokens before each."""
    media: list[tuple[int, Media]] = []
    before = 0
    for part in prompt.parts:
        if isinstance(part, Media):
            media.append((before, part))
        else:
            before += len(part.ids)
    return pack_ids(prompt.ids), media


def unflatten_prompt(tokens: bytes, media: Sequence[tuple[int, Media]]) -> tuple[TokenRun | Media, ...]:
    ids, position = unpack_ids(tokens), 0
    parts: list[TokenRun | Media] = []
    for offset, item in media:
        if not position <= offset <= len(ids):
            raise MalformedMessage("a media offset is outside the prompt")
        if offset > position:
            parts.append(TokenRun(ids[position:offset]))
        parts.append(item)
        position = offset
    if position < len(ids) or not parts:
        parts.append(TokenRun(ids[position:]))
    return tuple(parts)


def pack_error(error: ModelyardError) -> list[Any]:
    kind = next(name for name in (base.__name__ for base in type(error).__mro__) if name in _ERRORS)
    attributes = {name: value for name, value in vars(error).items() if name in _ATTRIBUTES and value is not None}
    return [kind, attributes]


def unpack_error(packed: Any) -> ModelyardError:
    """An error class that this version does not know becomes `Internal` with the same message."""
    match packed:
        case [str(name), dict(attributes), *_] if isinstance(attributes.get("message"), str):
            kind = _ERRORS.get(name, Internal)
        case _:
            raise MalformedMessage("an error without a message")
    # Bypass the constructor, which composes the message from numbers: the message is complete already.
    error = kind.__new__(kind)
    ModelyardError.__init__(error, attributes["message"])
    for base, defaults in _DEFAULTS.items():
        if issubclass(kind, base):
            vars(error).update(defaults)
    for name, types in _ATTRIBUTES.items():
        if isinstance(value := attributes.get(name), types):
            setattr(error, name, value)
    return error


# --- messages -------------------------------------------------------------------------------------------------------


class LinkMessage(Struct, frozen=True, array_like=True):
    """A list on the wire. Its subclasses group the messages by receiver."""


class ToWorker(LinkMessage, frozen=True): ...


class ToClient(LinkMessage, frozen=True): ...


class ToScheduler(LinkMessage, frozen=True): ...


class ToGateway(LinkMessage, frozen=True): ...


# --- to several receivers -------------------------------------------------------------------------------------------


class Heartbeat(LinkMessage, frozen=True, tag="beat"):
    """A worker replies with the same number and the stats of its engines. 0 is not a reply."""

    number: int
    stats: dict[str, EngineStats] = field(default_factory=dict)


class Goodbye(LinkMessage, frozen=True, tag="bye"):
    """The sender disconnects. From a worker: it takes nothing new and exits when its requests have ended."""

    reason: str = ""


class ConnectionRefused(LinkMessage, frozen=True, tag="refused"):
    reason: str


# --- to a worker ----------------------------------------------------------------------------------------------------


class Hello(ToWorker, frozen=True, tag="hello"):
    """`name` identifies the client, the same on all its links. `features` are optional parts of the protocol."""

    version: int
    name: str
    features: tuple[str, ...] = ()


class OpenEngine(ToWorker, frozen=True, tag="open"):
    """`model` is a model of the worker's own configuration. `options` is JSON: the few fields of the engine's Options
    that a message may set. If an engine with this id is open already, it is used."""

    engine: str
    model: str
    options: bytes
    caches: dict[str, CacheInfo]
    modalities: tuple[str, ...] = ("text",)
    identity: str = ""


class CloseEngine(ToWorker, frozen=True, tag="close"):
    engine: str


class InferRequest(LinkMessage, frozen=True):
    """A `Prompt`. `request_id` is chosen by the client. `tokens` are little-endian u32. `media` come with their offset
    in tokens. `timeout_s` is what is left until the deadline: machines have different clocks. All other fields are
    those of `Prompt`."""

    request_id: int
    tokens: bytes
    sampling: Sampling = Sampling()
    adapters: tuple[tuple[str, float], ...] = ()
    max_tokens: int = 1
    stop_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    reasoning: ReasoningBudget | None = None
    cache: str = ""
    scope: str = ""
    session: str | None = None
    priority: Priority = "main"
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    timeout_s: float | None = None
    trace: str = ""
    media: list[tuple[int, Media]] = []
    dedup_key: str | None = None


class AddRequest(ToWorker, frozen=True, tag="add"):
    engine: str
    request: InferRequest


class AddChat(ToWorker, frozen=True, tag="chat"):
    """`capture`: the client wants to see what the engine sends to its server and receives."""

    engine: str
    request_id: int
    request: Request
    capture: bool = False


class AbortRequest(ToWorker, frozen=True, tag="abort"):
    request_id: int


class PauseRequest(ToWorker, frozen=True, tag="hold"):
    """The reader of this request lags: send nothing until `ResumeRequest`."""

    request_id: int


class ResumeRequest(ToWorker, frozen=True, tag="go"):
    request_id: int


class ControlEngine(ToWorker, frozen=True, tag="order"):
    request_id: int
    engine: str
    control: Control


class EmbedTokens(ToWorker, frozen=True, tag="embed"):
    request_id: int
    engine: str
    batch: list[bytes]


class EmbedInputs(ToWorker, frozen=True, tag="vectors"):
    """To a chat engine: its server has the tokenizer."""

    request_id: int
    engine: str
    request: EmbeddingRequest


class RerankDocuments(ToWorker, frozen=True, tag="rank"):
    request_id: int
    engine: str
    request: RerankRequest


class CountChatTokens(ToWorker, frozen=True, tag="count"):
    request_id: int
    engine: str
    request: Request


class DropClient(ToWorker, frozen=True, tag="forget"):
    """The client of this name is gone: end its requests, then reply. `unless_connected`: if it is connected here, reply
    with Conflict instead."""

    request_id: int
    name: str
    unless_connected: bool = False


class FetchTokenizer(ToWorker, frozen=True, tag="study"):
    """Send the tokenizer files of this engine, unless their hash is in `have`."""

    request_id: int
    engine: str
    have: tuple[str, ...] = ()


class ShutdownWorker(ToWorker, frozen=True, tag="dismiss"):
    """From the scheduler to a worker that it started."""


# --- to a client of a worker ----------------------------------------------------------------------------------------


class HostedEngineInfo(LinkMessage, frozen=True):
    """An engine that is open in the worker."""

    engine: str
    model: str
    identity: str
    kind: Literal["text", "chat"]
    info: EngineInfo


class Welcome(ToClient, frozen=True, tag="welcome"):
    version: int
    worker: str
    pid: int
    engines: list[HostedEngineInfo] = []
    features: tuple[str, ...] = ()


class LoadProgress(ToClient, frozen=True, tag="loading"):
    engine: str
    done: float
    phase: str


class EngineOpened(ToClient, frozen=True, tag="opened"):
    engine: str
    kind: Literal["text", "chat"]
    info: EngineInfo
    embeds: bool = False


class EngineOpenFailed(ToClient, frozen=True, tag="failed"):
    engine: str
    error: ModelyardError


class EngineClosed(ToClient, frozen=True, tag="closed"):
    engine: str


class LogLine(LinkMessage, frozen=True):
    """A log record. `error` is its traceback."""

    created: float
    level: int
    logger: str
    message: str
    request_id: str = ""
    error: str = ""


class WorkerLog(ToClient, frozen=True, tag="log"):
    """What the worker's process has logged."""

    lines: list[LogLine]


class EngineLost(ToClient, frozen=True, tag="lost"):
    """The engine died; its worker is alive."""

    engine: str
    error: ModelyardError


class RequestReceived(ToClient, frozen=True, tag="got"):
    """The worker has read the request. If it dies without having said so, the request is not the cause."""

    request_id: int


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
    logprobs: list[IdLogprob] | None = None


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
    request_id: int
    error: ModelyardError
    usage: Usage = Usage()
    timings: Timings = Timings()


class ChatEvents(LinkMessage, frozen=True, tag="c"):
    """Events of a chat engine. Finished or Failed ends the request."""

    request_id: int
    events: list[Event]


class ChatTraffic(LinkMessage, frozen=True, tag="x"):
    """What a chat engine sent to its server, or received from it."""

    request_id: int
    sent: str = ""
    received: str = ""


RequestUpdate = (
    RequestAccepted | PrefillProgress | TokenStep | RequestFinished | RequestFailed | ChatEvents | ChatTraffic
)


class UpdateBatch(ToClient, frozen=True, tag="frame"):
    """Everything that one step produced for one client. `stats` of engines that have just become idle."""

    updates: list[RequestUpdate]
    stats: dict[str, EngineStats] = field(default_factory=dict)


class WorkerReply(ToClient, frozen=True, tag="done"):
    """The reply to `ControlEngine`, `EmbedTokens`, `EmbedInputs`, `RerankDocuments`, `CountChatTokens`, `DropClient`
    and `FetchTokenizer`. `tokenizer` is the hash of the files; `files` is empty if the client has them."""

    request_id: int
    error: ModelyardError | None = None
    vectors: list[bytes] = []
    tokens: int | None = None
    stats: dict[str, EngineStats] = field(default_factory=dict)
    tokenizer: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    scores: list[tuple[int, float]] = []


# --- to the scheduler -----------------------------------------------------------------------------------------------


class WireLeaseRequest(LinkMessage, frozen=True):
    """A `LeaseRequest`. `prompt` holds the first tokens if the model has several replicas; `timeout_s` is what is left
    until the deadline."""

    model: str
    cache: str
    tokens: int = 0
    weight: int = 1
    key: str = ""
    session: str | None = None
    priority: Priority = "main"
    timeout_s: float | None = None
    trace: str = ""
    prompt: bytes = b""
    is_retry: bool = False
    keep_alive: float | None = None


class JoinGateway(ToScheduler, frozen=True, tag="join"):
    """A gateway connects, or reconnects under the same name. `leases` are those whose requests still run. `connection`
    counts its connections: a message of an older one may arrive late."""

    version: int
    name: str
    leases: tuple[tuple[int, WireLeaseRequest], ...] = ()
    connection: int = 0


class RegisterWorker(ToScheduler, frozen=True, tag="enlist"):
    """A worker registers itself, repeatedly, with the engines that it has open and the models that it can open. `node`
    is the name of its machine, with its free memory: RAM, and each GPU by UUID."""

    version: int
    name: str
    endpoint: str
    engines: tuple[HostedEngineInfo, ...] = ()
    node: str = ""
    ram_free: int = 0
    gpus: dict[str, int] = field(default_factory=dict)
    models: tuple[str, ...] = ()


class RequestLease(ToScheduler, frozen=True, tag="ask"):
    """`avoid` are engines that the gateway has just lost; the scheduler may not know yet."""

    ticket: int
    request: WireLeaseRequest
    avoid: tuple[str, ...] = ()


class ReleaseLease(ToScheduler, frozen=True, tag="leave"):
    """`spent` is the number of output tokens."""

    ticket: int
    spent: int = 0


class PoolCommand(ToScheduler, frozen=True, tag="command"):
    """`argument` is JSON: the overrides of a load, `force`, a number of replicas, a trace id, limits of keys."""

    id: int
    verb: Literal["load", "unload", "drain", "scale", "cancel", "reload", "limits"]
    model: str = ""
    argument: bytes = b"null"


class GetSnapshot(ToScheduler, frozen=True, tag="look"):
    id: int
    what: Literal["snapshot", "requests"]


class GetLog(ToScheduler, frozen=True, tag="log"):
    """The scheduler's own newest log lines, as `LogHistory.read` selects them."""

    id: int
    since: float
    level: int
    request: str
    limit: int


class StoreOperation(ToScheduler, frozen=True, tag="keep"):
    """An operation on the store that all gateways share: put if there is a value, delete, or else get."""

    id: int
    scope: bytes
    key: bytes
    value: bytes | None = None
    delete: bool = False


class ObjectOperation(ToScheduler, frozen=True, tag="object"):
    """An operation on the object store that all gateways share: a method of `core.store.ObjectStore`. `key` is also
    the object after which a page begins."""

    id: int
    verb: Literal["get", "put", "swap", "delete", "page"]
    scope: bytes
    key: bytes
    value: bytes = b""
    old: bytes | None = None
    ttl_s: float | None = None
    limit: int = 0
    newest_first: bool = False
    values: bool = True


# --- to a gateway ---------------------------------------------------------------------------------------------------


class EngineLocation(LinkMessage, frozen=True):
    """Where an engine is open."""

    model: str
    endpoint: str
    engine: str
    kind: Literal["text", "chat"]
    info: EngineInfo
    embeds: bool = False


class JoinAccepted(ToGateway, frozen=True, tag="joined"):
    version: int


class PoolState(ToGateway, frozen=True, tag="state"):
    """`config_version` counts the reloads of the configuration."""

    models: dict[str, ModelStatus]
    engines: tuple[EngineLocation, ...] = ()
    replicas: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, dict[str, int]] = field(default_factory=dict)
    config_version: int = 0


class LeaseQueued(ToGateway, frozen=True, tag="queued"):
    ticket: int
    position: int


class LeaseGranted(ToGateway, frozen=True, tag="granted"):
    ticket: int
    endpoint: str
    engine: str
    weight: int = 1
    waited: float = 0.0


class LeaseDenied(ToGateway, frozen=True, tag="denied"):
    ticket: int
    error: ModelyardError


class LeaseRevoked(ToGateway, frozen=True, tag="revoked"):
    ticket: int
    error: ModelyardError


class ModelChanged(ToGateway, frozen=True, tag="changed"):
    change: ModelStateChange


class SchedulerReply(ToGateway, frozen=True, tag="answer"):
    """`value` is the requested object as MessagePack, or the stored bytes themselves."""

    id: int
    error: ModelyardError | None = None
    value: bytes | None = None


# --- encoding -------------------------------------------------------------------------------------------------------


def _encode_hook(value: Any) -> Any:
    if isinstance(value, ModelyardError):
        return pack_error(value)
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _decode_hook(kind: type, value: Any) -> Any:
    if kind is ModelyardError:
        return unpack_error(value)
    raise NotImplementedError(f"cannot decode {kind.__name__}")


encode: Callable[[LinkMessage], bytes] = msgspec.msgpack.Encoder(enc_hook=_encode_hook).encode


def _decoder(receiver: type[LinkMessage], *others: type[LinkMessage]) -> Callable[[bytes], LinkMessage]:
    kinds: Any = reduce(or_, (*receiver.__subclasses__(), *others, Heartbeat, Goodbye))
    decode = msgspec.msgpack.Decoder(kinds, dec_hook=_decode_hook).decode

    def decode_or_raise(data: bytes) -> LinkMessage:
        """Raises MalformedMessage."""
        try:
            message: LinkMessage = decode(data)
            return message
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise MalformedMessage(str(error)) from None

    return decode_or_raise


decode_for_worker = _decoder(ToWorker)
decode_for_client = _decoder(ToClient, ConnectionRefused)
decode_for_scheduler = _decoder(ToScheduler)
decode_for_gateway = _decoder(ToGateway, ConnectionRefused)


def version_mismatch(theirs: int) -> str | None:
    """Why the versions are incompatible, or None."""
    if theirs == VERSION:
        return None
    older = "the other side is older" if theirs < VERSION else "this side is older"
    return f"protocol version {theirs} is not {VERSION}: {older}; run the same Modelyard on both sides"


# --- conversion from and to core types ------------------------------------------------------------------------------


def to_chunk(update: RequestUpdate) -> core.Chunk:
    if type(update) is TokenStep:
        return core.Tokens(unpack_ids(update.tokens), update.logprobs)
    if isinstance(update, RequestAccepted):
        return core.Accepted(update.cached_tokens, update.divergence, update.evicted, update.elsewhere)
    if isinstance(update, PrefillProgress):
        return core.Progress(update.done, update.total, update.logprobs)
    if isinstance(update, RequestFinished):
        return core.End(update.reason, update.usage, update.timings)
    if isinstance(update, RequestFailed):
        return core.End("error", update.usage, update.timings, update.error)
    raise MalformedMessage("a token engine sent chat events")


def to_update(request_id: int, chunk: core.Chunk) -> RequestUpdate:
    if type(chunk) is core.Tokens:
        return TokenStep(request_id, pack_ids(chunk.ids), chunk.logprobs)
    if isinstance(chunk, core.Accepted):
        return RequestAccepted(request_id, chunk.cached_tokens, chunk.divergence, chunk.evicted, chunk.elsewhere)
    if isinstance(chunk, core.Progress):
        return PrefillProgress(request_id, chunk.done, chunk.total, chunk.logprobs)
    assert isinstance(chunk, core.End)  # noqa: S101  the last member of the union
    if chunk.reason != "error":
        return RequestFinished(request_id, chunk.reason, chunk.usage, chunk.timings)
    error = chunk.error or Internal("the engine failed without a reason")
    return RequestFailed(request_id, error, chunk.usage, chunk.timings)


def open_engine_message(engine: str, backend: str, spec: EngineSpec, identity: str = "") -> OpenEngine:
    options = message_options(define(backend, spec))
    return OpenEngine(engine, spec.model, options, dict(spec.caches), spec.modalities, identity)


def to_infer_request(id: int, prompt: Prompt) -> InferRequest:
    tokens, media = flatten_prompt(prompt)
    fields = asdict(prompt)
    del fields["parts"]
    return InferRequest(
        request_id=id, tokens=tokens, media=media, timeout_s=time_left(fields.pop("deadline")), **fields
    )


def to_prompt(request: InferRequest) -> Prompt:
    """Raises MalformedMessage if the tokens or media are invalid."""
    fields = asdict(request)
    del fields["request_id"]
    parts = unflatten_prompt(fields.pop("tokens"), fields.pop("media"))
    return Prompt(parts=parts, deadline=_deadline(fields.pop("timeout_s")), **fields)


def to_wire_lease_request(request: LeaseRequest, *, with_prompt: bool) -> WireLeaseRequest:
    """Both classes have the same fields; only `prompt` and the deadline differ."""
    fields = asdict(request)
    fields["timeout_s"] = time_left(fields.pop("deadline"))
    fields["prompt"] = pack_ids(request.prompt[:_AFFINITY_TOKENS]) if with_prompt else b""
    return WireLeaseRequest(**fields)


def from_wire_lease_request(wire: WireLeaseRequest, *, is_retry: bool = False) -> LeaseRequest:
    fields = asdict(wire) | {"prompt": unpack_ids(wire.prompt), "is_retry": wire.is_retry or is_retry}
    return LeaseRequest(deadline=_deadline(fields.pop("timeout_s")), **fields)


def time_left(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - time.monotonic()


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s
