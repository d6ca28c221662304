"""OpenAI's endpoints of speech: `/v1/audio/transcriptions`, `/v1/audio/translations` and `/v1/audio/speech`.

A model of an upstream (`openai_remote`) gets the request as it came. A model here that hears (a llama.cpp model with an
audio projector) is asked in a chat to write down what it hears; that request has the limits, the queue and the errors
of any other. No engine here speaks.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, cast

import httpx
import msgspec
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import request_response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from modelyard.config.settings import engine_options
from modelyard.core.errors import InvalidRequest, ModelyardError, TooLarge, Unavailable, Unsupported
from modelyard.core.events import Usage
from modelyard.core.pool import LeaseRequest
from modelyard.engines.openai_remote import OpenAiRemoteOptions
from modelyard.engines.upstream import UpstreamAddress, map_auth_error, read_api_key
from modelyard.gateway.model import Model
from modelyard.http.errors import load_protocol
from modelyard.http.inference import InferenceEndpoint
from modelyard.http.request_context import RequestContext
from modelyard.http.routes import Row
from modelyard.http.server import HttpContext
from modelyard.protocols import openai_chat
from modelyard.router.router import Target

_TASKS = {
    "transcriptions": "Transcribe the speech word for word. Write only what is said, and nothing else.",
    "translations": "Translate the speech to English. Write only the translation, and nothing else.",
}
_FORMATS = {"wav": "wav", "mp3": "mp3", "mpeg": "mp3", "flac": "flac", "ogg": "ogg"}
_WRITTEN = ("json", "text")
_MAX_FIELDS, _MAX_ERROR = 20, 64 << 10


def endpoints(context: HttpContext) -> Iterator[tuple[Row, ASGIApp]]:
    """The entry point of `modelyard.endpoints`."""
    speech = SpeechEndpoints(context)
    for task in _TASKS:
        path = f"/v1/audio/{task}"
        yield (
            Row("POST", path, f"speech.{task}", also=(f"/audio/{task}",), protocol="openai_chat"),
            request_response(speech.transcribe),
        )
    yield Row("POST", "/v1/audio/speech", "speech.speak", protocol="openai_chat"), request_response(speech.speak)


class SpeechEndpoints:
    def __init__(self, context: HttpContext) -> None:
        self._gateway, self._limit = context.gateway, context.settings.max_body_bytes
        chat = load_protocol("openai_chat")
        self._chat = InferenceEndpoint(chat, context.gateway, context.settings, context.captures)

    async def transcribe(self, request: HttpRequest) -> Response:
        task = request.url.path.rpartition("/")[2]
        form = await self._form(request)
        try:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise InvalidRequest("file is required: the recording", param="file")
            fields = {name: value for name, value in form.multi_items() if isinstance(value, str)}
            target, model = self._model(request, fields.get("model"))
            if model.entry.backend == "openai_remote":
                upload = (file.filename or "speech", await file.read(), file.content_type or "application/octet-stream")
                return await self._forward(
                    request, target, model, f"audio/{task}", {"data": fields, "files": {"file": upload}}
                )
            return await self._ask(request, task, fields, file)
        finally:
            await form.close()

    async def speak(self, request: HttpRequest) -> Response:
        try:
            body = msgspec.json.decode(
                await HttpRequest(request.scope, self._bounded(request)).body(), type=dict[str, Any]
            )
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"the body is not a JSON object: {error}") from None
        target, model = self._model(request, body.get("model"))
        if model.entry.backend != "openai_remote":
            raise Unsupported(
                f"the model {model.name!r} does not speak: /v1/audio/speech is answered by upstreams (backend "
                "openai_remote) that have it",
                param="model",
            )
        return await self._forward(request, target, model, "audio/speech", {"json": body})

    def _model(self, request: HttpRequest, name: Any) -> tuple[Target, Model]:
        if not isinstance(name, str) or not name:
            raise InvalidRequest("model is required: the name of a model", param="model")
        return self._gateway.lookup.find(name, RequestContext.of(request.scope).caller())[:2]

    async def _form(self, request: HttpRequest) -> FormData:
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise InvalidRequest("send the recording as multipart/form-data, with the fields file and model")
        try:
            return await HttpRequest(request.scope, self._bounded(request)).form(max_files=1, max_fields=_MAX_FIELDS)
        except (MultiPartException, HTTPException) as error:
            raise InvalidRequest(f"the form cannot be read: {getattr(error, 'detail', error)}") from None

    def _bounded(self, request: HttpRequest) -> Receive:
        read, reservation = 0, RequestContext.of(request.scope).reservation

        async def receive() -> Message:
            nonlocal read
            message = await request.receive()
            size = len(message.get("body", b""))
            read += size
            if read > self._limit:
                raise TooLarge(f"the request is larger than {self._limit} bytes (http.max_body_bytes)")
            if reservation is not None:
                reservation.grow(size)
            return message

        return receive

    # --- a model here ---------------------------------------------------------------------------------------------

    async def _ask(self, request: HttpRequest, task: str, fields: Mapping[str, str], file: UploadFile) -> Response:
        form = fields.get("response_format", "json")
        if form not in _WRITTEN or fields.get("stream", "").lower() == "true":
            raise Unsupported(
                f"a model here transcribes to {' or '.join(_WRITTEN)}, as a whole: it knows no times and no segments",
                param="response_format" if form not in _WRITTEN else "stream",
            )
        reply = await self._complete(request, chat_body(task, fields, file.filename or "", await file.read()))
        if reply.status != 200:
            return Response(b"".join(reply.body), reply.status, dict(reply.headers))
        answer = msgspec.json.decode(b"".join(reply.body))
        text, usage = answer["choices"][0]["message"]["content"] or "", answer["usage"]
        if form == "text":
            return PlainTextResponse(text + "\n")
        tokens = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        return JSONResponse(
            {"text": text, "usage": {"type": "tokens", **tokens, "total_tokens": usage["total_tokens"]}}
        )

    async def _complete(self, request: HttpRequest, body: bytes) -> _Reply:
        """The chat's handler, with this request's key and limits. A client that leaves cancels it."""
        reply, sent = _Reply(), False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                return await request.receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._chat(request.scope, receive, reply.send)
        return reply

    # --- a model of an upstream -----------------------------------------------------------------------------------

    async def _forward(
        self, request: HttpRequest, target: Target, model: Model, path: str, content: dict[str, Any]
    ) -> Response:
        """With a slot, the limits and the budget of the key, as any other request."""
        options = cast(OpenAiRemoteOptions, engine_options(model.settings))
        key = read_api_key(model.name, options.remote_api_key_env)
        headers = {**options.remote_headers, **({"authorization": f"Bearer {key}"} if key else {})}
        for fields in (content.get("data"), content.get("json")):
            if fields is not None:
                fields["model"] = options.remote_model
        caller, failed = RequestContext.of(request.scope).caller(), True
        if caller.reservation is not None:
            await caller.reservation.hold(model.name, 0, 1)  # the upstream does not count tokens
        lease = LeaseRequest(model=target.model, cache=target.cache, key=caller.key, trace=caller.trace)
        ticket = self._gateway.leases.request(lease)
        client = httpx.AsyncClient(timeout=options.remote_timeout_s)

        async def close() -> None:
            ticket.cancel()
            await client.aclose()

        try:
            await ticket.lease()
            sent = client.build_request("POST", f"{options.remote_base_url}/{path}", headers=headers, **content)
            reply = await client.send(sent, stream=True)
            if reply.status_code >= 400:
                raise _refusal(model.name, options, reply, await _beginning(reply))
            failed = False
        except httpx.HTTPError as error:
            raise Unavailable(
                f"the upstream of {model.name!r} cannot be reached: {error}", code="upstream_lost"
            ) from None
        finally:
            self._gateway.accounts.add(caller.key, model.name, Usage(), failed=failed)
            if failed:
                await close()
        return _Forwarded(reply, close)


def chat_body(task: str, fields: Mapping[str, str], name: str, data: bytes) -> bytes:
    """The question to a model that hears."""
    kind = _FORMATS.get(name.rpartition(".")[2].lower())
    if kind is None:
        raise InvalidRequest(f"the recording {name!r} is none of {', '.join(sorted(set(_FORMATS)))}", param="file")
    ask = _TASKS[task]
    if language := fields.get("language"):
        ask += f" The language is {language}."
    if prompt := fields.get("prompt"):
        ask += f" Words that may occur: {prompt}"
    try:
        temperature = float(fields.get("temperature", 0))
    except ValueError:
        raise InvalidRequest("temperature must be a number", param="temperature") from None
    audio = {"data": base64.b64encode(data).decode(), "format": kind}
    parts = [{"type": "input_audio", "input_audio": audio}, {"type": "text", "text": ask}]
    messages = [{"role": "user", "content": parts}]
    return msgspec.json.encode({"model": fields["model"], "temperature": temperature, "messages": messages})


def _refusal(name: str, options: OpenAiRemoteOptions, reply: httpx.Response, body: bytes) -> ModelyardError:
    address = UpstreamAddress(name=f"the upstream of {name!r}", base_url=options.remote_base_url)
    return map_auth_error(openai_chat.read_error(reply.status_code, dict(reply.headers), body), address)


async def _beginning(reply: httpx.Response) -> bytes:
    data = b""
    async for chunk in reply.aiter_bytes(_MAX_ERROR):
        data += chunk
        if len(data) >= _MAX_ERROR:
            break
    return data


class _Forwarded(StreamingResponse):
    """Closes the upstream's reply, and returns the slot, also if the client has left before its first byte."""

    def __init__(self, reply: httpx.Response, close: Callable[[], Awaitable[None]]) -> None:
        super().__init__(reply.aiter_bytes(), reply.status_code, media_type=reply.headers.get("content-type"))
        self._reply, self._close = reply, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._reply.aclose()
            await self._close()


class _Reply:
    """What the chat's handler sends."""

    def __init__(self) -> None:
        self.status, self.headers, self.body = 0, dict[str, str](), list[bytes]()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"] if k.lower() != b"content-length"}
        else:
            self.body.append(message.get("body", b""))
