"""Batches over HTTP: `/v1/batches` (OpenAI) and `/v1/messages/batches` (Anthropic); and the run of one line of a batch,
which takes the way of any other request of its key."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Scope

from modelyard.accounts.admission import Admission
from modelyard.core.batch import Batch
from modelyard.core.errors import Conflict, ModelyardError
from modelyard.core.request import is_api_key
from modelyard.gateway.batch_lines import split_requests
from modelyard.gateway.batches import Batches, LineReply
from modelyard.gateway.files import CHUNK
from modelyard.gateway.records import new_id
from modelyard.http.auth import Authenticator
from modelyard.http.connection import ClientConnection
from modelyard.http.errors import write_error
from modelyard.http.middleware import new_trace
from modelyard.http.request_context import CONTEXT_KEY, RequestContext, read_body
from modelyard.http.settings import HttpSettings
from modelyard.processes.sandbox import current_client
from modelyard.protocols.anthropic_messages import batches as anthropic
from modelyard.protocols.anthropic_messages.reply import read_query, write_list
from modelyard.protocols.common.dialects import DIALECT_HEADER
from modelyard.protocols.common.json import JsonObject, encode
from modelyard.protocols.common.openai_fields import read_page_query, write_page
from modelyard.protocols.openai_batches import read_batch, write_batch
from modelyard.telemetry.log import current_trace


def _key(request: HttpRequest) -> str:
    return RequestContext.of(request.scope).key


def _json(body: bytes | JsonObject) -> Response:
    return Response(body if isinstance(body, bytes) else encode(body), media_type="application/json")


# --- OpenAI's batches -----------------------------------------------------------------------------------------------


class BatchEndpoints:
    def __init__(self, batches: Batches, settings: HttpSettings) -> None:
        self._batches, self._settings = batches, settings

    async def create(self, request: HttpRequest) -> Response:
        context = RequestContext.of(request.scope)
        body = await read_body(request.receive, context, self._settings)
        batch = read_batch(body, new_id("batch_"), int(time.time()))
        return _json(write_batch(await self._batches.create(_consenting(batch, context), context.key)))

    async def all(self, request: HttpRequest) -> Response:
        query = read_page_query(request.query_params)
        found, has_more = await self._batches.page("openai", _key(request), query.after, query.limit)
        return _json(write_page([write_batch(batch) for batch in found], [batch.id for batch in found], has_more))

    async def get(self, request: HttpRequest) -> Response:
        return _json(write_batch(await self._batches.get("openai", request.path_params["id"], _key(request))))

    async def cancel(self, request: HttpRequest) -> Response:
        return _json(write_batch(await self._batches.cancel("openai", request.path_params["id"], _key(request))))


def _consenting(batch: Batch, context: RequestContext) -> Batch:
    """On a server without keys a request consents to remote models, for each of the batch's requests."""
    return msgspec.structs.replace(batch, allow_remote=context.allow_remote and not is_api_key(context.key))


# --- Anthropic's batches --------------------------------------------------------------------------------------------


class MessageBatchEndpoints:
    def __init__(self, batches: Batches, settings: HttpSettings) -> None:
        self._batches, self._settings = batches, settings

    async def create(self, request: HttpRequest) -> Response:
        context, settings = RequestContext.of(request.scope), self._batches.settings
        body = await read_body(request.receive, context, self._settings, settings.max_file_bytes)
        total, requests = await split_requests(body, settings.max_requests)
        now = int(time.time())
        batch = Batch(
            id=new_id("msgbatch_"),
            api="anthropic",
            endpoint=anthropic.ENDPOINT,
            created=now,
            expires=now + anthropic.WINDOW_S,
            total=total,
        )

        async def lines() -> AsyncIterator[bytes]:
            for at in range(0, len(requests), CHUNK):
                yield requests[at : at + CHUNK]

        made = await self._batches.create(_consenting(batch, context), context.key, lines())
        return self._batch(made, request)

    async def all(self, request: HttpRequest) -> Response:
        """The newest first. `before_id` asks for the page that ends before an object."""
        query = read_query(request.query_params)
        found, has_more = await self._batches.page(
            "anthropic", _key(request), query.after, query.limit, newest_first=query.newest_first
        )
        if not query.newest_first:
            found.reverse()
        base = _base_url(request)
        written = [anthropic.write_message_batch(batch, base) for batch in found]
        return _json(write_list(written, has_more))

    async def get(self, request: HttpRequest) -> Response:
        return self._batch(await self._batches.get("anthropic", request.path_params["id"], _key(request)), request)

    async def cancel(self, request: HttpRequest) -> Response:
        return self._batch(await self._batches.cancel("anthropic", request.path_params["id"], _key(request)), request)

    async def delete(self, request: HttpRequest) -> Response:
        id = request.path_params["id"]
        await self._batches.delete("anthropic", id, _key(request))
        return _json(anthropic.write_deleted_batch(id))

    async def results(self, request: HttpRequest) -> Response:
        id, key = request.path_params["id"], _key(request)
        batch = await self._batches.get("anthropic", id, key)
        if not batch.has_ended:
            raise Conflict(f"the batch {id!r} still runs: it has results when its processing_status is ended")

        async def lines() -> AsyncIterator[bytes]:
            async for row in self._batches.results(batch, key):
                yield anthropic.write_result(row)

        return StreamingResponse(lines(), media_type="application/x-jsonl")

    def _batch(self, batch: Batch, request: HttpRequest) -> Response:
        return _json(anthropic.write_message_batch(batch, _base_url(request)))


def _base_url(request: HttpRequest) -> str:
    return str(request.base_url).rstrip("/")


# --- one line -------------------------------------------------------------------------------------------------------


class LineExecutor:
    """Runs a line of a batch in the handler of its endpoint, as a request of the batch's key at low priority."""

    def __init__(self, handlers: Mapping[str, ASGIApp], authenticator: Authenticator, admission: Admission) -> None:
        self._handlers, self._authenticator, self._admission = handlers, authenticator, admission

    async def __call__(self, batch: Batch, body: bytes, key: str) -> LineReply:
        context = RequestContext(new_trace(), batch.endpoint, {DIALECT_HEADER: "auto"}, priority="background")
        current_trace.set(context.trace)
        reply = _Reply()
        try:
            self._authenticator.act_for(context, key)
            context.allow_remote = context.allow_remote or batch.allow_remote
            context.reservation = self._admission.open(context.key)
            current_client.set(context.key)
            await self._run(context, body, reply)
        except ModelyardError as error:
            context.failed(error)
            written = write_error(error, context)
            reply.status, reply.body = written.status, [written.body]
        finally:
            context.release()
        retry_after = reply.headers.get(b"retry-after", b"0").decode()
        return LineReply(
            reply.status,
            f"req_{context.trace}",
            b"".join(reply.body),
            context.error,
            float(retry_after) if retry_after.replace(".", "", 1).isdecimal() else 0.0,
        )

    async def _run(self, context: RequestContext, body: bytes, reply: _Reply) -> None:
        scope: Scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": context.path,
            "raw_path": context.path.encode(),
            "query_string": b"",
            "headers": [],
            "extensions": ClientConnection().extensions,  # it is never lost
            CONTEXT_KEY: context,
        }

        async def receive() -> Message:
            return {"type": "http.request", "body": body, "more_body": False}

        await self._handlers[context.path](scope, receive, reply)


class _Reply:
    """Collects what a handler sends."""

    def __init__(self) -> None:
        self.status, self.headers, self.body = 0, dict[bytes, bytes](), list[bytes]()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body.append(message.get("body", b""))
