"""Counting and looking at tokens: count_tokens, input_tokens, /tokenize, /detokenize, /apply-template.

None of these queues behind generation or needs a loaded model. The last three take the bodies of both servers that
people know them from: `content` or `prompt`, `tokens`, or a whole Chat body with `messages`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from modelyard.core.errors import InvalidRequest, ModelyardError
from modelyard.core.protocol import WireProtocol
from modelyard.core.request import Request
from modelyard.gateway import Gateway, Model
from modelyard.http.errors import ours
from modelyard.http.request_context import RequestContext, aside, read_body, respond, respond_error
from modelyard.http.settings import HttpSettings
from modelyard.http.stored_responses import StoredResponses
from modelyard.protocols import anthropic_messages, openai_chat, openai_embeddings, openai_responses
from modelyard.protocols.common.json import decode, encode
from modelyard.tokenizer.shield import unshield


class TokenBody(msgspec.Struct, kw_only=True):
    model: str = ""
    content: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tokens: list[int] | None = None
    with_pieces: bool = False
    return_token_strs: bool = False
    add_special: bool = False
    add_special_tokens: bool = False


_DEFAULT = "default"
_any = msgspec.json.Decoder(dict[str, Any])
_bodies = msgspec.json.Decoder(TokenBody)
_WORK = 12  # tokenizing a byte costs about as much as parsing a dozen


class Question(msgspec.Struct, frozen=True):
    """What was asked, of which model; the body may be a whole Chat request too."""

    asked: TokenBody
    model: Model
    window: int
    body: bytes
    headers: Mapping[str, str]

    def chat(self) -> Request:
        """A Chat body names its model; here it may be left out, as everywhere among these endpoints."""
        body = self.body if self.asked.model else encode(decode(_any, self.body) | {"model": _DEFAULT})
        return openai_chat.read_request(body, self.headers)


class Endpoint:
    """A small ASGI app: body in, JSON bytes out, errors in its wire's own dialect."""

    def __init__(self, wire: WireProtocol, gateway: Gateway, settings: HttpSettings) -> None:
        self._wire, self.gateway, self._settings = wire, gateway, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = RequestContext.of(scope)
        try:
            body = await read_body(receive, visit, self._settings)
            reply = await self.answer(body, visit)
        except Exception as error:
            await self._refuse(ours(error), visit, send)
        else:
            await respond(send, visit, 200, reply)

    async def _refuse(self, error: ModelyardError, visit: RequestContext, send: Send) -> None:
        visit.failed(error)
        await respond_error(send, visit, self._wire.write_error(error, trace=visit.trace))

    async def answer(self, body: bytes, visit: RequestContext) -> bytes:
        raise NotImplementedError


class CountTokens(Endpoint):
    async def answer(self, body: bytes, visit: RequestContext) -> bytes:
        request = await aside(len(body), anthropic_messages.read_request, body, visit.headers)
        return anthropic_messages.write_count(await self.gateway.count(request, visit.caller))


class InputTokens(Endpoint):
    def __init__(self, wire: WireProtocol, gateway: Gateway, settings: HttpSettings, stored: StoredResponses) -> None:
        super().__init__(wire, gateway, settings)
        self._stored = stored

    async def answer(self, body: bytes, visit: RequestContext) -> bytes:
        asked = await aside(len(body), openai_responses.read_request, body, visit.headers)
        request = await self._stored.recall(asked, visit.key)
        return openai_responses.write_input_tokens(await self.gateway.count(request, visit.caller))


class Embed(Endpoint):
    async def answer(self, body: bytes, visit: RequestContext) -> bytes:
        request = await aside(len(body), openai_embeddings.read_request, body, visit.headers)
        made = await self.gateway.embed(request, visit.caller)
        return openai_embeddings.write_reply(made.vectors, made.prompt_tokens, request)


class Look(Endpoint):
    """Work that is the tokenizer's and the template's alone: a long body's is done in a thread."""

    async def answer(self, body: bytes, visit: RequestContext) -> bytes:
        asked = await aside(len(body), decode, _bodies, body)
        target, model = self.gateway.model_for(asked.model or _DEFAULT, visit.caller)
        question = Question(asked, model, target.window, body, visit.headers)
        return encode(await aside(len(body) * _WORK, self.look, question))

    def look(self, question: Question) -> dict[str, Any]:
        raise NotImplementedError


class Tokenize(Look):
    def look(self, question: Question) -> dict[str, Any]:
        asked, ids = question.asked, self._ids(question)
        reply: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": question.window}
        if asked.with_pieces or asked.return_token_strs:
            pieces = [question.model.pipeline.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
            reply["token_strs"] = pieces
        if asked.with_pieces:
            reply["tokens"] = [{"id": i, "piece": piece} for i, piece in zip(ids, pieces, strict=True)]
        return reply

    def _ids(self, question: Question) -> list[int]:
        asked, parts = question.asked, question.model.pipeline
        if asked.messages is not None:
            return parts.renderer.tokens(parts.renderer.text(question.chat()))
        text, special = _text_of(asked), asked.add_special or asked.add_special_tokens
        return parts.renderer.raw(text) if special else parts.tokenizer.encode(text)


class Detokenize(Look):
    def look(self, question: Question) -> dict[str, Any]:
        tokens, vocab = question.asked.tokens, question.model.pipeline.tokenizer
        if tokens is None:
            raise InvalidRequest("tokens: a list of token ids is required", param="tokens")
        if bad := [t for t in tokens if not 0 <= t < vocab.size]:
            raise InvalidRequest(
                f"tokens: {str(bad[0])[:40]} is not a token of this model (0 to {vocab.size - 1})", param="tokens"
            )
        text = vocab.decode(tokens)
        return {"prompt": text, "content": text}


class ApplyTemplate(Look):
    def look(self, question: Question) -> dict[str, Any]:
        return {"prompt": unshield(question.model.pipeline.renderer.text(question.chat()))}


def _text_of(asked: TokenBody) -> str:
    text = asked.content if asked.content is not None else asked.prompt
    if text is None:
        raise InvalidRequest("one of content, prompt and messages is required", param="content")
    return text
