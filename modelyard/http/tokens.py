"""Endpoints that generate nothing: count_tokens, input_tokens, embeddings, rerank, /tokenize, /detokenize and
/apply-template.

Counting and tokenizing do not queue and need no loaded model. The last three take the bodies of llama-server and vLLM:
`content` or `prompt`, `tokens`, or a whole Chat body with `messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from modelyard.core.errors import InvalidRequest, TooLarge
from modelyard.core.protocol import INLINE_BYTES, WireProtocol
from modelyard.core.request import Caller, Request
from modelyard.gateway.gateway import Gateway
from modelyard.gateway.model import Model
from modelyard.gateway.request_work import RequestWork
from modelyard.http.connection import LARGE_BYTES, cancel_on_disconnect
from modelyard.http.errors import as_modelyard_error, public_error
from modelyard.http.request_context import RequestContext, read_body, send_error, send_json
from modelyard.http.settings import HttpSettings
from modelyard.protocols import anthropic_messages, openai_chat, openai_embeddings, openai_responses, rerank, score
from modelyard.protocols.common.json import decode, encode
from modelyard.protocols.common.openai_fields import DEFAULT_MODEL
from modelyard.protocols.common.token_body import TokenBody
from modelyard.telemetry.request_capture import CaptureSink
from modelyard.tokenizer.shield import unshield
from modelyard.tokenizer.slices import OnProgress, encode_long

P = ParamSpec("P")
T = TypeVar("T")


_object_decoder = msgspec.json.Decoder(dict[str, Any])
_body_decoder = msgspec.json.Decoder(TokenBody)
_MAX_TOKENIZED, _MAX_PIECES = 8 << 20, 1 << 18  # bytes of a request to /tokenize; with the pieces of all tokens
# What a byte of text may need, in copies of it (`accounts/admission.py`): a token takes 140 bytes of memory, in lists
# and as JSON, and 400 with its piece. 8 MiB of accented letters are as many tokens.
_TOKEN_BYTES, _PIECE_BYTES = 24, 60
_TOKENIZE_COST = 12  # tokenizing a byte costs about as much as parsing a dozen


class TokenRequest(msgspec.Struct, frozen=True):
    parsed: TokenBody
    model: Model
    window: int
    body: bytes
    headers: Mapping[str, str]
    work: RequestWork

    def on_progress(self) -> OnProgress:
        return self.work.watch_window(0, None)

    def chat(self) -> Request:
        """The body as a Chat request. Unlike there, `model` is optional."""
        body = self.body
        if not self.parsed.model:
            body = encode(decode(_object_decoder, self.body) | {"model": DEFAULT_MODEL})
        return openai_chat.read_request(body, self.headers)


async def _run(work: RequestWork, cost: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """In a thread if it would block the event loop for long. `cost` is per byte of the body, in units of parsing."""
    if work.size * cost > INLINE_BYTES:
        return await work.run(function, *args, **kwargs)
    return function(*args, **kwargs)


class JsonEndpoint:
    """A small ASGI app: body in, JSON out, errors in the shape of its protocol."""

    notes_status = True
    is_long = False  # also a small body may take long: it ends when its client leaves

    def __init__(
        self, protocol: WireProtocol, gateway: Gateway, settings: HttpSettings, captures: CaptureSink | None = None
    ) -> None:
        self._protocol, self._gateway, self._settings, self._captures = protocol, gateway, settings, captures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext.of(scope)
        capture = self._captures.start(context.trace) if self._captures is not None else None
        self._gateway.metrics.active += 1
        try:
            body = await read_body(receive, context, self._settings)
            if capture is not None:
                capture.request(body)
            work = RequestWork(len(body), context.caller().deadline, context.reservation)
            is_watched = self.is_long or len(body) > LARGE_BYTES
            stop_watching = cancel_on_disconnect(scope, receive, work.cancel) if is_watched else None
            try:
                reply = await self.handle(body, context, work)
            finally:
                if stop_watching is not None:
                    stop_watching()
        except Exception as exception:
            error = as_modelyard_error(exception)
            context.failed(error)
            written = self._protocol.write_error(public_error(error, context), trace=context.trace)
            if capture is not None:
                capture.response(written.body)
            await send_error(send, context, written)
        else:
            if capture is not None:
                capture.response(reply)
            await send_json(send, context, 200, reply)
        finally:
            self._gateway.metrics.active -= 1
            if capture is not None:
                capture.close()

    async def handle(self, body: bytes, context: RequestContext, work: RequestWork) -> bytes:
        raise NotImplementedError

    def caller(self, model: str, context: RequestContext) -> Caller:
        """Who asks for this model; the response headers name the rule if one chooses it."""
        context.target = self._gateway.lookup.router.resolve(model, context.path)
        return context.caller()


class CountTokens(JsonEndpoint):
    async def handle(self, body: bytes, context: RequestContext, work: RequestWork) -> bytes:
        request = await self._gateway.read(self._protocol, body, context.headers, context.key, work)
        caller = self.caller(request.model, context)
        return anthropic_messages.write_count(await self._gateway.inputs.count(request, caller, work))


class InputTokens(JsonEndpoint):
    async def handle(self, body: bytes, context: RequestContext, work: RequestWork) -> bytes:
        request = await self._gateway.read(self._protocol, body, context.headers, context.key, work)
        caller = self.caller(request.model, context)
        return openai_responses.write_input_tokens(await self._gateway.inputs.count(request, caller, work))


class ChatInputTokens(JsonEndpoint):
    """As llama-server: a Chat body, in which the model is optional."""

    async def handle(self, body: bytes, context: RequestContext, work: RequestWork) -> bytes:
        if not (await _run(work, 1, decode, _body_decoder, body)).model:
            body = encode(await _run(work, 1, decode, _object_decoder, body) | {"model": DEFAULT_MODEL})
        request = await self._gateway.read(self._protocol, body, context.headers, context.key, work)
        caller = self.caller(request.model, context)
        return openai_responses.write_input_tokens(await self._gateway.inputs.count(request, caller, work))


class EmbeddingsEndpoint(JsonEndpoint):
    async def handle(self, body: bytes, context: RequestContext, work: RequestWork) -> bytes:
        request = await _run(work, 1, openai_embeddings.read_request, body, context.headers)
        caller = self.caller(request.model, context)
        result = await self._gateway.inputs.embed(request, caller, work)
        return openai_embeddings.write_reply(result.vectors, result.prompt_tokens, request)


class LlamaEmbedding(JsonEndpoint):
    """llama-server's own shape: `content` in, a list with one row of vectors per text out."""

    async def handle(self, body: bytes, context: RequestContext, work: RequestWork) -> bytes:
        request = await _run(work, 1, openai_embeddings.read_llama_request, body)
        caller = self.caller(request.model, context)
        result = await self._gateway.inputs.embed(request, caller, work)
        return openai_embeddings.write_llama_reply(result.vectors)


