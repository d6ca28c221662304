"""Workers and schedulers as targets of a peer that sends arbitrary frames, and the readers of what they send back.

Whatever a peer sends, the process answers its other peers within the deadline, and its log has no traceback.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

import modelyard_fake as fake
from modelyard.core import errors
from modelyard.core.errors import ModelyardError
from modelyard.workers import messages as msg
from modelyard.workers.transport import DealerSocket
from tests.fuzz.explore import DEADLINE_S, Finding, Target
from tests.fuzz.server_under_test import logged
from tests.fuzz.values import Json, Values, code_words, damaged, shrunk
from tests.workers.harness import connected, ipc_endpoint, open_fake, running_worker, short_folder
from tests.workers.test_scheduler_server import Deployment, deployed

Decode = Callable[[bytes], msg.LinkMessage]
_ERROR_SCHEMA = {
    "type": "array",
    "prefixItems": [
        {"enum": [name for name, kind in vars(errors).items() if isinstance(kind, type)]},
        {"type": "object", "properties": {name: {} for name in msg._ATTRIBUTES}, "required": ["message"]},
    ],
}
_WORDS = [*code_words(Path(msg.__file__), Path(fake.__file__).parent / "script.py"), "demo", "main", "e", "fake", "w"]
_MAX_FRAMES = 4
_BEATS = 1_000_000  # numbers of our own heartbeats begin here


class Conversation(NamedTuple):
    """What one peer sends after its greeting."""

    greets: bool
    frames: tuple[bytes, ...]

    def shrunk(self, still_fails: Callable[[Conversation], bool]) -> Conversation:
        def of(frames: list[bytes]) -> Conversation:
            return Conversation(self.greets, tuple(frames))

        return of(shrunk(list(self.frames), lambda fewer: still_fails(of(fewer)), attempts=20))

    def __repr__(self) -> str:
        return f"greets: {self.greets}\n" + "\n".join(_readable(frame) for frame in self.frames)


def _readable(frame: bytes) -> str:
    try:
        return f"{msgspec.msgpack.decode(frame)!r}  {frame!r}"
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return repr(frame)


class Frames:
    """Random frames for one receiver."""

    def __init__(self, receiver: type[msg.LinkMessage]) -> None:
        kinds: list[Any] = [*receiver.__subclasses__(), msg.Heartbeat, msg.Goodbye]
        self._schemas, components = msgspec.json.schema_components(
            kinds, schema_hook=_schema_hook, ref_template="#/{name}"
        )
        self._values = Values(_WORDS, components, binary=True)

    def one(self, rng: Random) -> bytes:
        value = self._values.of(rng.choice(self._schemas), rng)
        if rng.random() < 0.4:
            value = self._values.mutated(value, rng, rng.randint(1, 2))
        data = _pack(value)
        return damaged(data, rng) if rng.random() < 0.15 else data

    def conversation(self, rng: Random) -> Conversation:
        return Conversation(rng.random() < 0.9, tuple(self.one(rng) for _ in range(rng.randint(1, _MAX_FRAMES))))


def _schema_hook(kind: type) -> Json:
    if kind is ModelyardError:
        return _ERROR_SCHEMA
    raise NotImplementedError(kind)


def _pack(value: Json) -> bytes:
    """MessagePack has integers of 64 bits."""
    return msgspec.msgpack.encode(_bounded(value))


def _bounded(value: Json) -> Json:
    if isinstance(value, dict):
        return {key: _bounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_bounded(part) for part in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return 2**63
    return value


# --- the readers ------------------------------------------------------------------------------------------------------


def reader_targets() -> list[Target[Any]]:
    """What a worker sends to its clients and a scheduler to its gateways: read, or refused as malformed."""
    to_client, to_gateway = (msg.ToClient, msg.decode_for_client), (msg.ToGateway, msg.decode_for_gateway)
    receivers: dict[str, tuple[type[msg.LinkMessage], Decode]] = {"a client": to_client, "a gateway": to_gateway}
    return [
        Target(f"frames to {name}", Frames(group).one, _reader(f"frames to {name}", decode))
        for name, (group, decode) in receivers.items()
    ]


def _reader(name: str, decode: Decode) -> Callable[[bytes], str]:
    def check(frame: bytes) -> str:
        began = time.monotonic()
        try:
            decode(frame)
            outcome = "read"
        except msg.MalformedMessage:
            outcome = "refused"
        except Exception as error:
            raise Finding("exception", name, repr(error), _readable(frame)) from error
        if time.monotonic() - began > DEADLINE_S:
            raise Finding("hang", name, "decoding", _readable(frame))
        return outcome

    return check


# --- workers and schedulers -------------------------------------------------------------------------------------------


class RawPeer:
    """Sends anything, and keeps what comes back."""

    def __init__(self, endpoint: str, decode: Decode) -> None:
        self.received: list[msg.LinkMessage] = []
        self.changed = asyncio.Event()
        self._decode = decode
        self._socket = DealerSocket(endpoint, self._on_data, lambda _: None, None)

    def _on_data(self, data: bytes) -> None:
        self.received.append(self._decode(data))
        self.changed.set()

    def send(self, frame: bytes) -> None:
        self._socket.send(frame)

    async def beat(self, number: int, timeout_s: float) -> str:
        """The answer to a heartbeat: "alive", "refused", or "silent"."""
        self.send(msg.encode(msg.Heartbeat(number)))
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    for one in self.received:
                        if isinstance(one, msg.ConnectionRefused):
                            return "refused"
                        if isinstance(one, msg.Heartbeat) and one.number == number:
                            return "alive"
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return "silent"

    async def close(self) -> None:
        await self._socket.close()


class PeerTarget:
    """A worker or scheduler at `endpoint`, and a bystander who must not notice anything."""

    def __init__(
        self, name: str, endpoint: str, greeting: Callable[[str], msg.LinkMessage], decode: Decode, read_log: Any
    ) -> None:
        self.name, self._endpoint, self._greeting, self._decode = name, endpoint, greeting, decode
        self._read_log, self._count = read_log, 0
        self._bystander = RawPeer(endpoint, decode)
        self._bystander.send(msg.encode(greeting("bystander")))

    async def close(self) -> None:
        await self._bystander.close()

    async def converse(self, conversation: Conversation) -> str:
        self._count += 1
        peer = RawPeer(self._endpoint, self._decode)
        if conversation.greets:
            peer.send(msg.encode(self._greeting(f"peer-{self._count}")))
        for frame in conversation.frames:
            peer.send(frame)
        outcome = await peer.beat(_BEATS + self._count, 0.3)  # a peer that said goodbye gets no answer
        await peer.close()
        self._bystander.received.clear()
        if await self._bystander.beat(_BEATS + self._count, DEADLINE_S) != "alive":
            raise Finding("hang", self.name, "another peer got no answer", conversation)
        if "Traceback" in (text := self._read_log()):
            raise Finding("traceback", self.name, _last_error(text), f"{conversation!r}\n{text[-3000:]}")
        return outcome


def _last_error(text: str) -> str:
    lines = [line for line in text.replace("\\n", "\n").splitlines() if "Error" in line or "Exception" in line]
    return (lines or [text])[-1].strip()[:200]


@asynccontextmanager
async def _peer_targets(read_log: Callable[[], str]) -> AsyncIterator[list[PeerTarget]]:
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(running_worker(ipc_endpoint()))
        session = await stack.enter_async_context(connected(worker, "owner"))
        await open_fake(session, "e")
        deployment: Deployment = await stack.enter_async_context(deployed(short_folder()))
        targets = [
            PeerTarget(
                "frames to a worker",
                worker.endpoint,
                lambda name: msg.Hello(msg.VERSION, name),
                msg.decode_for_client,
                read_log,
            ),
            PeerTarget(
                "frames to a scheduler",
                deployment.endpoint,
                lambda name: msg.JoinGateway(msg.VERSION, name),
                msg.decode_for_gateway,
                read_log,
            ),
        ]
        try:
            yield targets
        finally:
            for target in targets:
                await target.close()


@contextmanager
def frame_targets() -> Iterator[list[Target[Any]]]:
    """A worker and a scheduler on a loop of their own, and the readers of their messages."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(10 * DEADLINE_S)

    receivers = (msg.ToWorker, msg.ToScheduler)
    with logged() as read_log:
        opened = _peer_targets(read_log)
        peers = run(opened.__aenter__())
        try:
            yield [
                *reader_targets(),
                *(
                    Target(
                        peer.name,
                        Frames(receiver).conversation,
                        lambda conversation, peer=peer: run(peer.converse(conversation)),
                        lambda conversation, still_fails: conversation.shrunk(still_fails),
                    )
                    for peer, receiver in zip(peers, receivers, strict=True)
                ),
            ]
        finally:
            run(opened.__aexit__(None, None, None))
            loop.call_soon_threadsafe(loop.stop)
            thread.join(DEADLINE_S)
            loop.close()
