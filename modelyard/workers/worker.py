"""A worker: engines behind a socket. It passes its clients' requests to the engines and sends back their output.

The event loop does the I/O: messages in, batches out. An engine computes in its own threads and hands its tokens to the
loop step by step. Every client that reaches its socket may use it, but only to run the models of the worker's own
configuration (`definitions.py`). A client that sends a malformed message, or is silent while its requests run, is
dropped, and its requests are cancelled.

Identical requests from several gateways have one engine run: a client's retry may reach another gateway. Each gateway
deduplicates its own requests; those of different gateways meet here. A prompt with a `dedup_key` may share its run with
prompts that have the same key and are otherwise equal. A reader that joins gets everything from the start. The run is
cancelled when the last reader leaves.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Literal, cast
from uuid import uuid4

from msgspec.structs import replace

from modelyard import plugins
from modelyard.core.engine import (
    Chunk,
    EmbeddingEngine,
    End,
    Engine,
    EnginePlugin,
    EngineStats,
    ForwardingEngine,
    Generation,
    OnProgress,
    Prompt,
    TextEngine,
)
from modelyard.core.errors import Conflict, ModelyardError, Unavailable, Unsupported
from modelyard.core.events import Failed, Usage
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.telemetry.request_capture import current_capture
from modelyard.workers import messages as msg
from modelyard.workers.definitions import Definitions, engine_spec
from modelyard.workers.peer_server import Peer, PeerServer, to_modelyard_error
from modelyard.workers.tokenizer_files import read_tokenizer_files, tokenizer_hash
from modelyard.workers.transport import ClusterKeys, HeartbeatConfig

log = logging.getLogger(__name__)


# --- identical requests -----------------------------------------------------------------------------------------------

_MAX_CHUNKS = 4096  # kept for readers that join; after that a run cannot be joined
_TAIL_TOKENS = 16  # of a prompt, used as part of the lookup key


class RunDeduplicator:
    """The runs that may be joined."""

    def __init__(self) -> None:
        self._runs: dict[Hashable, SharedRun] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def generate(self, engine: TextEngine, prompt: Prompt) -> Generation[Chunk]:
        if prompt.dedup_key is None:
            return engine.generate(prompt)
        ids = prompt.ids
        key = (id(engine), prompt.dedup_key, len(ids), tuple(ids[-_TAIL_TOKENS:]))
        run = self._runs.get(key)
        if run is not None and run.prompt == _comparable(prompt):
            return run.join()
        source = engine.generate(prompt)
        if not isinstance(source, GenerationQueue):
            return source
        self._runs[key] = run = SharedRun(cast("GenerationQueue[Chunk]", source), prompt)
        run.on_closed = partial(self._remove, key, run)
        reader = run.join()
        run.start()
        return reader

    def _remove(self, key: Hashable, run: SharedRun) -> None:
        if self._runs.get(key) is run:
            del self._runs[key]


def _comparable(prompt: Prompt) -> Prompt:
    """Without the fields that may differ between requests that share a run."""
    return replace(prompt, trace="", priority="main")


class SharedRun:
    """One run of an engine and the queues of its readers. `on_closed` is called when it can no longer be joined."""

    def __init__(self, source: GenerationQueue[Chunk], prompt: Prompt) -> None:
        self.prompt = _comparable(prompt)
        self._source, self._usage = source, Usage(prompt.n_tokens)
        self._chunks: list[Chunk] = []
        self._readers: list[GenerationQueue[Chunk]] = []
        self._is_paused = False
        self.on_closed: Callable[[], None] = lambda: None

    def start(self) -> None:
        self._source.forward_to(self._on_chunks)

    def join(self) -> GenerationQueue[Chunk]:
        reader: GenerationQueue[Chunk] = GenerationQueue(on_cancel=lambda: self._leave(reader), on_drained=self._resume)
        if self._chunks:
            reader.put_many(self._chunks)
        self._readers.append(reader)
        self._resume()
        return reader

    def _on_chunks(self, chunks: list[Chunk], last: bool) -> None:
        self._chunks += chunks
        if last or len(self._chunks) > _MAX_CHUNKS:
            self._chunks = []
            self.on_closed()
        for reader in self._readers:
            reader.put_many(chunks, last=last)
        if not last and all(reader.full for reader in self._readers):
            self._is_paused = True
            self._source.forward_to(None)  # no reader keeps up: let the engine's queue fill

    def _resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.start()

    def _leave(self, reader: GenerationQueue[Chunk]) -> None:
        """The last reader cancels the run and gets its end from the engine."""
        if self._readers == [reader]:
            self.on_closed()
            self._source.cancel()
            self._resume()
            return
        self._readers = [other for other in self._readers if other is not reader]
        reader.put_many([End("cancelled", self._usage)], last=True)
        if not all(other.full for other in self._readers):
            self._resume()


_MAX_CLIENTS = 4096
_KEPT_LINES = 200  # of the log, until a client wants them


# --- engines --------------------------------------------------------------------------------------------------------


class HostedEngine:
    """`engine` is set once it is open. `on_lost` is called when it dies by itself."""

    def __init__(
        self,
        message: msg.OpenEngine,
        definitions: Definitions,
        on_lost: Callable[[HostedEngine, ModelyardError], None],
    ) -> None:
        self.id, self.spec = message.engine, message.spec
        self._definitions, self._on_lost = definitions, on_lost
        self.engine: Engine | None = None
        self.kind: Literal["text", "chat"] = "text"
        self.running = 0
        self.opening: asyncio.Task[None] | None = None
        self._plugin: EnginePlugin | None = None
        self._options: Any = None
        self._created: Engine | None = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self, progress: OnProgress) -> None:
        try:
            definition = await asyncio.to_thread(self._definitions.find, self.spec.model)
            spec = engine_spec(definition, self.spec)
            self._plugin, self._options = plugins.engine(spec.backend), spec.options
            self.kind = self._plugin.kind_of(spec.options)
            self._created = engine = self._plugin.create(spec)
            await engine.open(progress)
        except asyncio.CancelledError:
            await self.close()
            raise
        except Exception as error:
            await self.close()
            raise to_modelyard_error(error) from error
        self.engine = engine
        self._watching = asyncio.get_running_loop().create_task(self._watch(engine))

    async def _watch(self, engine: Engine) -> None:
        self._on_lost(self, await asyncio.shield(engine.lost))

    async def abort(self) -> None:
        """Close it, also while it opens."""
        if self.opening is not None and not self.opening.done():
            self.opening.cancel()
            await asyncio.wait({self.opening})
        await self.close()

    async def close(self) -> None:
        """Idempotent."""
        self.engine = None
        if self._watching is not None:
            self._watching.cancel()
        engine, self._created = self._created, None
        if engine is not None:
            await engine.close()

    async def tokenizer_files(self) -> dict[str, bytes]:
        find = self._plugin.tokenizer_path if self._plugin is not None else None
        if find is None:
            raise Unsupported(
                f"the engine of {self.spec.model!r} has no tokenizer of its own", code="tokenizer_missing"
            )
        return await asyncio.to_thread(lambda: read_tokenizer_files(find(self._options)))

    def opened_message(self) -> msg.EngineOpened:
        assert self.engine is not None  # noqa: S101  checked by the caller
        return msg.EngineOpened(self.id, self.kind, self.engine.info, isinstance(self.engine, EmbeddingEngine))

    def info(self) -> msg.HostedEngineInfo:
        assert self.engine is not None  # noqa: S101  checked by the caller
        return msg.HostedEngineInfo(self.id, self.spec.model, self.spec.identity, self.kind, self.engine.info)


# --- clients and their requests -------------------------------------------------------------------------------------


class WorkerClient(Peer):
    """`updates` and `stats` leave with the next batch. `paused` are the requests whose reader lags."""

    def __init__(self, identity: bytes, name: str, max_missed: int, *, wants_log: bool) -> None:
        super().__init__(identity, name, max_missed)
        self.wants_log = wants_log
        self.requests: dict[int, WorkerRequest] = {}
        self.paused: set[int] = set()
        self.updates: list[msg.RequestUpdate] = []
        self.stats: dict[str, EngineStats] = {}


class WorkerRequest:
    """One request in an engine. `ended` is done when its slot is free."""

    __slots__ = ("_generation", "_worker", "client", "ended", "hosted", "id")

    def __init__(self, id: int, client: WorkerClient, hosted: HostedEngine, worker: Worker) -> None:
        self.id, self.client, self.hosted, self._worker = id, client, hosted, worker
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._generation: GenerationQueue[Any] | None = None

    def start(self, generation: Generation[Any]) -> None:
        if not isinstance(generation, GenerationQueue):
            raise TypeError(f"an engine must return a GenerationQueue, not {type(generation).__name__}")
        self._generation = generation
        self.resume()

    def _on_items(self, items: list[Any], last: bool) -> None:
        if last:
            self._worker.on_request_end(self)
        update = msg.ChatEvents if self.hosted.kind == "chat" else msg.TextChunks
        self._worker.add_updates(self.client, [update(self.id, items)])

    def fail(self, error: ModelyardError) -> None:
        if not self.ended.done():
            self._worker.on_request_end(self)
            self._worker.add_updates(self.client, [_failure(self.id, self.hosted.kind, error)])

    def pause(self) -> None:
        """Output waits in the engine's queue, which tells the engine when it is full."""
        if self._generation is not None:
            self._generation.forward_to(None)

    def resume(self) -> None:
        if self._generation is not None and not self.ended.done():
            self._generation.forward_to(self._on_items)

    def abort(self) -> None:
        """Output that waited for a paused reader is flushed: no `ResumeRequest` will come."""
        if self._generation is not None:
            self._generation.cancel()
            self.resume()


