"""The pool dialect of POST /v1/responses: a text, images or turns in; a text and its metrics out. Server role only.

It shares its path with OpenAI's Responses: `openai_responses` hands over the bodies that are in this dialect.

The events of a stream: response.created · response.output_text.delta* · response.metrics · response.completed |
response.failed. Errors have Chat's body, in which `code` is never null.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

import msgspec
from msgspec import Struct

from modelyard.core import limits
from modelyard.core.errors import InvalidRequest, ModelyardError
from modelyard.core.events import BlockDelta, BlockStart, Event, Failed, Finished, Reply, Started
from modelyard.core.protocol import WireError
from modelyard.core.request import Image, Message, Part, Reasoning, Request, Role, Sampling, Text
from modelyard.protocols.common.errors import write_retry_headers
from modelyard.protocols.common.extensions import (
    ExtensionFields,
    check_positive,
    present,
    read_constraint,
    read_priority,
    read_sampling,
)
from modelyard.protocols.common.json import decode, encode
from modelyard.protocols.common.openai_errors import STATUS, error_body
from modelyard.protocols.common.openai_fields import read_session, read_stop, require_model
from modelyard.protocols.common.response_metrics import write_metrics
from modelyard.protocols.common.sse import comment, frame

DIALECT = NAME = "pool_responses"
ITEM_TYPES = frozenset({"text", "image_url"})  # of `input`; OpenAI's own types are input_text and input_image


class PoolImageUrl(Struct):
    url: limits.Text = ""
    detail: limits.Word | None = None


class PoolContentItem(Struct):
    """A content item; `type` says which field counts."""

    type: limits.Word = ""
    text: limits.Text | None = None
    image_url: PoolImageUrl | limits.Text | None = None


class PoolMessage(Struct):
    role: limits.Word = ""
    content: limits.Text | Annotated[list[PoolContentItem], limits.Parts] | None = None


class PoolDecoding(ExtensionFields):
    """The dialect has seven fields here; the extension fields of every protocol are valid too."""

    max_tokens: int | None = None
    stop: limits.StopString | limits.StopStrings | None = None


class PoolResponsesBody(ExtensionFields):
    model: limits.Name | None = None
    input: limits.Text | Annotated[list[PoolContentItem], limits.Parts] | None = None
    messages: Annotated[list[PoolMessage], limits.Messages] | None = None
    instructions: limits.Text | None = None
    source_lang_code: limits.Word | None = None
    target_lang_code: limits.Word | None = None
    allow_remote: bool | None = None
    stream: bool | None = None
    thinking: limits.Word | None = None
    decoding: PoolDecoding | None = None
    tools: Any = None
    user: limits.Name | None = None
    metadata: limits.JsonObject | None = None


_decoder = msgspec.json.Decoder(PoolResponsesBody)
_THINKING_MODES = {"default": None, "enabled": True, "disabled": False}
_DEFAULT_DECODING = PoolDecoding()


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    """`headers` has lower-case names."""
    parsed = decode(_decoder, body)
    warnings = ["tools are ignored: this dialect has none"] if parsed.tools else []
    decoding = parsed.decoding or _DEFAULT_DECODING
    languages = present(source_lang_code=parsed.source_lang_code, target_lang_code=parsed.target_lang_code)
    return Request(
        model=require_model(parsed.model),
        messages=_read_messages(parsed),
        instructions=bool(parsed.instructions),
        sampling=_read_decoding(decoding).over(read_sampling(parsed)),
        max_tokens=decoding.max_tokens,
        stop=read_stop(decoding.stop, warnings),
        constraint=read_constraint(parsed, ("decoding", read_constraint(decoding))),
        reasoning=_read_thinking(parsed.thinking),
        stream=bool(parsed.stream),
        lora_adapter=decoding.lora_adapter or parsed.lora_adapter,
        chat_template_kwargs=(parsed.chat_template_kwargs or {}) | languages,
        documents=parsed.documents or (),
        priority=read_priority(parsed),
        session=read_session(headers, None),
        user=parsed.user,
        metadata=parsed.metadata,
        store=False,
        allow_remote=bool(parsed.allow_remote),
        dialect=DIALECT,
        warnings=tuple(warnings),
    )


def _read_messages(body: PoolResponsesBody) -> tuple[Message, ...]:
    system = (Message("system", (Text(body.instructions),)),) if body.instructions else ()
    if body.messages is None:
        return (*system, Message("user", _read_content(body.input, "input")))
    if body.input is not None:
        raise InvalidRequest(
            "input and messages are both set: send only one of them", param="messages", code="input_and_messages"
        )
    messages = body.messages
    if not messages:
        raise InvalidRequest("messages is empty: the last one must be the user's", param="messages", code="no_messages")
    for index, message in enumerate(messages):
        if message.role not in ("user", "assistant"):
            path = f"messages[{index}].role"
            problem = f"{path} is {message.role[:40]!r}; it must be user or assistant. Put system text in instructions"
            raise InvalidRequest(problem, param=path, code="role_unsupported")
    if messages[-1].role != "user":
        path = f"messages[{len(messages) - 1}].role"
        raise InvalidRequest("the last message must be the user's", param=path, code="last_message_not_user")
    return (
        *system,
        *(
            Message(cast("Role", message.role), _read_content(message.content, f"messages[{index}].content"))
            for index, message in enumerate(messages)
        ),
    )


def _read_content(content: str | list[PoolContentItem] | None, path: str) -> tuple[Part, ...]:
    if not content:
        raise InvalidRequest(
            f"{path} is missing or empty: send a text or a list of items", param=path, code="input_required"
        )
    if isinstance(content, str):
        return (Text(content),)
    parts = [_read_item(item, f"{path}[{index}]") for index, item in enumerate(content)]
    texts = [part.text for part in parts if isinstance(part, Text)]
    return (Text("".join(texts)),) if len(texts) == len(parts) else tuple(parts)


def _read_item(item: PoolContentItem, path: str) -> Text | Image:
    if item.type == "text":
        if item.text is None:
            raise InvalidRequest(f"{path}.text is missing", param=f"{path}.text", code="text_required")
        return Text(item.text)
    if item.type == "image_url":
        image = item.image_url if isinstance(item.image_url, PoolImageUrl) else PoolImageUrl(item.image_url or "")
        if not image.url:
            raise InvalidRequest(f"{path}.image_url.url is missing", param=f"{path}.image_url", code="image_required")
        return Image(image.url, image.detail)
    problem = f"{path} is of type {item.type[:40]!r}; the types are text and image_url"
    raise InvalidRequest(problem, param=f"{path}.type", code="modality_unsupported")


def _read_decoding(decoding: PoolDecoding) -> Sampling:
    try:
        check_positive("max_tokens", decoding.max_tokens)
        check_positive("beam_size", decoding.beam_size)
        return read_sampling(decoding)
    except InvalidRequest as error:
        message, param = f"decoding.{error.message}", f"decoding.{error.param}"
        raise InvalidRequest(message, param=param, code="invalid_decoding") from None


def _read_thinking(mode: str | None) -> Reasoning:
    """This dialect writes only the answer. A mode other than the default must be available: `strict`."""
    if mode is None or mode == "default":
        return Reasoning(visible=False)
    if mode not in _THINKING_MODES:
        modes = ", ".join(_THINKING_MODES)
        raise InvalidRequest(
            f"thinking is {mode[:40]!r}; the modes are {modes}", param="thinking", code="invalid_thinking"
        )
    return Reasoning(enabled=_THINKING_MODES[mode], visible=False, strict=True)


# --- replies and errors -----------------------------------------------------------------------------------------------


def write_reply(replies: list[Reply], request: Request) -> bytes:  # noqa: ARG001 - other protocols echo the request
    """This protocol has one choice: the first reply."""
    reply = replies[0]
    return encode(write_response(reply.started.id, reply.started.model, reply.text, reply.finished))


def write_header(key: str, model: str) -> dict[str, Any]:
    """The fields that are known from the start."""
    return {"id": f"resp_{key}", "object": "response", "model": model}


def write_response(key: str, model: str, text: str, finished: Finished) -> dict[str, Any]:
    output = [{"type": "output_text", "text": text}]
    return write_header(key, model) | {"output": output, "output_text": text, "metrics": write_metrics(finished)}


def coded_body(error: ModelyardError, request: Request | None = None) -> dict[str, Any]:
    turns = [] if request is None else [message for message in request.messages if message.role != "system"]
    body = error_body(error, "input" if len(turns) == 1 else "messages")
    return body | {"code": body["code"] or ("invalid_request" if error.kind == "invalid" else error.kind)}


def write_error(
    error: ModelyardError,
    *,
    trace: str,
    streaming: bool = False,  # noqa: ARG001 - before the first byte a stream fails like any other request
    request: Request | None = None,
) -> WireError:
    headers = {"x-request-id": trace} | write_retry_headers(error)
    return WireError(STATUS[error.kind][0], encode({"error": coded_body(error, request)}), headers)


_DELTA_START = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":'


# --- the stream -------------------------------------------------------------------------------------------------------


class PoolStreamWriter:
    """Writes only the text of an answer. Reasoning is counted in the metrics and not shown."""

    def __init__(self, request: Request, trace: str) -> None:
        self._key, self._model = trace, request.model
        self._is_created = self._is_text = False
        self._text: list[str] = []

    def write(self, event: Event, choice: int = 0) -> bytes:  # noqa: ARG002 - this protocol has one choice
        if isinstance(event, BlockDelta):
            return self._write_delta(event.text)
        if isinstance(event, BlockStart):
            self._is_text = event.kind == "text"
        elif isinstance(event, Started):
            self._model = event.model
            return self._created()
        elif isinstance(event, Finished):
            response = write_response(self._key, self._model, "".join(self._text), event)
            metrics = _frame("response.metrics", metrics=write_metrics(event))
            return metrics + _frame("response.completed", response=response)
        elif isinstance(event, Failed):
            response = write_header(self._key, self._model) | {"error": coded_body(event.error)}
            return self._created() + _frame("response.failed", response=response)
        return b""

    def keepalive(self) -> bytes:
        return comment()

    def end(self) -> bytes:
        return b""

    def _created(self) -> bytes:
        if self._is_created:
            return b""
        self._is_created = True
        return _frame("response.created", response=write_header(self._key, self._model))

    def _write_delta(self, text: str) -> bytes:
        if not (text and self._is_text):
            return b""
        self._text.append(text)
        return _DELTA_START + encode(text) + b"}\n\n"


def _frame(name: str, **fields: Any) -> bytes:
    return frame(encode({"type": name, **fields}), name)


def writer(request: Request, trace: str) -> PoolStreamWriter:
    return PoolStreamWriter(request, trace)
