"""Shared by engines that forward to another server: HTTP client, retries, error mapping, jobs.

An answer is always requested as a stream: a server does not notice that the client of a complete reply has left.
Leaving the stream early closes its connection, which tells the upstream that the request was cancelled.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from msgspec.structs import astuple, replace

from modelyard.core.engine import Embeddings, Generation, Ranking
from modelyard.core.errors import (
    Cancelled,
    Forbidden,
    Incomplete,
    Internal,
    InvalidRequest,
    ModelyardError,
    NotFound,
    Timeout,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    Unsupported,
    with_message,
)
from modelyard.core.events import BlockDelta, Event, Failed, Finished, Started, Usage, reply_events
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import EmbeddingRequest, Request, RerankRequest
from modelyard.engines.generation_queue import GenerationQueue
from modelyard.engines.upstream_client import ClientResponse, InvalidResponse, ReadTimeout, UpstreamClient
from modelyard.engines.upstream_connection import ClientError, ConnectFailed, ConnectTimeout, environment_proxy
from modelyard.protocols import openai_embeddings, rerank
from modelyard.telemetry.masking import add_secrets, header_secrets, mask_secrets, url_secrets
from modelyard.telemetry.request_capture import current_capture

UPSTREAM_LOST, UPSTREAM_UNREACHABLE = "upstream_lost", "upstream_unreachable"  # error codes

_MAX_BODY = 32 << 20  # bytes of a reply that is not a stream


class UpstreamAddress(Struct, frozen=True, kw_only=True):
    """`name` is for error messages. `key_source` says where the key is set; it is never the key itself."""

    name: str
    base_url: str
    headers: Mapping[str, str] = {}
    key_source: str = "its key"
    socket: str | None = None  # path of a unix socket
    timeout: float | None = None  # seconds without data; None if the life of the upstream is watched otherwise
    is_child: bool = False  # a child process of ours: no proxy, no idle connections


def transport_error(error: ClientError, upstream: str) -> ModelyardError:
    if isinstance(error, ConnectTimeout):
        return Unavailable(f"{upstream} did not accept the connection in time", code=UPSTREAM_UNREACHABLE)
    if isinstance(error, ReadTimeout):
        return Timeout(f"{upstream} sent nothing for too long", code="upstream_timeout")
    if isinstance(error, ConnectFailed):
        return Unavailable(f"{upstream} cannot be reached: {error}", code=UPSTREAM_UNREACHABLE)
    if isinstance(error, InvalidResponse):
        return Unavailable(f"{upstream} sent an answer that is not valid HTTP", code=UPSTREAM_LOST)
    return Unavailable(f"{upstream} closed the connection: {error}", code=UPSTREAM_LOST)


# --- jobs -------------------------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)

T = TypeVar("T")

Emit = Callable[[Sequence[Event]], Awaitable[bool]]  # returns True once the answer has ended; later events are dropped
ReadError = Callable[[int, Mapping[str, str], bytes], ModelyardError]
RunJob = Callable[[Emit], Coroutine[Any, Any, None]]


class UpstreamJobs:
    """All jobs of one engine. Use it on the thread of the event loop; only `Generation.cancel` is thread-safe."""

    def __init__(self) -> None:
        self._jobs: set[_UpstreamJob] = set()  # includes jobs that have ended but still hold a connection
        self._closed: ModelyardError | None = None

    def __len__(self) -> int:
        """The number of answers that have not ended."""
        return sum(not job.queue.closed for job in self._jobs)

    def start(self, run: RunJob) -> Generation[Event]:
        job = _UpstreamJob(self._jobs.discard)
        if self._closed is not None:
            job.queue.put_many([Failed(self._closed)], last=True)
        else:
            self._jobs.add(job)
            job.start(run)
        return job.queue

    def close(self, error: ModelyardError) -> None:
        """Fails all jobs, the running ones and later ones, with this error."""
        self._closed = error
        for job in tuple(self._jobs):
            job.stop(error)

    async def join(self) -> None:
        """Waits until the tasks of all jobs have ended."""
        await asyncio.gather(*(job.task for job in tuple(self._jobs) if job.task), return_exceptions=True)


class _UpstreamJob:
    def __init__(self, on_end: Callable[[_UpstreamJob], None]) -> None:
        self.task: asyncio.Task[None] | None = None
        self._drained: asyncio.Event | None = None  # while the reader has more to read than it should
        self.queue: GenerationQueue[Event] = GenerationQueue(on_cancel=self._cancel, on_drained=self._on_drained)
        self._stop_error: ModelyardError = Cancelled("the job was cancelled")
        self._on_end = on_end
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()

    def start(self, run: RunJob) -> None:
        self.task = self._loop.create_task(run(self._emit))
        self.task.add_done_callback(self._on_task_done)

    async def _emit(self, events: Sequence[Event]) -> bool:
        if events and not self.queue.closed:
            if isinstance(last := events[-1], Failed):
                events = [*events[:-1], Failed(without_secrets(last.error))]
            elif isinstance(last, Finished) and not _is_plausible(last.usage):
                events = [*events[:-1], replace(last, usage=_bounded(last.usage))]
            if isinstance(first := events[0], Started) and not _is_plausible(first.usage):
                events = [replace(first, usage=_bounded(first.usage)), *events[1:]]
            is_last = isinstance(last, Finished | Failed)
            if not self.queue.put_many(merge_deltas(events), last=is_last) and not is_last:
                self._drained = asyncio.Event()
                await self._drained.wait()
        return self.queue.closed

    def _on_drained(self) -> None:
        if self._drained is not None:
            self._drained.set()

    def stop(self, error: ModelyardError) -> None:
        self._stop_error = error
        if self.task is not None:
            self.task.cancel()

    def _cancel(self) -> None:
        if self.task is None:
            return
        if threading.get_ident() == self._thread:
            self.task.cancel()
        else:
            self._loop.call_soon_threadsafe(self.task.cancel)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._on_end(self)
        error = self._stop_error if task.cancelled() else task.exception()
        if self.queue.closed:
            return
        if error is None:
            error = Incomplete("the stream of the upstream ended without a final event")
        elif not isinstance(error, ModelyardError):
            internal = Internal(f"{type(error).__name__} while a request was forwarded")
            log.error("a forwarded request failed (id %s)", internal.id, exc_info=error)
            error = internal
        self.queue.put_many([Failed(without_secrets(error))], last=True)


_MAX_TOKENS = 1 << 40  # that a reply can have; sums of larger counts fit into no database


def _is_plausible(usage: Usage) -> bool:
    return all(0 <= count <= _MAX_TOKENS for count in astuple(usage))


def _bounded(usage: Usage) -> Usage:
    return Usage(*(min(max(count, 0), _MAX_TOKENS) for count in astuple(usage)))


def merge_deltas(events: Sequence[Event]) -> Sequence[Event]:
    """Text that arrived together is one event. What arrives one by one stays so."""
    if len(events) < 2:
        return events
    merged: list[Event] = []
    run: list[BlockDelta] = []  # neighbours of one block
    for event in events:
        if run and (type(event) is not BlockDelta or event.index != run[0].index):
            merged.append(_joined(run))
            run = []
        if type(event) is BlockDelta:
            run.append(event)
        else:
            merged.append(event)
    return merged if not run else [*merged, _joined(run)]


def _joined(run: list[BlockDelta]) -> BlockDelta:
    if len(run) == 1:
        return run[0]
    logprobs = tuple(logprob for delta in run for logprob in delta.logprobs)
    return BlockDelta(run[0].index, "".join([delta.text for delta in run]), logprobs)


def without_secrets(error: ModelyardError) -> ModelyardError:
    """An upstream may quote the key, the headers or the URL that it was sent."""
    masked = mask_secrets(error.message)
    return error if masked == error.message else with_message(error, masked)


_DRAIN_S = 1.0  # a stream read to its end leaves a connection that can be reused

# --- retries ----------------------------------------------------------------------------------------------------------

_TRANSIENT = frozenset({"rate_limited", "overloaded", "unavailable", "timeout", "internal"})
_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 30.0
_AUTH_FAILED = "upstream_auth_failed"


class RetryableError(Exception):
    """The attempt failed before the first byte of the answer. `has_retry_after`: the upstream named a delay."""

    def __init__(self, error: ModelyardError, has_retry_after: bool = False) -> None:
        super().__init__(error.message)
        self.error, self.has_retry_after = error, has_retry_after


class RetryPolicy(Struct, frozen=True):
    """Allows `max_retries` attempts after the first, and no delay longer than `max_delay` seconds."""

    max_retries: int = 0
    max_delay: float = _MAX_DELAY_S

    def delay(self, failure: RetryableError, attempts: int) -> float | None:
        """Seconds until the next attempt; None: give up. The delay doubles unless the upstream names one."""
        error = failure.error
        if attempts > self.max_retries or error.kind not in _TRANSIENT or error.code == _AUTH_FAILED:
            return None
        delay = error.retry_after if failure.has_retry_after else None
        delay = _FIRST_DELAY_S * 2 ** (attempts - 1) if delay is None else delay
        return delay if delay <= self.max_delay else None


async def with_retries(attempt: Callable[[], Awaitable[T]], policy: RetryPolicy) -> T:
    """Repeats the attempt while it raises RetryableError; raises the error of the last one."""
    attempts = 1
    while True:
        try:
            return await attempt()
        except RetryableError as failure:
            delay = policy.delay(failure, attempts)
            if delay is None:
                raise failure.error from failure.__cause__
        await asyncio.sleep(delay)
        attempts += 1


# --- forwarding -------------------------------------------------------------------------------------------------------


class Upstream:
    """Another server. Create it on the event loop that uses it."""

    def __init__(self, address: UpstreamAddress, retries: RetryPolicy = RetryPolicy()) -> None:
        self.address, self._retries = address, retries
        _check_credentials(address)
        proxy = None if address.is_child or address.socket else environment_proxy(address.base_url)
        add_secrets([*header_secrets(address.headers), *url_secrets(address.base_url), *url_secrets(proxy or "")])
        self._http = UpstreamClient(
            address.base_url,
            headers={"accept-encoding": "identity", "content-type": "application/json", **address.headers},
            proxy=proxy,
            socket=address.socket,
            timeout=address.timeout,
            keep_alive=not address.is_child,
        )

    async def close(self) -> None:
        await self._http.close()

    async def stream_chat(self, path: str, body: bytes, protocol: WireProtocol, emit: Emit) -> None:
        """Emits the events of the answer. Retries only before its first byte."""
        if (capture := current_capture.get()) is not None:
            capture.prompt(body.decode("utf-8", "replace"))
        reply = await with_retries(partial(self._post, path, body, protocol.read_error), self._retries)
        try:
            if reply.headers.get("content-type", "").startswith("application/json"):
                await emit(list(reply_events(protocol.read_reply(await self._read(reply)))))
            else:
                await self._emit_events(reply, protocol, emit)
        finally:
            reply.close()  # an answer that was read to its end has returned its connection before

    async def _post(self, path: str, body: bytes, read_error: ReadError) -> ClientResponse:
        """A response that is an answer. Raises RetryableError if there is none."""
        try:
            reply = await self._http.send("POST", path, body)
        except ClientError as error:
            raise RetryableError(transport_error(error, self.address.name)) from error
        if reply.status < 300:
            return reply
        try:
            text = await self._read(reply)
        except ModelyardError:
            text = b""  # the status is enough
        finally:
            reply.close()
        refusal = read_error(reply.status, reply.headers, text)
        raise RetryableError(map_auth_error(refusal, self.address), "retry-after" in reply.headers)

    async def _emit_events(self, reply: ClientResponse, protocol: WireProtocol, emit: Emit) -> None:
        reader, capture = protocol.reader(), current_capture.get()
        decode = None if capture is None else codecs.getincrementaldecoder("utf-8")("replace").decode
        while chunk := await self._chunk(reply):
            if capture is not None and decode is not None:
                capture.output(decode(chunk))
            if (events := reader.feed(chunk)) and await emit(events):
                break
        else:
            await emit(reader.finish())
            return
        if reply.is_read:
            return
        try:
            async with asyncio.timeout(_DRAIN_S):
                while await self._chunk(reply):
                    pass
        except (TimeoutError, ModelyardError):
            return  # the answer is complete

    async def _chunk(self, reply: ClientResponse) -> bytes:
        """Everything that has arrived; empty at the end."""
        try:
            return await reply.read()
        except ClientError as error:
            raise transport_error(error, self.address.name) from error

    async def _read(self, reply: ClientResponse) -> bytes:
        body = bytearray()
        while chunk := await self._chunk(reply):
            body += chunk
            if len(body) > _MAX_BODY:
                raise Incomplete(f"the reply of {self.address.name} is longer than {_MAX_BODY} bytes")
        if (capture := current_capture.get()) is not None:
            capture.output(body.decode("utf-8", "replace"))
        return bytes(body)

    async def call(self, path: str, body: bytes, read_error: ReadError) -> Any:
        """The JSON of a request without a stream. Retries like `stream_chat`."""
        try:
            reply = await with_retries(partial(self._post, path, body, read_error), self._retries)
            try:
                return msgspec.json.decode(await self._read(reply))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise Incomplete(f"the reply of {self.address.name} is not JSON: {error}") from None
            finally:
                reply.close()
        except ModelyardError as error:
            raise without_secrets(error) from error

    async def request_json(self, method: str, path: str, body: bytes = b"") -> tuple[int, Any]:
        """Status and JSON of a short request; None if the reply is not JSON."""
        try:
            reply = await self._http.send(method, path, body)
        except ClientError as error:
            raise transport_error(error, self.address.name) from error
        try:
            return reply.status, msgspec.json.decode(await self._read(reply))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return reply.status, None
        finally:
            reply.close()


def _check_credentials(address: UpstreamAddress) -> None:
    """Both would be the header `Authorization`, which a request has once."""
    parts = urlsplit(address.base_url)
    if (parts.username or parts.password) and any(name.lower() == "authorization" for name in address.headers):
        raise InvalidRequest(
            f"{address.name} has a user name in its address, and a key or an Authorization header too; only one of "
            "them can be sent: remove the other",
            code="remote_credentials",
        )


def map_auth_error(error: ModelyardError, address: UpstreamAddress) -> ModelyardError:
    """A rejected key is the gateway's: the client's own key is valid, so the client gets no 401 or 403."""
    if isinstance(error, Unauthenticated):
        message = f"{address.name} rejected the key of this gateway: check {address.key_source}"
        return Unavailable(message, code=_AUTH_FAILED)
    if isinstance(error, Forbidden):
        return Unavailable(f"{address.name} rejected this gateway: {error.message}", code=_AUTH_FAILED)
    return error


def read_api_key(model: str, variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise InvalidRequest(
            f"the model {model!r} takes its key from the environment variable {variable!r}, which is not set",
            code="remote_key_missing",
        )
    return key


def reject_bare_prompts(request: Request) -> None:
    if request.prompts:
        raise Unsupported(
            "this model takes conversations only: send messages, not a bare prompt", code="completions_unsupported"
        )


def append_fields(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """Appends fields to a JSON object without parsing it: it may hold a long conversation."""
    return body[:-1] + b"," + msgspec.json.encode(fields)[1:] if fields else body


async def embed_inputs(upstream: Upstream, path: str, request: EmbeddingRequest, model: str) -> Embeddings:
    """Embeddings of an upstream with OpenAI's API; `model` is its name there."""
    body = openai_embeddings.write_request(request, model)
    try:
        reply = await upstream.call(path, body, openai_embeddings.read_error)
    except (NotFound, Unimplemented) as error:
        raise Unsupported(
            f"{upstream.address.name} makes no embeddings: {error.message}", code="embeddings_unsupported"
        ) from error
    return openai_embeddings.read_reply(reply, len(request.inputs))


async def rerank_documents(upstream: Upstream, path: str, request: RerankRequest, model: str) -> Ranking:
    try:
        reply = await upstream.call(path, rerank.write_request(request, model), rerank.read_error)
    except (NotFound, Unimplemented) as error:
        raise Unsupported(
            f"{upstream.address.name} ranks no documents: {error.message}", code="rerank_unsupported"
        ) from error
    return rerank.read_reply(reply, request.documents)
