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
from modelyard.core.engine import CacheInfo, Control, EngineInfo, EngineStats, IdLogprob, Media
from modelyard.core.errors import Internal, ModelyardError
from modelyard.core.events import Event, Timings, Usage
from modelyard.core.request import Constraint, Priority, Request, Sampling
from modelyard.workers.packing import Malformed, pack_error, unpack_error

VERSION = 1
STUDY = "tokenizer"  # in `Welcome.able`: `Study` is understood

T = TypeVar("T")


class Message(Struct, frozen=True, array_like=True, kw_only=False):
    """The base of all: a list on the wire."""


# --- both ways ------------------------------------------------------------------------------------------------------


class Beat(Message, frozen=True, tag="beat"):
    """I live. A worker answers with the same number and with what its engines say of themselves."""

    number: int
    stats: dict[str, EngineStats] = field(default_factory=dict)


class Goodbye(Message, frozen=True, tag="bye"):
    """The sender leaves in peace. From a worker: it takes nothing new and ends when its answers have."""

    reason: str = ""


# --- for a worker ---------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """`name` is who asks, the same on all his links; `able` are optional parts of the protocol that he speaks."""

    version: int
    name: str
    able: tuple[str, ...] = ()


class OpenEngine(Message, frozen=True, tag="open"):
    """`options` is the engine's own Options as JSON. An engine of this id that is open already is taken over."""

    engine: str
    backend: str
    model: str
    options: bytes
    caches: dict[str, CacheInfo]
    modalities: tuple[str, ...] = ("text",)
    identity: str = ""


class CloseEngine(Message, frozen=True, tag="close"):
    engine: str


class InferRequest(Message, frozen=True):
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


class AddRequest(Message, frozen=True, tag="add"):
    engine: str
    request: InferRequest


class AddChat(Message, frozen=True, tag="chat"):
    engine: str
    request_id: int
    request: Request


class AbortRequest(Message, frozen=True, tag="abort"):
    request_id: int


class Hold(Message, frozen=True, tag="hold"):
    """Its reader lags: nothing more of this request until `GoOn`."""

    request_id: int


class GoOn(Message, frozen=True, tag="go"):
    request_id: int


class Order(Message, frozen=True, tag="order"):
    request_id: int
    engine: str
    control: Control


class Embed(Message, frozen=True, tag="embed"):
    request_id: int
    engine: str
    batch: list[bytes]


class Count(Message, frozen=True, tag="count"):
    request_id: int
    engine: str
    request: Request


class Forget(Message, frozen=True, tag="forget"):
    """The client of this name is gone: end what it left behind, then answer `Done`."""

    request_id: int
    name: str


class Study(Message, frozen=True, tag="study"):
    """The tokenizer of this engine, for a gateway without its files; those of the hashes in `have` it has already."""

    request_id: int
    engine: str
    have: tuple[str, ...] = ()


class Dismiss(Message, frozen=True, tag="dismiss"):
    """From the scheduler to a worker that it started: nothing is left to do, end."""


ForWorker = (
    Hello
    | Beat
    | OpenEngine
    | CloseEngine
    | AddRequest
    | AddChat
    | AbortRequest
    | Hold
    | GoOn
    | Order
    | Embed
    | Count
    | Forget
    | Study
    | Dismiss
    | Goodbye
)


# --- for a client of a worker ---------------------------------------------------------------------------------------


class Held(Message, frozen=True):
    """An engine that the worker holds open."""

    engine: str
    model: str
    identity: str
    kind: Literal["text", "chat"]
    info: EngineInfo


class Welcome(Message, frozen=True, tag="welcome"):
    version: int
    worker: str
    pid: int
    engines: list[Held] = []
    able: tuple[str, ...] = ()


class Refused(Message, frozen=True, tag="refused"):
    reason: str


class Loading(Message, frozen=True, tag="loading"):
    engine: str
    done: float
    doing: str


class Opened(Message, frozen=True, tag="opened"):
    engine: str
    kind: Literal["text", "chat"]
    info: EngineInfo
    embeds: bool = False


class OpenFailed(Message, frozen=True, tag="failed"):
    engine: str
    error: ModelyardError


class Closed(Message, frozen=True, tag="closed"):
    engine: str


class Lost(Message, frozen=True, tag="lost"):
    """The engine died; its worker lives."""

    engine: str
    error: ModelyardError


