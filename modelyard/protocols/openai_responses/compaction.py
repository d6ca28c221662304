"""POST /v1/responses/compact: the model summarizes a conversation, and the client continues from the summary.

The gateway has the summary written (`gateway/compaction.py`). The reply has the newest texts of the user
as they were, and a `compaction` item with the summary, which `request.py` reads when the client sends it back.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from modelyard.core.errors import ModelyardError
from modelyard.core.events import Reply
from modelyard.core.protocol import EventWriter, WireError
from modelyard.core.request import SUMMARY, Compaction, ContextManagement, Message, Request, Text
from modelyard.protocols.common.json import decode, encode
from modelyard.protocols.common.openai_errors import write_http_error
from modelyard.protocols.common.reasoning_signature import pack_reasoning
from modelyard.protocols.openai_responses.client import ResponsesStreamReader, read_reply, write_items, write_request
from modelyard.protocols.openai_responses.errors import read_error
from modelyard.protocols.openai_responses.reply import ResponsesStreamWriter, write_usage
from modelyard.protocols.openai_responses.request import body_decoder, read_body

NAME = "openai_compaction"
PATHS: tuple[str, ...] = ("/v1/responses/compact",)

__all__ = ["read_error", "read_reply", "write_request"]

_KEPT_CHARS = 16_000  # of the user's newest texts


def read_request(body: bytes, headers: Mapping[str, str]) -> Request:
    request = read_body(decode(body_decoder, body), headers)
    return replace(request, stream=False, store=False, context=ContextManagement(compact_now=True))


def write_reply(replies: list[Reply], request: Request) -> bytes:
    reply = replies[0]
    summary = next(block.text for block in reply.blocks if isinstance(block.part, Compaction))
    key = reply.started.id
    kept = [
        {"id": f"msg_{key}_{n}", "status": "completed"} | item for n, item in enumerate(write_items(_kept(request)))
    ]
    compaction = {"id": f"cmp_{key}", "type": "compaction", "encrypted_content": pack_reasoning(summary)}
    return encode(
        {
            "id": f"resp_{key}",
            "object": "response.compaction",
            "created_at": reply.started.created,
            "output": [*kept, compaction],
            "usage": write_usage(reply.finished.usage),
        }
    )


def _kept(request: Request) -> tuple[Message, ...]:
    """The newest texts of the user. An earlier summary is not one: the new summary has what is in it."""
    kept: list[Message] = []
    room = _KEPT_CHARS
    for message in reversed(request.messages):
        texts = tuple(part for part in message.parts if isinstance(part, Text))
        if message.role == "user" and texts and not texts[0].text.startswith(SUMMARY):
            room -= sum(len(part.text) for part in texts)
            if room < 0:
                break
            kept.append(Message("user", texts))
    return tuple(kept[::-1])


def write_error(
    error: ModelyardError, *, trace: str, streaming: bool = False, request: Request | None = None
) -> WireError:
    del streaming  # there is no stream
    return write_http_error(error, trace, overflow_param="input", request=request)


def writer(request: Request, trace: str) -> EventWriter:
    return ResponsesStreamWriter(request, trace)


def reader() -> ResponsesStreamReader:
    return ResponsesStreamReader()