class TrafficReport:
    """Reports to the client what an engine sends to its server and receives, for the client's `RequestCapture`."""

    def __init__(self, worker: Worker, client: WorkerClient, id: int) -> None:
        self._worker, self._client, self._id = worker, client, id

    def prompt(self, text: str) -> None:
        self._worker.add_updates(self._client, [msg.ChatTraffic(self._id, sent=text)])

    def output(self, text: str) -> None:
        self._worker.add_updates(self._client, [msg.ChatTraffic(self._id, received=text)])

    def request(self, body: bytes) -> None: ...
    def response(self, data: bytes) -> None: ...
    def close(self) -> None: ...


class LogForwarder(logging.Handler):
    """Sends the log records of the worker's process to the clients that want them."""

    def __init__(self, forward: Callable[[msg.LogLine], None]) -> None:
        super().__init__(logging.INFO)
        self._forward = forward

    def emit(self, record: logging.LogRecord) -> None:
        try:
            error = logging.Formatter().formatException(record.exc_info) if record.exc_info else record.exc_text or ""
            request_id = getattr(record, "request_id", "")
            line = (record.created, record.levelno, record.name, record.getMessage(), request_id, error)
            self._forward(msg.LogLine(*line))
        except Exception:
            self.handleError(record)


def _failure(id: int, kind: str, error: ModelyardError) -> msg.RequestUpdate:
    return msg.ChatEvents(id, [Failed(error)]) if kind == "chat" else msg.TextChunks(id, [End("error", error=error)])