class Accepted(Message, frozen=True, tag="a"):
    request_id: int
    cached_tokens: int = 0
    divergence: int | None = None
    evicted: bool = False
    elsewhere: int = 0


class Progress(Message, frozen=True, tag="p"):
    request_id: int
    done: int
    total: int


class Step(Message, frozen=True, tag="s"):
    """One or more tokens, little-endian u32."""

    request_id: int
    tokens: bytes
    logprobs: list[IdLogprob] | None = None


class Finish(Message, frozen=True, tag="f"):
    request_id: int
    reason: Literal["stop", "length", "window", "cancelled"]
    usage: Usage = Usage()
    timings: Timings = Timings()


class Error(Message, frozen=True, tag="e"):
    """The error carries its message and code."""

    request_id: int
    error: ModelyardError
    usage: Usage = Usage()
    timings: Timings = Timings()


class Said(Message, frozen=True, tag="c"):
    """What a chat engine said; the last one ends the request."""

    request_id: int
    events: list[Event]


Item = Accepted | Progress | Step | Finish | Error | Said


class Frame(Message, frozen=True, tag="frame"):
    """All that one step made for one client. `stats` come along where an engine has just become idle."""

    items: list[Item]
    stats: dict[str, EngineStats] = field(default_factory=dict)


class Done(Message, frozen=True, tag="done"):
    """The answer to `Order`, `Embed`, `Count`, `Forget` and `Study`; `stats` are what an order has changed;
    `tokenizer` is its hash, and `files` are none where the asker has them."""

    request_id: int
    error: ModelyardError | None = None
    vectors: list[bytes] = []
    tokens: int | None = None
    stats: dict[str, EngineStats] = field(default_factory=dict)
    tokenizer: str = ""
    files: dict[str, bytes] = field(default_factory=dict)


ForClient = Beat | Welcome | Refused | Loading | Opened | OpenFailed | Closed | Lost | Frame | Done | Goodbye


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
encode: Callable[[Message], bytes] = _encoder.encode


def reader(kind: Any) -> Callable[[bytes], Any]:
    """From bytes to one of these messages; whatever else comes is `Malformed`."""
    decoder = msgspec.msgpack.Decoder(kind, dec_hook=_read)

    def read(data: bytes) -> Any:
        try:
            return decoder.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, RecursionError) as error:
            raise Malformed(str(error)) from None

    return read


read_for_worker: Callable[[bytes], ForWorker] = reader(ForWorker)
read_for_client: Callable[[bytes], ForClient] = reader(ForClient)


def version_fault(theirs: int) -> str | None:
    """Why we cannot talk, or None."""
    if theirs == VERSION:
        return None
    older = "the other side is older" if theirs < VERSION else "this side is older"
    return f"protocol version {theirs} is not {VERSION}: {older}; run the same Modelyard on both sides"


def chunk_of(item: Item, ids: Callable[[bytes], list[int]]) -> core.Chunk:
    """The engine's word for it."""
    if type(item) is Step:
        return core.Tokens(ids(item.tokens), item.logprobs)
    if isinstance(item, Accepted):
        return core.Accepted(item.cached_tokens, item.divergence, item.evicted, item.elsewhere)
    if isinstance(item, Progress):
        return core.Progress(item.done, item.total)
    if isinstance(item, Finish):
        return core.End(item.reason, item.usage, item.timings)
    if isinstance(item, Error):
        return core.End("error", item.usage, item.timings, item.error)
    raise Malformed("a token engine said events")


def item_of(request_id: int, chunk: core.Chunk, packed: Callable[[list[int]], bytes]) -> Item:
    if type(chunk) is core.Tokens:
        return Step(request_id, packed(chunk.ids), chunk.logprobs)
    if isinstance(chunk, core.Accepted):
        return Accepted(request_id, chunk.cached_tokens, chunk.divergence, chunk.evicted, chunk.elsewhere)
    if isinstance(chunk, core.Progress):
        return Progress(request_id, chunk.done, chunk.total)
    assert isinstance(chunk, core.End)  # noqa: S101  there is no fifth
    if chunk.reason != "error":
        return Finish(request_id, chunk.reason, chunk.usage, chunk.timings)
    error = chunk.error or Internal("the engine failed and did not say why")
    return Error(request_id, error, chunk.usage, chunk.timings)


def stats_of(engines: Mapping[str, core.Engine]) -> dict[str, EngineStats]:
    return {name: engine.stats() for name, engine in engines.items()}