class ScoreEndpoint(JsonEndpoint):
    async def handle(self, body: bytes, context: RequestContext, work: RequestWork) -> bytes:
        requests = await _run(work, 1, score.read_request, body, context.headers)
        caller = self.caller(requests[0].model, context)
        rankings = [await self._gateway.inputs.rerank(request, caller, work) for request in requests]
        return score.write_reply(rankings, requests[0].model)


class RerankEndpoint(JsonEndpoint):
    async def handle(self, body: bytes, context: RequestContext, work: RequestWork) -> bytes:
        request = await _run(work, 1, rerank.read_request, body, context.headers)
        caller = self.caller(request.model, context)
        return rerank.write_reply(await self._gateway.inputs.rerank(request, caller, work), request)


class TokenEndpoint(JsonEndpoint):
    """Work of the tokenizer and the template alone; a long body is handled in a thread."""

    async def handle(self, body: bytes, context: RequestContext, work: RequestWork) -> bytes:
        parsed = await _run(work, 1, decode, _body_decoder, body)
        name = parsed.model or DEFAULT_MODEL
        target, model = await self._gateway.lookup.find_defined(name, self.caller(name, context))
        request = TokenRequest(parsed, model, target.window, body, context.headers, work)
        is_slow = not getattr(model.pipeline.tokenizer, "is_linear", True)
        if is_slow or parsed.messages is not None:  # a template may take long, whatever the size of the request
            return await work.run(self._encoded, request)
        return await _run(work, _TOKENIZE_COST, self._encoded, request)

    def _encoded(self, request: TokenRequest) -> bytes:
        return encode(self.compute(request))

    def compute(self, request: TokenRequest) -> dict[str, Any]:
        raise NotImplementedError


class Tokenize(TokenEndpoint):
    def compute(self, request: TokenRequest) -> dict[str, Any]:
        parsed, pipeline = request.parsed, request.model.pipeline
        has_pieces = parsed.with_pieces or parsed.return_token_strs
        _check_length(request, _MAX_PIECES if has_pieces else _MAX_TOKENIZED, has_pieces)
        if parsed.messages is not None:
            ids = pipeline.renderer.tokens(pipeline.renderer.text(request.chat()), request.on_progress())
        else:
            text = parsed.content if parsed.content is not None else parsed.prompt
            if text is None:
                raise InvalidRequest("one of content, prompt and messages is required", param="content")
            add_special = parsed.add_special or parsed.add_special_tokens
            if add_special:
                ids = pipeline.renderer.raw(text, request.on_progress())
            else:
                ids = encode_long(pipeline.tokenizer, text, request.on_progress())
        reply: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": request.window}
        if has_pieces:
            pieces = [pipeline.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
            reply["token_strs"] = pieces
            if parsed.with_pieces:
                reply["tokens"] = [{"id": i, "piece": piece} for i, piece in zip(ids, pieces, strict=True)]
        return reply


def _check_length(request: TokenRequest, most: int, has_pieces: bool) -> None:
    if (size := request.work.size) > most:
        fields = " and leave out with_pieces and return_token_strs" if has_pieces else ""
        raise TooLarge(f"the text has {size} bytes, and {most} are tokenized at once: send it in parts{fields}")
    if request.work.reservation is not None:
        request.work.reservation.grow((_PIECE_BYTES if has_pieces else _TOKEN_BYTES) * size)


class Detokenize(TokenEndpoint):
    def compute(self, request: TokenRequest) -> dict[str, Any]:
        tokens, tokenizer = request.parsed.tokens, request.model.pipeline.tokenizer
        if tokens is None:
            raise InvalidRequest("tokens: a list of token ids is required", param="tokens")
        if bad := [t for t in tokens if not 0 <= t < tokenizer.size]:
            raise InvalidRequest(
                f"tokens: {str(bad[0])[:40]} is not a token of this model (0 to {tokenizer.size - 1})", param="tokens"
            )
        text = tokenizer.decode(tokens)
        return {"prompt": text, "content": text}


class ApplyTemplate(TokenEndpoint):
    def compute(self, request: TokenRequest) -> dict[str, Any]:
        return {"prompt": unshield(request.model.pipeline.renderer.text(request.chat()))}