# --- the worker -----------------------------------------------------------------------------------------------------

EngineCall = (
    msg.ControlEngine
    | msg.EmbedTokens
    | msg.EmbedInputs
    | msg.RerankDocuments
    | msg.CountChatTokens
    | msg.FetchTokenizer
)


class Worker(PeerServer[WorkerClient]):
    def __init__(
        self,
        endpoint: str,
        definitions: Definitions,
        *,
        keys: ClusterKeys | None = None,
        name: str = "",
        heartbeat: HeartbeatConfig = HeartbeatConfig(),
    ) -> None:
        self._definitions = definitions
        self.name = name or f"worker-{uuid4().hex[:12]}"
        self.shutdown_requested = asyncio.Event()
        self._engines: dict[str, HostedEngine] = {}
        self._opening_clients: dict[str, set[WorkerClient]] = {}
        self._flush_clients: list[WorkerClient] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._requests: set[WorkerRequest] = set()
        self._is_draining = False
        self._deduplicator = RunDeduplicator()
        self._log_lines: deque[msg.LogLine] = deque(maxlen=_KEPT_LINES)
        handlers: dict[type, Callable[[WorkerClient, Any], None]] = {
            msg.AddRequest: self._on_add_request,
            msg.AddChat: self._on_add_chat,
            msg.AbortRequest: self._on_abort,
            msg.PauseRequest: self._on_pause,
            msg.ResumeRequest: self._on_resume,
            msg.Heartbeat: self._on_heartbeat,
            msg.OpenEngine: self._on_open,
            msg.CloseEngine: self._on_close,
            msg.ControlEngine: self._on_engine_call,
            msg.EmbedTokens: self._on_engine_call,
            msg.EmbedInputs: self._on_engine_call,
            msg.RerankDocuments: self._on_engine_call,
            msg.CountChatTokens: self._on_engine_call,
            msg.FetchTokenizer: self._on_engine_call,
            msg.DropClient: self._on_drop_client,
            msg.ShutdownWorker: lambda *_: self.shutdown_requested.set(),
        }
        super().__init__(endpoint, msg.decode_for_worker, handlers, keys=keys, heartbeat=heartbeat)

    def __repr__(self) -> str:
        engines, clients = len(self._engines), len(self._peers)
        return f"<Worker {self.name}: {engines} engines, {len(self._requests)} running, {clients} clients>"

    @property
    def clients(self) -> set[str]:
        return {client.name for client in self._peers.values()}

    @property
    def engines(self) -> tuple[HostedEngine, ...]:
        """The open ones."""
        return tuple(hosted for hosted in self._engines.values() if hosted.engine is not None)

    # --- clients ----------------------------------------------------------------------------------------------------

    def _on_first_message(self, identity: bytes, message: msg.LinkMessage) -> None:
        if not isinstance(message, msg.Hello):
            raise msg.MalformedMessage("the first message must be Hello")
        client = WorkerClient(identity, message.name, self._heartbeat.client_misses, wants_log=message.wants_log)
        reason = msg.version_mismatch(message.version)
        if reason is None and len(self._peers) >= _MAX_CLIENTS:
            reason = f"the worker has {_MAX_CLIENTS} clients already"
        if reason is not None:
            self._refuse(client, reason)
            return
        self._peers[identity] = client
        engines = [hosted.info() for hosted in self.engines]
        self._send(client, msg.Welcome(msg.VERSION, self.name, os.getpid(), engines))
        self._send_log()

    def _on_dropped(self, peer: WorkerClient) -> None:
        for request in list(peer.requests.values()):
            request.abort()

    def _holds_resources(self, peer: WorkerClient) -> bool:
        """A scheduler never does: a long pause of it must not look like our death when it continues."""
        return bool(peer.requests)

    def _on_congested(self, peer: WorkerClient) -> None:
        for request in peer.requests.values():
            request.pause()

    def _on_writable(self, peer: WorkerClient) -> None:
        for id, request in list(peer.requests.items()):
            if id not in peer.paused:
                request.resume()

    def _on_heartbeat(self, client: WorkerClient, heartbeat: msg.Heartbeat) -> None:
        stats = {h.id: h.engine.stats() for h in self._engines.values() if h.engine is not None}
        self._send(client, msg.Heartbeat(heartbeat.number, stats))

    def add_updates(self, client: WorkerClient, updates: Sequence[msg.RequestUpdate]) -> None:
        """Everything produced in one loop iteration leaves as one batch per client."""
        if client.is_gone:
            return
        if not client.updates:
            if not self._flush_clients:
                self._loop.call_soon(self._flush)
            self._flush_clients.append(client)
        client.updates.extend(updates)

    def _flush(self) -> None:
        # The loss of an engine must arrive before the ends of its requests, or they are retried on the same engine.
        for hosted in self.engines:
            if hosted.engine is not None and hosted.engine.lost.done():
                self._on_engine_lost(hosted, hosted.engine.lost.result())
        clients, self._flush_clients = self._flush_clients, []
        for client in clients:
            updates, client.updates = client.updates, []
            stats, client.stats = client.stats, {}
            if updates:
                self._send(client, msg.UpdateBatch(updates, stats))

    # --- the log ----------------------------------------------------------------------------------------------------

    def forward_log(self, line: msg.LogLine) -> None:
        """Any thread may log."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._add_log_line, line)

    def _add_log_line(self, line: msg.LogLine) -> None:
        self._log_lines.append(line)
        self._send_log()

    def _send_log(self) -> None:
        # A scheduler has a connection for each engine, and wants each line once.
        readers = {client.name: client for client in self._peers.values() if client.wants_log and not client.backlog}
        if readers and self._log_lines:
            lines = list(self._log_lines)
            self._log_lines.clear()
            self._send_all(readers.values(), msg.WorkerLog(lines))

    # --- requests ---------------------------------------------------------------------------------------------------

    def _on_add_request(self, client: WorkerClient, message: msg.AddRequest) -> None:
        start = partial(self._deduplicator.generate, prompt=msg.with_deadline(message.prompt))
        self._start_request(client, message.engine, message.request_id, "text", start)

    def _on_add_chat(self, client: WorkerClient, message: msg.AddChat) -> None:
        def start(engine: Any) -> Generation[Any]:
            traffic = TrafficReport(self, client, message.request_id) if message.capture else None
            token = current_capture.set(traffic)
            try:
                return cast("Generation[Any]", engine.chat(message.request))
            finally:
                current_capture.reset(token)

        self._start_request(client, message.engine, message.request_id, "chat", start)

    def _start_request(
        self, client: WorkerClient, engine_id: str, id: int, kind: str, start: Callable[[Any], Generation[Any]]
    ) -> None:
        if id in client.requests:
            raise msg.MalformedMessage(f"the request id {id} is in use")
        self._send(client, msg.RequestReceived(id))  # at once: the request may kill this process
        try:
            hosted, engine = self._find(engine_id)
            if self._is_draining:
                raise _shutting_down()
            if hosted.kind != kind:
                raise Conflict(f"the engine {engine_id!r} takes {hosted.kind} requests, not {kind}")
        except ModelyardError as error:
            self.add_updates(client, [_failure(id, kind, error)])
            return
        request = client.requests[id] = WorkerRequest(id, client, hosted, self)
        hosted.running += 1
        self._requests.add(request)
        self._idle.clear()
        try:
            request.start(start(engine))
        except Exception as error:  # it fails this request, not the worker
            request.fail(to_modelyard_error(error))
        if client.backlog:
            request.pause()

    def _find(self, engine: str) -> tuple[HostedEngine, Engine]:
        hosted = self._engines.get(engine)
        if hosted is None or hosted.engine is None:
            raise Unavailable(f"the worker has no engine {engine!r}", code="engine_gone")
        return hosted, hosted.engine

    def on_request_end(self, request: WorkerRequest) -> None:
        client, hosted = request.client, request.hosted
        request.ended.set_result(None)
        client.requests.pop(request.id, None)
        client.paused.discard(request.id)
        hosted.running -= 1
        self._requests.discard(request)
        if not self._requests:
            self._idle.set()
        if not hosted.running and hosted.engine is not None:
            client.stats[hosted.id] = hosted.engine.stats()

    def _on_abort(self, client: WorkerClient, abort: msg.AbortRequest) -> None:
        client.paused.discard(abort.request_id)
        if (request := client.requests.get(abort.request_id)) is not None:  # it may have ended meanwhile
            request.abort()

    def _on_pause(self, client: WorkerClient, pause: msg.PauseRequest) -> None:
        if (request := client.requests.get(pause.request_id)) is not None:
            client.paused.add(pause.request_id)
            request.pause()

    def _on_resume(self, client: WorkerClient, resume: msg.ResumeRequest) -> None:
        client.paused.discard(resume.request_id)
        if (request := client.requests.get(resume.request_id)) is not None and not client.backlog:
            request.resume()

    # --- engines ----------------------------------------------------------------------------------------------------

    def _on_open(self, client: WorkerClient, message: msg.OpenEngine) -> None:
        hosted = self._engines.get(message.engine)
        if hosted is None and self._is_draining:
            self._send(client, msg.EngineOpenFailed(message.engine, _shutting_down()))
            return
        if hosted is not None and hosted.engine is not None:
            self._send(client, hosted.opened_message())
            return
        self._opening_clients.setdefault(message.engine, set()).add(client)
        if hosted is None:
            self._engines[message.engine] = hosted = HostedEngine(message, self._definitions, self._on_engine_lost)
            hosted.opening = self._spawn(self._open_engine(hosted))

    async def _open_engine(self, hosted: HostedEngine) -> None:
        def progress(done: float, phase: str) -> None:
            self._send_all(self._opening_clients.get(hosted.id, ()), msg.LoadProgress(hosted.id, done, phase))

        try:
            await hosted.open(progress)
            result: msg.LinkMessage = hosted.opened_message()
        except ModelyardError as error:
            self._engines.pop(hosted.id, None)
            result = msg.EngineOpenFailed(hosted.id, error)
        except asyncio.CancelledError:
            aborted = msg.EngineOpenFailed(hosted.id, Unavailable("the engine was closed while it opened"))
            self._send_all(self._opening_clients.pop(hosted.id, ()), aborted)
            raise
        await asyncio.sleep(0)  # progress reported by an engine's thread reaches the loop in the next iteration
        self._send_all(self._opening_clients.pop(hosted.id, ()), result)

    def _on_engine_lost(self, hosted: HostedEngine, error: ModelyardError) -> None:
        if self._engines.pop(hosted.id, None) is None:
            return
        self._send_all(self._peers.values(), msg.EngineLost(hosted.id, error))
        self._spawn(hosted.close())

    def _on_close(self, client: WorkerClient, message: msg.CloseEngine) -> None:
        self._spawn(self._close_engine(client, message.engine))

    async def _close_engine(self, client: WorkerClient, engine: str) -> None:
        hosted = self._engines.pop(engine, None)
        if hosted is not None:
            try:
                await hosted.abort()
            except Exception:
                log.exception("closing an engine failed")
            others = [other for other in self._peers.values() if other is not client]
            self._send_all(others, msg.EngineLost(engine, Unavailable("the engine was closed")))
        self._send(client, msg.EngineClosed(engine))

    # --- calls ------------------------------------------------------------------------------------------------------

    def _on_engine_call(self, client: WorkerClient, call: EngineCall) -> None:
        self._reply(client, self._run_engine_call(call), lambda error: msg.WorkerReply(call.request_id, error))

    async def _run_engine_call(self, call: EngineCall) -> msg.WorkerReply:
        (hosted, engine), id = self._find(call.engine), call.request_id
        if isinstance(call, msg.FetchTokenizer):
            files = await hosted.tokenizer_files()
            hash_ = tokenizer_hash(files)
            return msg.WorkerReply(id, tokenizer=hash_, files={} if hash_ in call.have else files)
        if isinstance(call, msg.ControlEngine):
            if not isinstance(engine, TextEngine):
                raise Unsupported(f"the engine {call.engine!r} has no control operations")
            if call.control.op == "load_adapter":  # its argument names a file
                raise Unsupported("a worker loads only the adapters of its own configuration: add it to lora there")
            moved = await engine.control(call.control)
            return msg.WorkerReply(id, stats={call.engine: engine.stats()}, moved=moved)
        if isinstance(call, msg.EmbedTokens):
            if not isinstance(engine, EmbeddingEngine):
                raise Unsupported(f"the engine {call.engine!r} makes no embeddings", code="embeddings_unsupported")
            embeddings = await engine.embed(call.batch)
            return msg.WorkerReply(id, None, embeddings.vectors, embeddings.prompt_tokens)
        if isinstance(call, msg.EmbedInputs | msg.RerankDocuments):
            if not isinstance(engine, ForwardingEngine):
                raise Unsupported(f"the engine {call.engine!r} neither embeds nor ranks", code="embeddings_unsupported")
            if isinstance(call, msg.EmbedInputs):
                embeddings = await engine.embed_inputs(call.request)
                return msg.WorkerReply(id, None, embeddings.vectors, embeddings.prompt_tokens)
            ranking = await engine.rerank(call.request)
            return msg.WorkerReply(id, tokens=ranking.prompt_tokens, scores=ranking.scores)
        if isinstance(engine, TextEngine):
            raise Unsupported(f"the engine {call.engine!r} takes tokens: there is nothing to count")
        return msg.WorkerReply(id, tokens=await engine.count(call.request))

    def _on_drop_client(self, client: WorkerClient, message: msg.DropClient) -> None:
        async def work() -> msg.WorkerReply:
            dropped = [other for other in self._peers.values() if other.name == message.name]
            if dropped and message.unless_connected:
                raise Conflict(f"{message.name} is connected to this worker", code="client_connected")
            # Also those of a client that we have noticed to be gone: their engine may not have stopped yet.
            ends = [request.ended for request in self._requests if request.client.name == message.name]
            for other in dropped:
                self._drop(other)
            if ends:
                await asyncio.wait(ends)
            return msg.WorkerReply(message.request_id)

        self._reply(client, work(), lambda error: msg.WorkerReply(message.request_id, error))

    # --- the end ----------------------------------------------------------------------------------------------------

    async def drain(self, grace_s: float) -> bool:
        """Take nothing new and wait for the running requests; returns whether all of them have ended."""
        self._is_draining = True
        self._send_all(self._peers.values(), msg.Goodbye("it was asked to stop"))
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        self._timer.cancel()
        self._is_draining = True  # no client may open an engine any more
        while self._engines:
            await self._engines.popitem()[1].abort()
        await asyncio.sleep(0)  # flush the last updates
        await self._cancel_tasks()
        await self._socket.close()


def _shutting_down() -> Unavailable:
    return Unavailable("the worker is shutting down", code="worker_leaving")
