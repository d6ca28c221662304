"""`POST /v1/moderations`: a guard model (Llama Guard, Qwen3Guard and those that write like them) judges texts.

The model is the one that the request names; clients that name none, or one of OpenAI's, get the one that a route for
`*-moderation-*` leads to. A model that does not answer like a guard is refused.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from starlette.types import ASGIApp

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest, NotFound, Unsupported
from modelyard.core.events import Failed, Reply, ReplyBuilder
from modelyard.core.request import Caller, Image, Message, Reasoning, Request, Sampling, Text
from modelyard.gateway.request_work import RequestWork
from modelyard.http.errors import load_protocol
from modelyard.http.request_context import RequestContext
from modelyard.http.routes import Row
from modelyard.http.server import HttpContext
from modelyard.http.tokens import JsonEndpoint
from modelyard.protocols.common.json import decode, encode

_DEFAULT = "omni-moderation-latest"  # as in OpenAI's API
_MAX_INPUTS, _MAX_TOKENS = 128, 128
CATEGORIES = (
    *("harassment", "harassment/threatening", "hate", "hate/threatening", "illicit", "illicit/violent", "self-harm"),
    *("self-harm/instructions", "self-harm/intent", "sexual", "sexual/minors", "violence", "violence/graphic"),
)
# The categories of the guard models that OpenAI's API has a name for. The others flag a text without one.
_NAMES: Mapping[str, str] = {
    "s1": "violence",
    "s2": "illicit",
    "s3": "sexual",
    "s4": "sexual/minors",
    "s5": "harassment",
    "s9": "illicit/violent",
    "s10": "hate",
    "s11": "self-harm",
    "s12": "sexual",
    "s14": "illicit",
    "violent": "violence",
    "non-violent illegal acts": "illicit",
    "sexual content or sexual acts": "sexual",
    "suicide & self-harm": "self-harm",
    "unethical acts": "harassment",
}
_LLAMA_GUARD = re.compile(r"\s*(safe|unsafe)\b\s*([sS]\d{1,2}(?:\s*,\s*[sS]\d{1,2})*)?")
_QWEN_GUARD = re.compile(r"\s*Safety:\s*(Safe|Unsafe|Controversial)\b(?:\s*Categories:\s*([^\n]*))?")


class ContentPart(Struct):
    type: limits.Word
    text: limits.Text | None = None
    image_url: limits.JsonObject | None = None


class _Texts(Struct):
    input: limits.Text | Annotated[list[limits.Text], Meta(max_length=_MAX_INPUTS)]
    model: limits.Name = _DEFAULT


class _Parts(Struct):
    input: Annotated[list[ContentPart], limits.Parts]
    model: limits.Name = _DEFAULT


_texts, _parts = msgspec.json.Decoder(_Texts), msgspec.json.Decoder(_Parts)


def endpoints(context: HttpContext) -> Iterator[tuple[Row, ASGIApp]]:
    app = Moderations(load_protocol("openai_chat"), context.gateway, context.settings, context.captures)
    yield Row("POST", "/v1/moderations", "moderations", also=("/moderations",), protocol="openai_chat"), app


class Moderations(JsonEndpoint):
    async def handle(self, body: bytes, context: RequestContext, work: RequestWork) -> bytes:
        model, messages = await work.run(read_inputs, body)
        try:
            caller = self.caller(model, context)
        except NotFound as error:
            raise InvalidRequest(
                f"{error.message} Name a guard model, or add a route for *-moderation-* that leads to one",
                code="no_guard_model",
                param="model",
            ) from error

        # One after the other: they have the slot, the budget and the limits of one request of the key.
        results = []
        for message in messages:
            results.append(read_verdict(model, (await self._answer(model, message, caller)).text))
            caller = msgspec.structs.replace(caller, is_retry=True)
        return encode({"id": f"modr-{context.trace}", "model": model, "results": results})

    async def _answer(self, model: str, message: Message, caller: Caller) -> Reply:
        request = Request(
            model=model,
            messages=(message,),
            max_tokens=_MAX_TOKENS,
            sampling=Sampling(temperature=0.0),
            reasoning=Reasoning(enabled=False),
        )
        source = self._gateway.start(await self._gateway.prepare(request, caller))
        reply = ReplyBuilder()
        try:
            async for _, events in source:
                if isinstance(events[-1], Failed):
                    raise events[-1].error
                reply.feed(events)
        except asyncio.CancelledError:
            source.cancel()
            raise
        finally:
            source.close()
        return reply.reply()


def read_inputs(body: bytes) -> tuple[str, list[Message]]:
    """The model and one message for each text; text and images together are one."""
    try:
        texts = decode(_texts, body)
    except InvalidRequest as error:
        try:
            found = decode(_parts, body)
        except InvalidRequest:
            raise error from None
        return found.model, [Message("user", tuple(map(_part, found.input)))]
    given = [texts.input] if isinstance(texts.input, str) else texts.input
    if not given:
        raise InvalidRequest("input is empty: send a text or a list of texts", param="input")
    return texts.model, [Message("user", (Text(text),)) for text in given]


def _part(part: ContentPart) -> Text | Image:
    if part.type == "text" and part.text is not None:
        return Text(part.text)
    url = (part.image_url or {}).get("url")
    if part.type != "image_url" or not isinstance(url, str):
        raise InvalidRequest("input: a part is a text, or an image_url with a url", param="input")
    return Image(url)


def read_verdict(model: str, answer: str) -> dict[str, Any]:
    found = _LLAMA_GUARD.match(answer) or _QWEN_GUARD.match(answer)
    if found is None:
        raise Unsupported(
            f"the model {model!r} is no guard model: it does not answer with safe or unsafe. Name one, or add a "
            "route for *-moderation-* that leads to one",
            code="no_guard_model",
            param="model",
        )
    flagged = found[1].lower() == "unsafe"
    names = {_NAMES.get(name.strip().lower()) for name in (found[2] or "").split(",")} if flagged else set()
    return {
        "flagged": flagged,
        "categories": {name: name in names for name in CATEGORIES},
        "category_scores": {name: float(name in names) for name in CATEGORIES},
        "category_applied_input_types": {name: ["text"] if name in names else [] for name in CATEGORIES},
    }
