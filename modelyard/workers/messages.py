"""Every message between gateways, the scheduler and workers, grouped by receiver, and its encoding.

MessagePack lists with a tag in front, by msgspec; what they carry are the values of `core`. Nothing is ever unpickled.
Another protocol version is refused with a reason. A deadline travels as the seconds that are left: machines have
different clocks.

    client of a worker              worker
    Hello(version, …)          ──→
                               ←──  Welcome(version, …) | ConnectionRefused(reason)
    OpenEngine(engine, …)      ──→
                               ←──  LoadProgress* · (EngineOpened | EngineOpenFailed)
    AddRequest(Prompt)         ──→
                               ←──  UpdateBatch[TextChunks]                 one batch per engine step and client
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
    PoolCommand, StoreOperation ──→
                               ←──  SchedulerReply(id)

Tokens do not pass the scheduler: a grant names the worker and the engine, and the gateway talks to the worker directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from modelyard.core import errors
from modelyard.core.engine import Chunk, Control, EngineInfo, EngineSpec, EngineStats, MovedKv, Prompt
from modelyard.core.errors import Internal, ModelyardError
from modelyard.core.events import Event
from modelyard.core.pool import LeaseRequest, ModelStateChange, ModelStatus
from modelyard.core.request import EmbeddingRequest, Request, RerankRequest

VERSION = 9

# --- the wire form of errors ----------------------------------------------------------------------------------------

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


class Heartbeat(LinkMessage, frozen=True, tag="heartbeat"):
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
    """`name` identifies the client, the same on all its links. `wants_log`: it wants `WorkerLog`."""

    version: int
    name: str
    wants_log: bool = False


class OpenEngine(ToWorker, frozen=True, tag="open"):
    """`spec` (see `message_spec`) names a model of the worker's own configuration; its options are the few that a
    message may set, and its backend is ignored. If an engine with this id is open already, it is used."""

    engine: str
    spec: EngineSpec


class CloseEngine(ToWorker, frozen=True, tag="close"):
    engine: str


class AddRequest(ToWorker, frozen=True, tag="add"):
    """`request_id` is chosen by the client."""

    engine: str
    request_id: int
    prompt: Prompt


class AddChat(ToWorker, frozen=True, tag="chat"):
    """`capture`: the client wants to see what the engine sends to its server and receives."""

    engine: str
    request_id: int
    request: Request
    capture: bool = False


class AbortRequest(ToWorker, frozen=True, tag="abort"):
    request_id: int


class PauseRequest(ToWorker, frozen=True, tag="pause"):
    """The reader of this request lags: send nothing until `ResumeRequest`."""

    request_id: int


class ResumeRequest(ToWorker, frozen=True, tag="resume"):
    request_id: int


class ControlEngine(ToWorker, frozen=True, tag="control"):
    request_id: int
    engine: str
    control: Control


class EmbedTokens(ToWorker, frozen=True, tag="embed"):
    request_id: int
    engine: str
    batch: list[list[int]]


class EmbedInputs(ToWorker, frozen=True, tag="vectors"):
    """To a chat engine: its server has the tokenizer."""

    request_id: int
    engine: str
    request: EmbeddingRequest


class RerankDocuments(ToWorker, frozen=True, tag="rerank"):
    request_id: int
    engine: str
    request: RerankRequest


class CountChatTokens(ToWorker, frozen=True, tag="count"):
    request_id: int
    engine: str
    request: Request


class DropClient(ToWorker, frozen=True, tag="drop"):
    """The client of this name is gone: end its requests, then reply. `unless_connected`: if it is connected here, reply
    with Conflict instead."""

    request_id: int
    name: str
    unless_connected: bool = False


class FetchTokenizer(ToWorker, frozen=True, tag="tokenizer"):
    """Send the tokenizer files of this engine, unless their hash is in `have`."""

    request_id: int
    engine: str
    have: tuple[str, ...] = ()


class ShutdownWorker(ToWorker, frozen=True, tag="shutdown"):
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


class RequestReceived(ToClient, frozen=True, tag="received"):
    """The worker has read the request. If it dies without having said so, the request is not the cause."""

    request_id: int


class TextChunks(LinkMessage, frozen=True, tag="t"):
    """Output of a text engine. End ends the request."""

    request_id: int
    chunks: list[Chunk]


class ChatEvents(LinkMessage, frozen=True, tag="c"):
    """Events of a chat engine. Finished or Failed ends the request."""

    request_id: int
    events: list[Event]


class ChatTraffic(LinkMessage, frozen=True, tag="x"):
    """What a chat engine sent to its server, or received from it."""

    request_id: int
    sent: str = ""
    received: str = ""


RequestUpdate = TextChunks | ChatEvents | ChatTraffic


class UpdateBatch(ToClient, frozen=True, tag="updates"):
    """Everything that one step produced for one client. `stats` of engines that have just become idle."""

    updates: list[RequestUpdate]
    stats: dict[str, EngineStats] = field(default_factory=dict)


class WorkerReply(ToClient, frozen=True, tag="done"):
    """The reply to `ControlEngine`, `EmbedTokens`, `EmbedInputs`, `RerankDocuments`, `CountChatTokens`, `DropClient`
    and `FetchTokenizer`. `tokenizer` is the hash of the files; `files` is empty if the client has them."""

    request_id: int
    error: ModelyardError | None = None
    vectors: list[list[float]] = []
    tokens: int | None = None
    stats: dict[str, EngineStats] = field(default_factory=dict)
    tokenizer: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    scores: list[tuple[int, float]] = []
    moved: MovedKv | None = None


# --- to the scheduler -----------------------------------------------------------------------------------------------


class JoinGateway(ToScheduler, frozen=True, tag="join"):
    """A gateway connects, or reconnects under the same name. `leases` are those whose requests still run. `connection`
    counts its connections: a message of an older one may arrive late."""

    version: int
    name: str
    leases: tuple[tuple[int, LeaseRequest], ...] = ()
    connection: int = 0


class RegisterWorker(ToScheduler, frozen=True, tag="register"):
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


class RequestLease(ToScheduler, frozen=True, tag="lease"):
    """`avoid` are engines that the gateway has just lost; the scheduler may not know yet."""

    ticket: int
    request: LeaseRequest
    avoid: tuple[str, ...] = ()


class ReleaseLease(ToScheduler, frozen=True, tag="release"):
    """`spent` is the number of output tokens."""

    ticket: int
    spent: int = 0


class PoolCommand(ToScheduler, frozen=True, tag="command"):
    """`argument` is JSON: the overrides of a load, `force`, a number of replicas, a trace id, limits of keys, or what
    `LogHistory.read` selects the scheduler's own newest log lines by."""

    id: int
    verb: Literal["load", "unload", "drain", "scale", "cancel", "reload", "limits", "snapshot", "log", "models"]
    model: str = ""
    argument: bytes = b"null"


class StoreOperation(ToScheduler, frozen=True, tag="store"):
    """An operation on a store that all gateways share: a method of `core.store`. `key` is also the object after which a
    page begins."""

    id: int
    store: Literal["responses", "objects"]
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


class SchedulerReply(ToGateway, frozen=True, tag="reply"):
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


Timed = TypeVar("Timed", Prompt, LeaseRequest)


def with_time_left(value: Timed) -> Timed:
    """Its deadline as the wire has it."""
    return value if value.deadline is None else replace(value, deadline=value.deadline - time.monotonic())


def with_deadline(value: Timed) -> Timed:
    """Its deadline on this machine's clock."""
    return value if value.deadline is None else replace(value, deadline=value.deadline + time.monotonic())
