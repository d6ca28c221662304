"""The pool dialect's request read: one `input` or several `messages`, and the settings in `decoding`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from modelyard.core.errors import InvalidRequest
from modelyard.core.request import Image, Message, Part, Reasoning, Request, Role, Sampling, Text
from modelyard.protocols.common.extensions import check_positive, read_constraint, read_priority, read_sampling
from modelyard.protocols.common.json import decode
from modelyard.protocols.common.openai_fields import read_session, read_stop, require_model
from modelyard.protocols.pool_responses.body import BODY, Decoding, ImageUrl, Item, PoolResponsesBody, Turn

DIALECT = "pool_responses"
ROLES = ("user", "assistant")
THINKING = {"default": None, "enabled": True, "disabled": False}
_NONE = Decoding()


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    """`headers` has lower-case names."""
    asked = decode(BODY, body)
    warnings = ["tools are left out: this dialect has none"] if asked.tools else []
    decoding = asked.decoding or _NONE
    return Request(
        model=require_model(asked.model),
        messages=_read_messages(asked),
        instructions=bool(asked.instructions),
        sampling=_read_decoding(decoding).over(read_sampling(asked)),
        max_tokens=decoding.max_tokens,
        stop=read_stop(decoding.stop, warnings),
        constraint=read_constraint(decoding) or read_constraint(asked),
        reasoning=_read_thinking(asked.thinking),
        stream=bool(asked.stream),
        lora_adapter=decoding.lora_adapter or asked.lora_adapter,
        chat_template_kwargs=_read_kwargs(asked),
        documents=asked.documents or (),
        priority=read_priority(asked),
        session=read_session(headers, None),
        user=asked.user,
        metadata=asked.metadata,
        store=False,
        allow_remote=bool(asked.allow_remote),
        dialect=DIALECT,
        warnings=tuple(warnings),
    )


# --- what is said -----------------------------------------------------------------------------------------------------


def _read_messages(asked: PoolResponsesBody) -> tuple[Message, ...]:
    lead = (Message("system", (Text(asked.instructions),)),) if asked.instructions else ()
    if asked.messages is None:
        return (*lead, Message("user", _read_content(asked.input, "input")))
    if asked.input is not None:
        raise InvalidRequest(
            "input and messages are both there: send the one or the other", param="messages", code="input_and_messages"
        )
    return (*lead, *_read_turns(asked.messages))


def _read_turns(turns: list[Turn]) -> list[Message]:
    if not turns:
        raise InvalidRequest("messages is empty: the last one must be the user's", param="messages", code="no_messages")
    for at, turn in enumerate(turns):
        if turn.role not in ROLES:
            told = f"messages[{at}].role is {turn.role[:40]!r}; it may be user or assistant. instructions hold the rest"
            raise InvalidRequest(told, param=f"messages[{at}].role", code="role_unsupported")
    if turns[-1].role != "user":
        told = "the last message must be the user's: there is nothing to answer"
        raise InvalidRequest(told, param=f"messages[{len(turns) - 1}].role", code="last_message_not_user")
    return [
        Message(cast("Role", turn.role), _read_content(turn.content, f"messages[{at}].content"))
        for at, turn in enumerate(turns)
    ]


def _read_content(content: str | list[Item] | None, path: str) -> tuple[Part, ...]:
    if not content:
        raise InvalidRequest(
            f"{path} is missing or empty: give a text or a list of items", param=path, code="input_required"
        )
    if isinstance(content, str):
        return (Text(content),)
    parts = [_read_item(item, f"{path}[{at}]") for at, item in enumerate(content)]
    texts = [part.text for part in parts if isinstance(part, Text)]
    return (Text("".join(texts)),) if len(texts) == len(parts) else tuple(parts)


def _read_item(item: Item, path: str) -> Text | Image:
    if item.type == "text":
        if item.text is None:
            raise InvalidRequest(f"{path}.text is missing", param=f"{path}.text", code="text_required")
        return Text(item.text)
    if item.type == "image_url":
        image = item.image_url if isinstance(item.image_url, ImageUrl) else ImageUrl(item.image_url or "")
        if not image.url:
            raise InvalidRequest(f"{path}.image_url.url is missing", param=f"{path}.image_url", code="image_required")
        return Image(image.url, image.detail)
    told = f"{path} is of type {item.type[:40]!r}; known are text and image_url"
    raise InvalidRequest(told, param=f"{path}.type", code="modality_unsupported")


# --- how it is to be answered -----------------------------------------------------------------------------------------


def _read_decoding(decoding: Decoding) -> Sampling:
    try:
        check_positive("max_tokens", decoding.max_tokens)
        check_positive("beam_size", decoding.beam_size)
        return read_sampling(decoding)
    except InvalidRequest as error:
        told, param = f"decoding.{error.message}", f"decoding.{error.param}"
        raise InvalidRequest(told, param=param, code="invalid_decoding") from None


def _read_thinking(mode: str | None) -> Reasoning:
    """Only the answer goes out on this wire. A mode that was named is a demand."""
    if mode is None or mode == "default":
        return Reasoning(visible=False)
    if mode not in THINKING:
        known = ", ".join(THINKING)
        raise InvalidRequest(f"thinking is {mode[:40]!r}; known are {known}", param="thinking", code="invalid_thinking")
    return Reasoning(enabled=THINKING[mode], visible=False, strict=True)


def _read_kwargs(asked: PoolResponsesBody) -> dict[str, Any]:
    codes = {"source_lang_code": asked.source_lang_code, "target_lang_code": asked.target_lang_code}
    return (asked.chat_template_kwargs or {}) | {name: code for name, code in codes.items() if code is not None}
